# SPDX-License-Identifier: Apache-2.0
"""Synchronous image routes: `/v1/images/generations`, `/v1/images/edits` and
`/v1/files/{id}/content`.

If a client disconnects, its engine requests are aborted.
"""

import asyncio
import base64
import time
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from fastapi import Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.responses import Response

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.errors import (
    ApiError,
    from_failure,
    invalid,
    not_found,
    respond_to_errors,
)
from vllm_omni.entrypoints.limits.access import owner_of
from vllm_omni.entrypoints.openai.body import ParsedBody, read_body
from vllm_omni.entrypoints.openai.client_threads import ClientThreads, until_disconnected
from vllm_omni.entrypoints.openai.engine_requests import ImageJob, plan_images, unsupported
from vllm_omni.entrypoints.openai.image_files import (
    MEDIA_TYPES,
    encode_image_file,
    read_mask,
    read_upload,
)
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.protocol import (
    Format,
    ImageData,
    ImageEditRequest,
    ImageGenerationRequest,
    ImagesReply,
    read_request,
)
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.openai.videos.store import MediaStore
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.telemetry.metrics import endpoint_metrics, log_event
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed
from vllm_omni.seeds import nth_seed

ENDPOINT: Final = "images"
_NO_USAGE: Final = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
"""Token usage in image replies. The `openai` client requires this field, although diffusion models
do not count tokens.
"""

T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    """A validated image call."""

    request: ImageGenerationRequest
    """The client's request."""
    plan: ImageJob
    """Parameters of the call, from which its engine requests are built."""
    arrays: dict[str, np.ndarray]
    """Input arrays by name."""
    output_format: Format
    """File format of the images in the reply."""
    base_url: str
    """Server URL, from which links to files are built."""
    principal: str
    """Principal of the client that made the call."""
    is_edit: bool
    """Whether the call is an edit."""


