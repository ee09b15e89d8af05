# SPDX-License-Identifier: Apache-2.0
"""`/v1/videos`: create, poll, list, download, cancel and delete video jobs (`jobs.py`)."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from fastapi import Request
from fastapi.responses import FileResponse, JSONResponse
from starlette.responses import Response

from vllm_omni.actions import MAX_IMAGES, ActionSpace
from vllm_omni.entrypoints.errors import (
    ApiError,
    EndpointError,
    from_failure,
    invalid,
    not_found,
    respond_to_errors,
)
from vllm_omni.entrypoints.limits.access import owner_of
from vllm_omni.entrypoints.openai.body import ParsedBody, read_body
from vllm_omni.entrypoints.openai.client_threads import ClientThreads
from vllm_omni.entrypoints.openai.engine_requests import (
    check_video_edit,
    plan_video,
    plan_video_edit,
)
from vllm_omni.entrypoints.openai.image_files import read_named_images, read_start_image
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.protocol import (
    JobError,
    Video,
    VideoDeleted,
    VideoList,
    VideoRequest,
    read_request,
)
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.openai.videos.clips import is_clip, read_clip
from vllm_omni.entrypoints.openai.videos.jobs import VideoJobs
from vllm_omni.entrypoints.openai.videos.store import JobRecord
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

POLL_AFTER_MS: Final = 500
_VARIANTS: Final = {
    "video": ("mp4", "video/mp4"),
    "thumbnail": ("webp", "image/webp"),
    "spritesheet": ("jpg", "image/jpeg"),
}
_MAX_LIST: Final = 100


class VideoRoutes:
    """The video routes of one API server process."""

    def __init__(
        self,
        jobs: VideoJobs,
        served: ServedModel,
        limits: MediaLimits,
        endpoint_limits: EndpointLimits,
        threads: ClientThreads,
    ) -> None:
        self._jobs, self._served = jobs, served
        self._limits, self._endpoint_limits, self._threads = limits, endpoint_limits, threads

    @respond_to_errors
    async def create(self, request: Request) -> Response:
        self._jobs.check_room()
        body = await read_body(request, self._limits.max_body_bytes)
        sources = _named_images(body)
        source = _reference(body)
        requested = read_request(VideoRequest, body.fields, body.is_form)
        self._check_names(sources)
        arrays: dict[str, np.ndarray] = {}
        if source is not None and is_clip(source):
            check_video_edit(requested, self._served)
            info = self._served.capabilities
            most = min(info.read_frames, info.max_num_frames)
            arrays["video"] = await self._threads.clip(
                request, read_clip, source, info.fps, most, "input_reference"
            )
            plan = plan_video_edit(requested, self._served, len(arrays["video"]))
        else:
            plan = plan_video(requested, self._served, has_image=source is not None)
            if source is not None:
                height, width = plan.sampling.height, plan.sampling.width
                arrays["image"] = await self._threads.image(
                    request, read_start_image, source, height, width, self._endpoint_limits
                )
        if sources:
            arrays |= await self._threads.image(
                request, read_named_images, sources, self._endpoint_limits
            )
        return _response(await self._jobs.submit(plan, arrays, owner_of(request)))

    def _check_names(self, sources: Mapping[str, Any]) -> None:
        """Raise ApiError (status 400) if the model does not accept images with these names."""
        world = self._served.world
        try:
            (StreamInfo(actions=ActionSpace()) if world is None else world).check_images(sources)
        except EndpointError as error:
            raise from_failure(error) from None

    @respond_to_errors
    async def retrieve(self, request: Request, video_id: str) -> Response:
        return _response(await self._known(request, video_id))

    @respond_to_errors
    async def list_jobs(self, request: Request) -> Response:
        limit, order = (
            request.query_params.get("limit", "20"),
            request.query_params.get("order", "desc"),
        )
        after = request.query_params.get("after")
        if (
            not (limit.isascii() and limit.isdecimal())
            or len(limit) > 6
            or not 1 <= int(limit) <= _MAX_LIST
        ):
            raise invalid(f"limit must be a whole number from 1 to {_MAX_LIST}", "limit")
        if order not in ("asc", "desc"):
            raise invalid("order must be 'asc' or 'desc'", "order")
        records = await self._off_loop(self._jobs.store.records, owner_of(request))
        if order == "desc":
            records.reverse()
        if after:
            ids = [record.id for record in records]
            if after not in ids:
                raise invalid("after names no video", "after")
            records = records[ids.index(after) + 1 :]
        page = records[: int(limit)]
        reply = VideoList(
            data=[as_video(record) for record in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(records) > len(page),
        )
        return JSONResponse(reply.model_dump())

    @respond_to_errors
    async def content(self, request: Request, video_id: str) -> Response:
        variant = request.query_params.get("variant", "video")
        if variant not in _VARIANTS:
            raise invalid(f"variant must be one of {', '.join(_VARIANTS)}", "variant")
        record = await self._known(request, video_id)
        if record.status == "failed":
            message = record.error["message"] if record.error else "the job failed"
            raise ApiError(422, f"Video generation failed: {message}", code="video_failed")
        if record.status != "completed":
            raise not_found(
                "Video is not ready yet, use GET /v1/videos/{video_id} to check status",
                code="not_ready",
            )
        if record.expires_s is not None and record.expires_s <= time.time():
            raise ApiError(410, "the video has expired", code="expired")
        suffix, media_type = _VARIANTS[variant]
        path = self._jobs.store.path(record.id, suffix)
        if not path.exists():
            raise ApiError(410, "the video's files have been removed", code="expired")
        return FileResponse(path, media_type=media_type, filename=path.name)

    @respond_to_errors
    async def delete(self, request: Request, video_id: str) -> Response:
        if await self._jobs.end(video_id, "delete", owner_of(request)) is None:
            raise _unknown()
        return JSONResponse(VideoDeleted(id=video_id).model_dump())

    @respond_to_errors
    async def cancel(self, request: Request, video_id: str) -> Response:
        record = await self._jobs.end(video_id, "cancel", owner_of(request))
        if record is None:
            raise _unknown()
        return _response(record)

    async def _known(self, request: Request, video_id: str) -> JobRecord:
        """Return the record of the job `video_id` if the job belongs to the requesting client.

        Raises:
            ApiError: Status 404 if the client has no job with this id.
        """
        record = await self._off_loop(self._jobs.store.read_record, video_id, owner_of(request))
        if record is None:
            raise _unknown()
        return record

    async def _off_loop(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads.executor, function, *args
        )


def as_video(record: JobRecord) -> Video:
    """Convert a job record to OpenAI's video object."""
    return Video(
        id=record.id,
        model=record.model,
        prompt=record.prompt,
        status=record.status,
        progress=record.progress,
        seconds=record.seconds,
        size=record.size,
        created_at=int(record.created_s),
        completed_at=None if record.completed_s is None else int(record.completed_s),
        expires_at=None if record.expires_s is None else int(record.expires_s),
        error=None if record.error is None else JobError(**record.error),
        fps=record.fps,
        num_frames=record.num_frames,
        seed=record.seed,
        inference_time_s=record.inference_time_s,
        world_poses=record.world_poses,
    )


