# SPDX-License-Identifier: Apache-2.0
"""Recorded speed and quality of presets, for the log line at startup and `vllm-omni plan`.

Speed is recorded in `measured.json` (rows with a `preset`), and quality in `preset_quality.json`.
The records do not apply to servers with another network, another video size or additional options.
tests/planning/test_measured.py compares the rows with the result files that they cite.
"""

from functools import cache
from importlib.resources import files
from typing import Any, Final

import msgspec

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.registry import ModelFamily
from vllm_omni.model_executor.presets import PresetName, ServedPreset
from vllm_omni.planning.measured import find_runs
from vllm_omni.planning.memory import GPU_BYTES
from vllm_omni.planning.stream_model import StreamModel

_FILE: Final = "preset_quality.json"
_UNKNOWN: Final = "not measured"


class PresetQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Quality of a preset on the demo world."""

    family: str
    """Name of the model family."""
    preset: PresetName
    """Name of the preset."""
    psnr_db: float
    """PSNR in dB, relative to the frames of the world's renderer."""
    sharpness: float
    """Sharpness relative to the frames of the world's renderer."""
    source: str
    """Name of the result file in `benchmarks/results`."""


@cache
def all_qualities() -> tuple[PresetQuality, ...]:
    """Return all recorded quality measurements."""
    return msgspec.json.decode(
        files(__package__).joinpath(_FILE).read_bytes(), type=tuple[PresetQuality, ...]
    )


def speed_of_record(model: StreamModel, preset: PresetName) -> str:
    """Return text that states a preset's frame rates on one GPU of each kind, or that no frame rate
    was measured.
    """
    runs = [run for gpu in GPU_BYTES for run in find_runs(model, gpu, 1) if run.preset == preset]
    return ", ".join(f"{run.fps:.1f} FPS on one {run.gpu}" for run in runs) or _UNKNOWN


def quality_of_record(family: str, preset: PresetName) -> str:
    """Return text that states a preset's quality on the demo world, or that the quality was not
    measured.
    """
    rows = [row for row in all_qualities() if (row.family, row.preset) == (family, preset)]
    shown = (f"PSNR {row.psnr_db:.1f} dB, sharpness {row.sharpness:.2f}" for row in rows)
    return ", ".join(shown) or _UNKNOWN


def preset_line(
    preset: ServedPreset,
    family: ModelFamily,
    path: str,
    hf_config: dict[str, Any],
    omni: OmniConfig,
) -> str:
    """Return the line that a server logs about its preset at startup.

    Args:
        preset: The preset of the server, with the precision that it has set.
        family: Family of the model.
        path: Checkpoint directory.
        hf_config: vLLM's config for the checkpoint.
        omni: Server options.
    """
    speed = _UNKNOWN
    if family.plan is not None and family.size_of(hf_config) == (omni.height, omni.width):
        model = family.plan.of_checkpoint(path, hf_config[family.name], {})
        speed = speed_of_record(model, preset.name)
    replaced = f"; without {', '.join(preset.replaced)}, set otherwise" if preset.replaced else ""
    return (
        f"preset {preset.name}: {preset.described}{replaced}; speed: {speed}; "
        f"quality: {quality_of_record(family.name, preset.name)}"
    )
