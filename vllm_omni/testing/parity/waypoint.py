# SPDX-License-Identifier: Apache-2.0
"""Compares Waypoint with golden files: rollouts of both generations, the streaming TAEHV, and the
image autoencoder of Waypoint-1.

All sizes are read from the metadata and shapes of the recorded tensors. Each forward pass starts
from recorded latents and uses this package's K/V cache. Differences therefore accumulate over
frames, but not over the steps of a frame.

In fp32, the tolerance is 5e-5 for rollouts, mostly because the phases of sines and cosines reach
1000 rad. The fp32 tolerance is 1e-6 (relative) for tables and 2e-5 for TAEHV. At most 0.1 % of the
uint8 values may differ, and only by one level. In bf16, the relative L2 distance from the recording
may be at most 3e-2. The bf16 files use rounded tables and noise levels, as the original does. Lists
of frames and controls must be equal.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_omni.actions import ActionFrame, read_actions
from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.models.waypoint import autoencoders
from vllm_omni.model_executor.models.waypoint.checkpoint import (
    AUTOENCODER_KEYS,
    load_autoencoder,
    load_transformer,
)
from vllm_omni.model_executor.models.waypoint.config import (
    WaypointConfig,
    action_space,
    control_vectors,
)
from vllm_omni.model_executor.models.waypoint.state import FrameRings
from vllm_omni.model_executor.models.waypoint.transformer import (
    FrameItem,
    FrequencyTables,
    WaypointTransformer,
)
from vllm_omni.model_executor.schedules import EulerSchedule
from vllm_omni.testing.parity.comparison import (
    ComparisonReport,
    GoldenScenario,
    check_recorded,
    run_scenarios,
)

_FP32, _TABLES, _TAEHV, _BF16_RELATIVE = 5e-5, 1e-6, 2e-5, 3e-2
_LEVELS, _SHARE = 1.0, 1e-3


def verify(golden_dir: Path) -> ComparisonReport:
    """Run every scenario file in `golden_dir`."""
    return run_scenarios(
        "waypoint",
        golden_dir,
        {
            "wp1_ae*.safetensors": run_image_autoencoder,
            "taehv*.safetensors": run_taehv,
            "wp*.safetensors": WaypointRollout.run_scenario,
        },
        auxiliary=("README*", ".*", "*_weights.safetensors"),
    )


def rounded(tables: FrequencyTables) -> FrequencyTables:
    """Return frequency tables rounded to bf16, as in the original engine."""
    return FrequencyTables(
        **{name: table.bfloat16().float() for name, table in vars(tables).items()}
    )


# -- rollouts --------------------------------------------------------------------------------------


class WaypointRollout:
    """A recorded session that is rerun frame by frame."""

    def __init__(self, scenario: GoldenScenario) -> None:
        self.scenario = scenario
        cfg = json.loads(scenario.meta("cfg"))
        check_recorded("cfg", cfg, WaypointConfig.known_keys())
        self.config = WaypointConfig.from_checkpoint(cfg)
        self.bf16 = "bf16" in scenario.meta("dtype") or "bfloat16" in scenario.meta("dtype")
        self.sigmas: list[float] = json.loads(scenario.meta("sigmas"))
        dtype = torch.bfloat16 if self.bf16 else torch.float32
        with default_dtype(dtype):
            self.model = WaypointTransformer(self.config)
        if self.bf16:
            self.model.tables = rounded(self.model.tables)
        weights = scenario.meta("weights").split(maxsplit=1)[0]
        load_transformer(self.model, open_tensors(scenario.directory / weights))
        heads = self.config.n_kv_heads
        self.rings = FrameRings(
            self.config, range(self.config.n_layers), num_heads=heads, dtype=dtype, device="cpu"
        )
        self.prompts = [
            self.model.cross_attention_kv(scenario.get(name))
            for name in ("prompt0", "prompt1")
            if name in scenario
        ]

    @classmethod
    def run_scenario(cls, scenario: GoldenScenario) -> None:
        """Rerun the session and compare all recorded stages."""
        rollout = cls(scenario)
        rollout.compare_tables()
        frames = json.loads(scenario.meta("frames"))
        for index, frame in enumerate(frames):
            rollout.frame(index, frame, prompt=int(2 * index >= len(frames)))

    def compare(self, stage: str, ours: torch.Tensor, name: str, tolerance: float = _FP32) -> None:
        """Compare a tensor with the recorded tensor `name`, if the recording contains it. In bf16,
        the tensors are compared by relative L2 distance.
        """
        if name not in self.scenario:
            return
        if self.bf16:
            self.scenario.compare_relative(stage, ours, name, _BF16_RELATIVE)
        else:
            self.scenario.compare_recorded(stage, ours, name, tolerance)

    def compare_tables(self) -> None:
        tables = self.model.tables
        ours = {"freq": tables.noise, "xy": tables.xy, "inv_t": tables.time}
        for name, table in ours.items():
            if f"tables.{name}" in self.scenario:
                recorded = self.scenario.get(f"tables.{name}")
                relative = (table.double() / recorded.double() - 1).abs()
                self.scenario.compare(
                    "tables, relative", relative, torch.zeros_like(relative), _TABLES
                )
        if "sigma_emb" in self.scenario:
            levels = json.loads(self.scenario.meta("sigma_emb_at"))
            self.compare(
                "noise embedding",
                torch.stack([self.model.embed_noise(level) for level in levels]),
                "sigma_emb",
            )

    def frame(self, index: int, frame: dict[str, Any], *, prompt: int) -> None:
        scenario, name = self.scenario, f"f{index}"
        if self.config.time_step * index != frame["t_pos"]:
            raise ValueError(
                f"frame {index} has position {self.config.time_step * index}, recorded "
                f"{frame['t_pos']}"
            )
        controls = self.controls(frame["ctrl"])
        if f"{name}.ctrl" in scenario:
            scenario.compare_recorded(
                "controls", controls.to(self.model.dtype), f"{name}.ctrl", 0.0
            )
        self.compare("control embedding", self.model.embed_controls(controls), f"{name}.ctrl_emb")
        rope = self.model.rope(index)
        for part, table in zip(("cos", "sin"), rope, strict=True):
            self.compare("rotations", table, f"{name}.rope.{part}")
        common: dict[str, Any] = {
            "rope": rope,
            "control": self.model.controls(controls),
            "window": self.rings,
            "slot": self.rings.frame_slot(index),
            "prompt_kv": self.prompts[prompt] if self.prompts else None,
        }
        self.lists(
            "visible frames",
            [history(self.rings, layer, index) for layer in self.layers],
            frame,
            "visible_history",
        )
        if frame["kind"] == "generate":
            latents = self.generate(name, common)
            self.compare("latents", latents, f"{name}.latent")
        else:
            latents = scenario.get(f"{name}.latent")
        self.compare(
            "clean pass", self.forward(name, "commit", latents, 0.0, common), f"{name}.commit.v"
        )
        self.rings.commit(index + 1)
        self.lists(
            "ring frames",
            [cached_frames(self.rings, layer) for layer in self.layers],
            frame,
            "ring_after",
        )
        for layer in self.layers:
            for kind, ours in zip("kv", frames_kv(self.rings, layer), strict=True):
                self.compare("K/V", ours, f"{name}.ring{layer}.{kind}")

    @property
    def layers(self) -> range:
        return range(self.config.n_layers)

    def generate(self, name: str, common: dict[str, Any]) -> torch.Tensor:
        x = self.scenario.get(f"{name}.noise")
        schedule = EulerSchedule(tuple(self.sigmas), self.model.dtype)
        for step, sigma in enumerate(self.sigmas[:-1]):
            velocity = self.forward(name, f"s{step}", x, sigma, common)
            self.compare("velocity", velocity, f"{name}.s{step}.v")
            x = schedule.advance(x, velocity, step)
        return x

    def forward(
        self, name: str, stage: str, latents: torch.Tensor, sigma: float, common: dict[str, Any]
    ) -> torch.Tensor:
        """Run one forward pass, and compare its tokens and the outputs of its blocks if they are
        recorded.
        """
        seen: dict[str, torch.Tensor] = {}
        hooks = []
        if f"{name}.{stage}.tokens" in self.scenario:
            for layer, block in enumerate(self.model.layers):
                hooks.append(block.register_forward_hook(_recorder(seen, f"block{layer}")))
            first = self.model.layers[0].register_forward_pre_hook(
                lambda _, given: seen.update(tokens=given[0][0])
            )
            hooks.append(first)
        velocity = self.model([FrameItem(latents=latents, sigma=sigma, **common)])[0]
        for hook in hooks:
            hook.remove()
        for part, tensor in seen.items():
            self.compare(
                "tokens" if part == "tokens" else "blocks", tensor, f"{name}.{stage}.{part}"
            )
        return velocity

    def controls(self, recorded: dict[str, Any]) -> torch.Tensor:
        """Convert a recorded controller state to an `ActionFrame`, and then to the network's
        input.
        """
        space = action_space(self.config)
        mouse = dict(zip(space.axis_names, recorded.get("mouse", ()), strict=False))
        held = tuple(space.button_names[code] for code in recorded.get("button", ()))
        entry = ActionFrame(buttons=held, axes=mouse, scroll=float(recorded.get("scroll", 0)))
        rows = read_actions(space, [entry], {}, 1)
        assert rows is not None
        return control_vectors(rows)[0]

    def lists(self, stage: str, ours: list[list[int]], frame: dict[str, Any], key: str) -> None:
        if ours != frame[key]:
            raise ValueError(f"frame {frame['frame']}: {stage} {ours}, recorded {frame[key]}")
        count = torch.tensor([float(len(frame[key]))])
        self.scenario.compare(stage, count, count, 0.0)


def history(rings: FrameRings, layer: int, frame: int) -> list[int]:
    """Return the earlier frames that a frame attends to, oldest first."""
    return rings.window(layer)[0].visible_frames(frame + 1)[:-1]


def cached_frames(rings: FrameRings, layer: int) -> list[int]:
    """Return the committed frames in the ring buffer, oldest first."""
    window, _ = rings.window(layer)
    return [
        frame
        for frame in window.visible_frames(rings.committed_frames)
        if frame % window.dilation == 0
    ]


def frames_kv(rings: FrameRings, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of K and V of all `cached_frames`, oldest first, [frames T, N, H]."""
    window, index = rings.window(layer)
    tokens = window.token_positions([window.slot(frame) for frame in cached_frames(rings, layer)])
    k, v = window.format.load(index, window.buffer[index], tokens)
    return k, v


def _recorder(seen: dict[str, torch.Tensor], name: str) -> Any:
    def keep(_: torch.nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        seen[name] = output[0][0]

    return keep


# -- autoencoders ----------------------------------------------------------------------------------


def run_taehv(scenario: GoldenScenario) -> None:
    """Compare the streaming encoding of clips and the decoding of latents, including resizing, with
    the recording.
    """
    codec = autoencoders.StreamingTAEHV(
        int(scenario.meta("latent_channels")),
        int(scenario.meta("encoder_width")),
        json.loads(scenario.meta("decoder_widths")),
    )
    load_autoencoder(
        codec, open_tensors(scenario.directory / scenario.meta("weights")), what="TAEHV"
    )
    height, width = json.loads(scenario.meta("codec_size"))
    pixel_size: tuple[int, int] = tuple(json.loads(scenario.meta("pixel_size")))
    if "encode.clips_small" in scenario:
        cache = None
        for index, clip in enumerate(scenario.get("encode.clips_small")):
            frames = autoencoders.to_codec(
                _enlarged(clip, pixel_size), (height, width), torch.float32
            )
            latent, cache = codec.encode(frames, cache)
            scenario.compare_recorded("encoded", latent, f"encode.latent{index}", _TAEHV)
    if "decode.latents" in scenario:
        cache = None
        for index, latent in enumerate(scenario.get("decode.latents")):
            frames, cache = codec.decode(latent.unsqueeze(0), cache)
            if f"decode.raw{index}" in scenario:
                scenario.compare_recorded("decoded", frames, f"decode.raw{index}", _TAEHV)
            if f"decode.u8_{index}" in scenario:
                pixels = autoencoders.to_pixels(frames, pixel_size)
                _compare_pixels(scenario, pixels, f"decode.u8_{index}")


def run_image_autoencoder(scenario: GoldenScenario) -> None:
    """Compare the encoding of an image and the decoding of a latent with the recording."""
    weights = open_tensors(scenario.directory / scenario.meta("weights"))
    halves: dict[str, torch.nn.Module] = {}
    make: Callable[..., torch.nn.Module]
    for half, make in (
        ("encoder", autoencoders.ImageEncoder),
        ("decoder", autoencoders.ImageDecoder),
    ):
        sizes = check_recorded(
            f"{half}_cfg", json.loads(scenario.meta(f"{half}_cfg")), AUTOENCODER_KEYS[half]
        )
        halves[half] = make(**sizes)
    load_autoencoder(torch.nn.ModuleDict(halves), weights, what="image autoencoder")
    if "encode.image_small" in scenario:
        image = _enlarged(scenario.get("encode.image_small").unsqueeze(0), autoencoders.IMAGE_SIZE)
        scenario.compare_recorded("encoded", halves["encoder"](image)[0], "encode.latent", _FP32)
    if "decode.latent" in scenario:
        images = halves["decoder"](scenario.get("decode.latent").unsqueeze(0))
        scenario.compare_recorded("decoded", images[0, :, ::8, ::8], "decode.raw_strided8", _FP32)
        pixels = autoencoders.image_to_uint8(images)[0, ::4, ::4]
        _compare_pixels(scenario, pixels, "decode.u8_strided4")


def _compare_pixels(scenario: GoldenScenario, pixels: torch.Tensor, name: str) -> None:
    """Compare uint8 frames with the recorded frames. A small fraction of the values may differ by
    one level.
    """
    recorded = scenario.get(name)
    scenario.compare("frames, levels", pixels, recorded, _LEVELS)
    share = (pixels != recorded).double().mean()
    scenario.compare("frames, share that differs", share, torch.zeros_like(share), _SHARE)


def _enlarged(frames_THWC: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Enlarge frames to `size` by repeating pixels."""
    rows, columns = size[0] // frames_THWC.shape[1], size[1] // frames_THWC.shape[2]
    return frames_THWC.repeat_interleave(rows, 1).repeat_interleave(columns, 2)