def _response(record: JobRecord) -> Response:
    headers = {} if record.is_terminal else {"openai-poll-after-ms": str(POLL_AFTER_MS)}
    return JSONResponse(as_video(record).model_dump(), headers=headers)


def _unknown() -> ApiError:
    return not_found("no such video", "video_id")


def _named_images(body: ParsedBody) -> dict[str, Any]:
    """Return the named images in a request body, each as file bytes or a `data:` URL, and remove
    the `images` field from the body's fields.
    """
    given = body.fields.pop("images", {})
    if not isinstance(given, dict) or len(given) > MAX_IMAGES:
        raise invalid(f"images must be at most {MAX_IMAGES} images by name", "images")
    sources: dict[str, Any] = {}
    for name, value in given.items():
        sources[name] = value.get("image_url") if isinstance(value, dict) else value
        if not isinstance(sources[name], str) or not sources[name].startswith("data:"):
            raise invalid(
                'an image must be {"image_url": "data:image/...;base64,..."}', f"images.{name}"
            )
    for key, uploads in body.files.items():
        if name := _image_name(key):
            if name in sources or len(uploads) > 1:
                raise invalid(f"send one image of the name {name!r}", "images")
            sources[name] = uploads[0]
    return sources


def _image_name(key: str) -> str:
    """Return NAME for a form key `images[NAME]`, or an empty string for any other key."""
    return key[7:-1] if key.startswith("images[") and key.endswith("]") else ""


def _reference(body: ParsedBody) -> Any:
    """Return a request's start image or clip, and remove it from the body's fields.

    Returns:
        Bytes of an uploaded file, a `data:` URL, or None.
    """
    files = {key: uploads for key, uploads in body.files.items() if not _image_name(key)}
    uploads = files.pop("input_reference", [])
    if files:
        raise invalid(
            f"Unknown file: {next(iter(files))!r}; allowed: input_reference, images[NAME]",
            next(iter(files)),
        )
    if len(uploads) > 1:
        raise invalid("send one input_reference", "input_reference")
    reference = body.fields.pop("input_reference", None)
    if reference is None:
        return uploads[0] if uploads else None
    named = isinstance(reference, dict) and set(reference) in ({"image_url"}, {"video_url"})
    url = next(iter(reference.values())) if named else reference
    if uploads or not isinstance(url, str) or not url.startswith("data:"):
        raise invalid(
            'input_reference must be a file, {"image_url": "data:image/...;base64,..."} or '
            '{"video_url": '
            '"data:video/...;base64,..."}; this server fetches no URLs',
            "input_reference",
        )
    return url
