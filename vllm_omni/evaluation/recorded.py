# SPDX-License-Identifier: Apache-2.0
"""Reads the keys held in recorded sessions."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vllm_omni.actions import as_frame
from vllm_omni.config import OmniConfig
from vllm_omni.evaluation.steering import Controls
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.session_files.recording import RecordedChunk, RecordingHeader
from vllm_omni.worlds.description import read_description, with_defaults
from vllm_omni.worlds.movement import YAW_DEGREES

_FOCAL_PIXELS: Final = 500.0
"""Focal length in pixels for models that define none. The value is the same as in `StreamInfo`."""


def recorded_controls(header: RecordingHeader, chunks: Sequence[RecordedChunk]) -> Controls | None:
    """Return the keys of a recorded session.

    The result is None if the model has no controls, if the recording has fewer than two chunks, or
    if a chunk has no keys or no outcome.

    Args:
        header: Header of the recording.
        chunks: The finished chunks of the session, in order, with their outcomes.
    """
    family = get_family(header.family)
    counts = [chunk.outcome.num_frames for chunk in chunks if chunk.outcome is not None]
    keys = [
        ["".join(sorted(as_frame(entry).buttons)) for entry in chunk.params.actions or ()]
        for chunk in chunks
    ]
    if family.action_space is None or len(counts) < max(2, len(chunks)) or not all(keys):
        return None
    stride = counts[1] // len(keys[1])
    model = Path(header.model)
    config, world = family.hf_config(model), read_description(model)
    options = with_defaults(header.additional_config, world, family.size_of(config))
    omni = OmniConfig.from_additional_config(options)
    info = {} if family.stream_info is None else family.stream_info(config, omni)
    own = None if world is None else world.focal
    return Controls(
        keys=[held for chunk in keys for held in chunk],
        first_frames=counts[0] - stride * (len(keys[0]) - 1),
        later_frames=stride,
        focal=own or info.get("key_focal", _FOCAL_PIXELS) / omni.width,
        turn_degrees=YAW_DEGREES if family.action_space(config, omni).pose else None,
    )
