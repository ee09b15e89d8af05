# SPDX-License-Identifier: Apache-2.0
"""Validate everything that a client can send with a chunk request.

The functions read a request and its session, and return the validated values. If a value is
invalid, they raise a `RequestFailed` that contains the field, its value and the allowed values. The
functions have no side effects, allocate no device memory, and return the same result on every rank.
"""

from collections.abc import Mapping

import msgspec
import torch

from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions
from vllm_omni.model_executor.models.causal_wan.state import (
    ChunkInputs,
    StreamPosition,
    StreamSession,
)
from vllm_omni.model_executor.models.wan.vae.latents import LATENT_CHANNELS, VAE_SPATIAL
from vllm_omni.model_executor.streaming.request import (
    check_tensors,
    check_unchanged,
    check_unused,
    read_image,
    read_seed,
    read_size,
)
from vllm_omni.model_executor.streaming.session import SessionShape, Source
from vllm_omni.outputs import RequestFailed

_TENSORS = ("video", "image", "latents")


class ChunkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`DiffusionParams.options` of one chunk."""

    source: Source | None = None
    """`text`: generate video from the prompt alone. `video`: repaint the `video` tensor that each
    chunk request contains. The first chunk sets the stream's source. Default: `text` for the first
    chunk, afterwards the stream's source.
    """


def read_shape(params: DiffusionParams, config: CausalWanConfig, omni: OmniConfig) -> SessionShape:
    """Return the sizes that a stream's first chunk sets. Raises `RequestFailed` if they are
    invalid.
    """
    height, width = read_size(params, config, omni)
    return SessionShape(height, width, params.output, source=_options(params).source or "text")


def read_chunk(
    request: DiffusionRequest,
    session: StreamSession,
    position: StreamPosition,
    served: CausalWanOptions,
) -> ChunkInputs:
    """Validate a chunk request against the state of its stream before the chunk. Raises
    `RequestFailed` if the request is invalid.
    """
    params = request.params
    session.window.check_frames(session.plan.frames(position.chunk_index))
    check_unchanged(
        params, session.shape, {"options.source": (_options(params).source, session.shape.source)}
    )
    check_unused(params, actions=False)
    check_tensors(request.tensors, _TENSORS)
    prompt = position.prompt if params.prompt is None else params.prompt
    if not prompt:
        raise RequestFailed(
            "invalid_request", "prompt must not be empty; a stream's first chunk needs one"
        )
    return ChunkInputs(
        prompt=prompt,
        seed=read_seed(params, position.seed),
        image=_read_image(request.tensors, session, position.chunk_index, served),
        latents=_read_latents(
            request.tensors.get("latents"), session, position.chunk_index, served
        ),
        video=_read_video(request.tensors.get("video"), session, position.chunk_index),
    )


def _options(params: DiffusionParams) -> ChunkOptions:
    try:
        return parse_options(ChunkOptions, params.options, "options")
    except ValueError as error:
        raise RequestFailed("invalid_request", str(error)) from error


def _read_video(
    video: torch.Tensor | None, session: StreamSession, chunk_index: int
) -> torch.Tensor | None:
    shape = session.shape
    expected = [len(session.plan.pixel_frames(chunk_index)), shape.height, shape.width, 3]
    if shape.source == "text":
        if video is not None:
            raise RequestFailed(
                "invalid_request",
                "this stream makes video from text; begin one with options {'source': 'video'} to "
                "repaint a video",
            )
        return None
    if video is None:
        raise RequestFailed(
            "missing_video",
            f"this chunk needs its input frames: the tensor 'video', uint8 {expected}",
        )
    if video.dtype != torch.uint8 or list(video.shape) != expected:
        raise RequestFailed(
            "invalid_video",
            f"video of chunk {chunk_index} must be uint8 {expected}, got {video.dtype} "
            f"{list(video.shape)}",
        )
    return video


def _read_image(
    tensors: Mapping[str, torch.Tensor],
    session: StreamSession,
    chunk_index: int,
    served: CausalWanOptions,
) -> torch.Tensor | None:
    image = tensors.get("image")
    if image is None:
        return None
    _check_may_be_given("image", session, served)
    if chunk_index > 0 or "latents" in tensors:
        raise RequestFailed(
            "invalid_request",
            "an image is a stream's first frame: send it alone, with the first chunk",
        )
    if not served.video_input:
        raise RequestFailed(
            "invalid_request", "this server cannot encode a picture (omni.model.video_input)"
        )
    return read_image(image, first_chunk=False)


def _read_latents(
    latents: torch.Tensor | None, session: StreamSession, chunk_index: int, served: CausalWanOptions
) -> torch.Tensor | None:
    if latents is None:
        return None
    _check_may_be_given("latents", session, served)
    most = len(session.plan.frames(chunk_index))
    cells = [session.shape.height // VAE_SPATIAL, session.shape.width // VAE_SPATIAL]
    shape = list(latents.shape)
    fits = (
        latents.dim() == 4
        and [shape[0], *shape[2:]] == [LATENT_CHANNELS, *cells]
        and 1 <= shape[1] <= most
    )
    if not (fits and latents.dtype == torch.float32 and bool(torch.isfinite(latents).all())):
        raise RequestFailed(
            "invalid_latents",
            f"latents of chunk {chunk_index} must be finite float32 [{LATENT_CHANNELS}, 1 to "
            f"{most}, {cells[0]}, "
            f"{cells[1]}], got {latents.dtype} {shape}",
        )
    return latents


def _check_may_be_given(name: str, session: StreamSession, served: CausalWanOptions) -> None:
    if session.shape.source == "video":
        raise RequestFailed("invalid_request", f"this stream repaints a video: leave {name} out")
    if served.cache != "strict":
        raise RequestFailed(
            "unsupported",
            f"{name} needs omni.model.cache 'strict', this server has {served.cache!r}",
        )
