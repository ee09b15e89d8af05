# SPDX-License-Identifier: Apache-2.0
"""The published causal Wan 2.1 networks: their file paths and the settings that they were trained
with.

A training checkpoint is placed in a Wan 2.1 T2V directory and is identified by its file name. A
checkpoint with any other name uses the default options. Names, wrappers and settings come from the
public inference code and configurations of each release. This module is only a table: `layout.py`
locates the files, `weights.py` loads them and `hub.py` downloads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATE_KEYS = ("generator_ema", "generator", "ema", "state_dict", "model", "module")
"""Keys that may hold the network in a training checkpoint (`.pt`), in order of preference. If the
file contains none of these keys, its top level is the network.
"""

LORA_KEYS = ("generator_lora",)
"""Keys that may hold a LoRA in a training checkpoint. If the file contains none of these keys, its
top level is the LoRA."""


@dataclass(frozen=True)
class PublishedNetwork:
    """A published network and its settings."""

    download_name: str
    """Network name for `vllm-omni download`."""
    files: tuple[str, ...]
    """Possible network paths in the checkpoint directory, in order of preference."""
    state_keys: tuple[str, ...] = STATE_KEYS
    """Keys that may hold the network that the release's own code runs, in order of preference."""
    loras: tuple[str, ...] = ()
    """Possible paths of the LoRA to merge into the network at load time, in order of preference."""
    transformer: Mapping[str, Any] = field(default_factory=dict)
    """Values for keys that are missing from the release's `config.json` (window, sink frames,
    chunk).
    """
    options: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of `CausalWanOptions` for this network."""
    shift: float = 5.0
    """Shift of the timestep table."""
    warps_steps: bool = True
    """Whether step s refers to entry 1000 - s of the timestep table rather than to timestep s."""
    limits: str | None = None
    """Features of the release's own sampler that this package does not implement."""

    def find(self, root: Path) -> Path | None:
        """Return the network's path in `root`, or None if it does not exist."""
        return next((root / name for name in self.files if (root / name).is_file()), None)

    def find_lora(self, root: Path) -> Path | None:
        """Return the LoRA's path in `root`, or None if it does not exist."""
        return next((root / name for name in self.loras if (root / name).is_file()), None)


OTHER = PublishedNetwork("causal_wan", ())
"""Placeholder for a network that has any other file name or uses the diffusers folders."""

RELEASES = (
    PublishedNetwork(
        "causal_wan",  # Self-Forcing
        (
            "checkpoints/self_forcing_dmd.pt",
            "checkpoints/self_forcing_sid.pt",
            "self_forcing_dmd.pt",
        ),
    ),
    PublishedNetwork(
        "causvid",
        ("autoregressive_checkpoint/model.pt",),
        options={"denoising_steps": [1000.0, 757.0, 522.0]},
        shift=8.0,
        warps_steps=False,
    ),
    PublishedNetwork(
        "causvid_4_steps", ("autoregressive_checkpoint_warp_4step_cfg2/model.pt",), shift=8.0
    ),
    PublishedNetwork(
        "stream_diffusion_v2", ("wan_causal_dmd_v2v/model.pt", "wan_causal_dmd_v2v_14b/model.pt")
    ),
    PublishedNetwork(
        "longlive",
        ("models/longlive_base.pt", "longlive_base.pt"),
        # The release's code runs the network itself, not its moving average.
        state_keys=("generator", *STATE_KEYS),
        loras=("models/lora.pt", "lora.pt"),
        transformer={"local_attn_size": 12, "sink_size": 3, "num_frame_per_block": 3},
        limits="a new prompt leaves the K/V of earlier frames as they are "
        "(omni.model.prompt_switch: recompute)",
    ),
    PublishedNetwork(
        "krea_realtime_14b",
        ("krea-realtime-video-14b.safetensors", "checkpoints/krea-realtime-video-14b.safetensors"),
        transformer={"local_attn_size": 6, "sink_size": 0, "num_frame_per_block": 3},
        limits="the K/V of the window are not recomputed from re-encoded frames, and attention to "
        "them has no bias",
    ),
    PublishedNetwork(
        "reward_forcing",
        ("rewardforcing.pt", "checkpoints/rewardforcing.pt"),
        transformer={"local_attn_size": 12, "sink_size": 3, "num_frame_per_block": 3},
        limits="sinks stay as they were made; frames that leave the window are not averaged "
        "into them",
    ),
    PublishedNetwork(
        "rolling_forcing",
        ("checkpoints/rolling_forcing_dmd.pt", "rolling_forcing_dmd.pt"),
        transformer={"local_attn_size": 21, "sink_size": 3, "num_frame_per_block": 3},
        options={"denoising_steps": [1000.0, 800.0, 600.0, 400.0, 200.0]},
        limits="chunks are denoised one after the other, not together in a rolling window of "
        "rising noise",
    ),
)
"""All releases. No two releases share a file name, so their order does not matter."""


def find_release(root: Path) -> tuple[PublishedNetwork, Path] | None:
    """Return the release that the network in `root` belongs to, and the network's path. Return None
    if `root` contains no published network.
    """
    for release in RELEASES:
        if (position := release.find(root)) is not None:
            return release, position
    return None


def find_unnamed(root: Path) -> Path | None:
    """Return the only `.pt` file in a directory or in its `checkpoints/`: a training checkpoint
    whose name no release uses. Return None if there is no such file.
    """
    for folder in (root, root / "checkpoints"):
        files = sorted(folder.glob("*.pt")) if folder.is_dir() else []
        if len(files) == 1:
            return files[0]
    return None


def release_named(name: str) -> PublishedNetwork:
    """Return the release with this `download_name`."""
    return next((release for release in RELEASES if release.download_name == name), OTHER)
