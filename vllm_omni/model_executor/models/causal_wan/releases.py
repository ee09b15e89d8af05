# SPDX-License-Identifier: Apache-2.0
"""The published causal Wan 2.1 networks: where each lies in a directory, and the settings it was trained with.

A training checkpoint lies in a Wan 2.1 T2V directory and is known by the name of its file; one under another name is
served with the defaults of the configuration. Names, wrappers and settings are those of the public inference code and
configurations of each release. Only a table: `checkpoint.py` looks, `weights.py` loads, `hub.py` fetches.
Held by tests/model_executor/models/causal_wan/test_causal_wan_releases.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATE_KEYS = ("generator_ema", "generator", "ema", "state_dict", "model", "module")
"""Where a training checkpoint (`.pt`) keeps the network, best first; without any, the file is the network itself."""

LORA_KEYS = ("generator_lora",)
"""The same of a LoRA; without it, the file is the LoRA itself."""


@dataclass(frozen=True)
class Release:
    """One published network.

    download_name: for `vllm-omni download`. files: places below the checkpoint directory, best first.
    state_keys: wrappers of the network that its own code evaluates, best first. loras: places of a LoRA that belongs to
    it and is merged into it when loaded. transformer: keys of a `config.json` (window, sinks, chunk) that its directory
    leaves out. options: defaults of `CausalWanOptions`. shift: of the table of timesteps. warps_steps: whether a step s
    is entry 1000 - s of that table, or the timestep s itself. limits: what its own sampler does and ours does not.
    """

    download_name: str
    files: tuple[str, ...]
    state_keys: tuple[str, ...] = STATE_KEYS
    loras: tuple[str, ...] = ()
    transformer: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    shift: float = 5.0
    warps_steps: bool = True
    limits: str | None = None

    def find(self, root: Path) -> Path | None:
        """The network's file below `root`; None = it is not there."""
        return next((root / name for name in self.files if (root / name).is_file()), None)

    def find_lora(self, root: Path) -> Path | None:
        """The LoRA's file below `root`; None = it is not there."""
        return next((root / name for name in self.loras if (root / name).is_file()), None)


OTHER = Release("causal_wan", ())
"""A network under a name of its own, or in diffusers' folders."""

RELEASES = (
    Release(
        "causal_wan",  # Self-Forcing
        ("checkpoints/self_forcing_dmd.pt", "checkpoints/self_forcing_sid.pt", "self_forcing_dmd.pt"),
    ),
    Release(
        "causvid",
        ("autoregressive_checkpoint/model.pt",),
        options={"denoising_steps": [1000.0, 757.0, 522.0]},
        shift=8.0,
        warps_steps=False,
    ),
    Release("causvid_4_steps", ("autoregressive_checkpoint_warp_4step_cfg2/model.pt",), shift=8.0),
    Release("stream_diffusion_v2", ("wan_causal_dmd_v2v/model.pt", "wan_causal_dmd_v2v_14b/model.pt")),
    Release(
        "longlive",
        ("models/longlive_base.pt", "longlive_base.pt"),
        state_keys=("generator", *STATE_KEYS),  # its code evaluates the network itself, not the average
        loras=("models/lora.pt", "lora.pt"),
        transformer={"local_attn_size": 12, "sink_size": 3, "num_frame_per_block": 3},
        limits="a new prompt leaves the K/V of earlier frames as they are (omni.model.prompt_switch: recompute)",
    ),
    Release(
        "krea_realtime_14b",
        ("krea-realtime-video-14b.safetensors", "checkpoints/krea-realtime-video-14b.safetensors"),
        transformer={"local_attn_size": 6, "sink_size": 0, "num_frame_per_block": 3},
        limits="the K/V of the window are not recomputed from re-encoded frames, and attention to them has no bias",
    ),
    Release(
        "reward_forcing",
        ("rewardforcing.pt", "checkpoints/rewardforcing.pt"),
        transformer={"local_attn_size": 12, "sink_size": 3, "num_frame_per_block": 3},
        limits="sinks stay as they were made; frames that leave the window are not averaged into them",
    ),
    Release(
        "rolling_forcing",
        ("checkpoints/rolling_forcing_dmd.pt", "rolling_forcing_dmd.pt"),
        transformer={"local_attn_size": 21, "sink_size": 3, "num_frame_per_block": 3},
        options={"denoising_steps": [1000.0, 800.0, 600.0, 400.0, 200.0]},
        limits="chunks are denoised one after the other, not together in a rolling window of rising noise",
    ),
)
"""The names in `files` of different releases differ, so their order does not matter."""


def find_release(root: Path) -> tuple[Release, Path] | None:
    """The release whose network lies below `root`, and its file; None = none does."""
    for release in RELEASES:
        if (place := release.find(root)) is not None:
            return release, place
    return None


def find_unnamed(root: Path) -> Path | None:
    """The only `.pt` of a directory (or of its `checkpoints/`), a training checkpoint under a name of its own."""
    for folder in (root, root / "checkpoints"):
        files = sorted(folder.glob("*.pt")) if folder.is_dir() else []
        if len(files) == 1:
            return files[0]
    return None


def release_named(name: str) -> Release:
    """The release of a `download_name`."""
    return next((release for release in RELEASES if release.download_name == name), OTHER)