class ImageRoutes:
    """The image routes of one API server process."""

    def __init__(
        self,
        engine: OmniEngine,
        served: ServedModel,
        store: MediaStore,
        limits: MediaLimits,
        endpoint_limits: EndpointLimits,
        threads: ClientThreads,
    ) -> None:
        self._engine, self._served, self._store = engine, served, store
        self._limits, self._endpoint_limits, self._threads = limits, endpoint_limits, threads
        self._semaphore = asyncio.Semaphore(served.max_sessions)
        self._num_calls = 0

    @property
    def is_full(self) -> bool:
        return self._num_calls >= self._limits.max_image_requests

    # -- routes ------------------------------------------------------------------------------------

    @respond_to_errors
    async def generations(self, request: Request) -> Response:
        body = await read_body(request, self._limits.max_body_bytes)
        if body.files:
            raise invalid(
                "this route accepts no files; send them to /v1/images/edits", next(iter(body.files))
            )
        requested = read_request(ImageGenerationRequest, body.fields, body.is_form)
        plan = plan_images(requested, self._served)
        return await self._response(request, requested, plan, {}, is_edit=False)

    @respond_to_errors
    async def edits(self, request: Request) -> Response:
        body = await read_body(request, self._limits.max_body_bytes)
        sources, mask = _edit_inputs(body)
        requested = read_request(ImageEditRequest, body.fields, body.is_form)
        if not self._served.capabilities.edits_images:
            raise unsupported(self._served, "edit images")
        if mask is not None and not self._served.capabilities.mask:
            raise unsupported(self._served, "use a mask", "mask")
        most = self._served.capabilities.input_images
        if not 1 <= len(sources) <= most:
            raise invalid(f"{len(sources)} images: this model accepts 1 to {most}", "image")
        arrays = await self._threads.image(request, self._read_inputs, sources, mask)
        height, width = arrays["image"].shape[:2]
        plan = plan_images(requested, self._served, input_size=(width, height))
        return await self._response(request, requested, plan, arrays, is_edit=True)

    @respond_to_errors
    async def file_content(self, request: Request, file_id: str) -> Response:
        path = await self._off_loop(self._store.find_file, file_id, owner_of(request))
        if path is None:
            raise not_found("no such file; files are stored for a limited time", "file_id")
        return FileResponse(path, media_type=MEDIA_TYPES[path.suffix[1:]])

    # -- one call ----------------------------------------------------------------------------------

    def _read_inputs(self, sources: list[Any], mask: bytes | None) -> dict[str, np.ndarray]:
        arrays = {
            "image" if number == 0 else f"image_{number}": read_upload(
                source, "image", self._endpoint_limits
            )
            for number, source in enumerate(sources)
        }
        if mask is not None:
            height, width = arrays["image"].shape[:2]
            arrays["mask"] = read_mask(mask, height, width, self._endpoint_limits)
        return arrays

    async def _response(
        self,
        request: Request,
        requested: ImageGenerationRequest,
        plan: ImageJob,
        arrays: dict[str, np.ndarray],
        *,
        is_edit: bool,
    ) -> Response:
        if self.is_full:
            endpoint_metrics().request_done(ENDPOINT, "refused", 0.0)
            raise ApiError(
                429,
                f"{self._num_calls} image calls are running or waiting; try again later",
                code="too_many_requests",
                retry_after_s=2,
            )
        output_format, url = requested.output_format or "png", str(request.base_url)
        call = _Call(requested, plan, arrays, output_format, url, owner_of(request), is_edit)
        if requested.stream:
            return StreamingResponse(self._events(call), media_type="text/event-stream")
        return await until_disconnected(request, self._whole(call))

    async def _whole(self, call: _Call) -> Response:
        with self._counted(call):
            groups = await _all([self._images(call, params) for params in call.plan.requests()])
            images = [image for group in groups for image in group]
            data = [await self._returned(call, files) for files, _ in images]
        width, height = images[0][1]
        quality = call.request.quality
        reply = ImagesReply(
            created=int(time.time()),
            data=data,
            output_format=call.output_format,
            quality=quality if quality not in (None, "auto", "standard", "hd") else None,
            size=f"{width}x{height}",
            seed=call.plan.sampling.seed,
        )
        return JSONResponse(reply.model_dump(exclude_none=True))

    async def _events(self, call: _Call) -> AsyncGenerator[bytes]:
        """Yield server-sent events, one for each finished image.

        The events have the fields of OpenAI's events, and the seed of the image.
        """
        kind = "image_edit.completed" if call.is_edit else "image_generation.completed"
        try:
            with self._counted(call):
                for params in call.plan.requests():
                    assert params.seed is not None
                    images = await self._images(call, params)
                    for number, (data, (width, height)) in enumerate(images):
                        event = {
                            "type": kind,
                            "b64_json": base64.b64encode(data).decode(),
                            "background": "opaque",
                            "created_at": int(time.time()),
                            "output_format": call.output_format,
                            "quality": call.request.quality or "auto",
                            "size": f"{width}x{height}",
                            "usage": _NO_USAGE,
                            "seed": nth_seed(params.seed, number),
                        }
                        yield _event(kind, event)
        except RequestFailed as failure:
            yield _event("error", msgspec.json.decode(bytes(from_failure(failure).response().body)))

    async def _images(
        self, call: _Call, params: DiffusionParams
    ) -> list[tuple[bytes, tuple[int, int]]]:
        """Run one engine request. Return `(file, (width, height))` for each of its images."""
        async with self._semaphore:
            started_s = time.monotonic()
            meta, results = await self._engine.run_when_room(
                params,
                call.arrays,
                timeout_s=self._limits.request_timeout_s,
                wait_s=self._limits.image_wait_s,
            )
        if "images" not in results or len(results["images"]) != params.num_images:
            raise RequestFailed("engine_error", "the model did not return the requested images")
        endpoint_metrics().stages(
            ENDPOINT, meta.get("timings_ms", {}), time.monotonic() - started_s
        )
        requested = call.request
        return [
            (
                await self._off_loop(
                    encode_image_file,
                    image_HWC,
                    call.output_format,
                    requested.output_compression,
                    requested.quality,
                ),
                (image_HWC.shape[1], image_HWC.shape[0]),
            )
            for image_HWC in results["images"]
        ]

    async def _returned(self, call: _Call, data: bytes) -> ImageData:
        if call.request.response_format == "url":
            file_id = await self._off_loop(
                self._store.add_file, data, call.output_format, call.principal
            )
            return ImageData(url=f"{call.base_url}v1/files/{file_id}/content")
        return ImageData(b64_json=base64.b64encode(data).decode())

    @contextmanager
    def _counted(self, call: _Call) -> Iterator[None]:
        """Count a call as running for the duration of the `with` block, and record its outcome."""
        started_s, status, code = time.monotonic(), "failed", None
        waiting = endpoint_metrics().waiting.labels(ENDPOINT, "in_progress")
        self._num_calls += 1
        waiting.inc()
        try:
            yield
            status = "completed"
        except (asyncio.CancelledError, GeneratorExit):
            status = "cancelled"
            raise
        except RequestFailed as failure:
            code = failure.code
            raise
        finally:
            self._num_calls -= 1
            waiting.dec()
            lasted_s = time.monotonic() - started_s
            endpoint_metrics().request_done(ENDPOINT, status, lasted_s)
            sampling = call.plan.sampling
            log_event(
                "image_call",
                edit=call.is_edit,
                status=status,
                code=code,
                n=call.plan.n,
                size=f"{sampling.width}x{sampling.height}",
                lasted_s=lasted_s,
            )

    async def _off_loop(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads.executor, function, *args
        )


def _edit_inputs(body: ParsedBody) -> tuple[list[Any], bytes | None]:
    """Return an edit's images in the client's order, and its mask if there is one.

    The `images` field is removed from the body's fields.
    """
    files = dict(body.files)
    sources: list[Any] = [*files.pop("image", [])]
    masks = files.pop("mask", [])
    if files:
        raise invalid(
            f"Unknown file: {next(iter(files))!r}; allowed: image, mask", next(iter(files))
        )
    if len(masks) > 1:
        raise invalid("send one mask", "mask")
    listed = body.fields.pop("images", None)
    if listed is not None:
        if not isinstance(listed, list) or not all(isinstance(item, dict) for item in listed):
            raise invalid(
                'images must be a list of {"image_url": "data:image/...;base64,..."}', "images"
            )
        sources += [_inline(item, "images") for item in listed]
    if not sources:
        raise invalid("Missing required parameter: 'image'", "image", "missing_required_parameter")
    return sources, masks[0] if masks else None


def _inline(reference: dict[str, Any], param: str) -> str:
    """Return the `data:` URL of a JSON image reference. Other URLs are refused, because the server
    fetches no URLs.
    """
    url = reference.get("image_url")
    if set(reference) != {"image_url"} or not isinstance(url, str) or not url.startswith("data:"):
        raise invalid(
            f'{param}: only {{"image_url": "data:image/...;base64,..."}} is accepted; this server '
            "fetches no URLs",
            param,
        )
    return url


def _event(kind: str, payload: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(payload))


async def _all(work: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently. If one fails, the others are cancelled and its exception is
    raised.
    """
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise
