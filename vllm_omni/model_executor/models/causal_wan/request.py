# SPDX-License-Identifier: Apache-2.0
"""Everything a client may send with one chunk of a stream, checked: here and nowhere else.

Reads a request beside its session and returns `ChunkInputs`, or raises `RequestFailed` with the field, its value
and the allowed ones. Changes nothing, allocates nothing on the device, gives the same answer on every rank.
Held by tests/model_executor/models/causal_wan/test_causal_wan_pipeline.py.
"""

import msgspec
import torch

from vllm_omni.config import OmniConfig, parse_options
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.causal_wan.state import ChunkInputs, Source, Standing, StreamSession, StreamShape
from vllm_omni.model_executor.streaming.request import DEFAULT_SEED, check_unchanged, read_size
from vllm_omni.outputs import RequestFailed


class ChunkOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`DiffusionParams.options` of one chunk.

    source: `text` makes video from the prompt alone; `video` repaints the tensor `video` that comes with every chunk.
    Fixed by the stream's first chunk; None = as it is (`text` on a first one).
    """

    source: Source | None = None


def read_shape(params: DiffusionParams, config: CausalWanConfig, omni: OmniConfig) -> StreamShape:
    """Read the sizes that a stream's first chunk fixes. Raises `RequestFailed`."""
    height, width = read_size(params, config, omni)
    return StreamShape(height, width, params.output, _options(params).source or "text")


def read_chunk(request: DiffusionRequest, session: StreamSession, standing: Standing) -> ChunkInputs:
    """Check one chunk's request against its stream, as it stands before the chunk. Raises `RequestFailed`."""
    params = request.params
    session.window.check_fits(session.plan.frames(standing.chunk_index))
    check_unchanged(params, session.shape, {"options.source": (_options(params).source, session.shape.source)})
    _check_unused(params)
    unknown = sorted(set(request.tensors) - {"video"})
    if unknown:
        raise RequestFailed(
            "invalid_request",
            f"unknown tensors {unknown[:3]}; this model streams from text, or from the tensor 'video'",
        )
    prompt = standing.prompt if params.prompt is None else params.prompt
    if not prompt:
        raise RequestFailed("invalid_request", "prompt must not be empty; a stream's first chunk needs one")
    seed = standing.seed if params.seed is None else params.seed
    return ChunkInputs(
        prompt=prompt,
        seed=DEFAULT_SEED if seed is None else seed,
        video=_read_video(request.tensors.get("video"), session, standing.chunk_index),
    )


def _options(params: DiffusionParams) -> ChunkOptions:
    try:
        return parse_options(ChunkOptions, params.options, "options")
    except ValueError as error:
        raise RequestFailed("invalid_request", str(error)) from error


def _check_unused(params: DiffusionParams) -> None:
    for name, sent in (
        ("actions", params.actions),
        ("negative_prompt", params.negative_prompt),
        ("num_inference_steps", params.num_inference_steps),
        ("guidance_scale", params.guidance_scale),
    ):
        if sent is not None:
            raise RequestFailed(
                "invalid_request", f"{name} means nothing to this model (distilled, without a camera): leave it out"
            )


def _read_video(video: torch.Tensor | None, session: StreamSession, chunk_index: int) -> torch.Tensor | None:
    shape = session.shape
    expected = [len(session.plan.pixel_frames(chunk_index)), shape.height, shape.width, 3]
    if shape.source == "text":
        if video is not None:
            raise RequestFailed(
                "invalid_request",
                "this stream makes video from text; begin one with options {'source': 'video'} to repaint a video",
            )
        return None
    if video is None:
        raise RequestFailed("missing_video", f"this chunk needs its input frames: the tensor 'video', uint8 {expected}")
    if video.dtype != torch.uint8 or list(video.shape) != expected:
        raise RequestFailed(
            "invalid_video",
            f"video of chunk {chunk_index} must be uint8 {expected}, got {video.dtype} {list(video.shape)}",
        )
    return video
