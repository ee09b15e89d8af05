# SPDX-License-Identifier: Apache-2.0
"""Compares Matrix-Game 2.0 with golden files: rollouts, image conditioning, decoding, schedules and
tensor names.

All sizes are read from `mg_meta.json` and from the metadata and shapes of the recorded tensors. A
directory of golden files may therefore use any sizes, windows, chunk lengths, step lists and
variants.

The tolerances in fp32 are 2e-5 for rollouts and their stages, 0 for counters, 1e-6 for pixels, 1e-5
for the encoded condition and CLIP's hidden states, 5e-5 for decoded frames, one level for uint8
frames, 1e-3 for timesteps and 1e-6 for sigmas.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open

from vllm_omni.model_executor.checkpoint.loading import rename
from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors, read_json
from vllm_omni.model_executor.layers.attention.rope import rope_tables
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.models.matrix_game.checkpoint import RULES, load_transformer
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig
from vllm_omni.model_executor.models.matrix_game.pipeline import MatrixGame
from vllm_omni.model_executor.models.matrix_game.state import ActionWindows, action_windows
from vllm_omni.model_executor.models.matrix_game.transformer import (
    ActionBlock,
    ActionItem,
    MatrixGameTransformer,
)
from vllm_omni.model_executor.models.wan.checkpoint.component_names import CLIP_RULES
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_image_encoder, load_vae
from vllm_omni.model_executor.models.wan.images.files import cut_image, middle_box
from vllm_omni.model_executor.models.wan.images.image_condition import MASK_CHANNELS, GreyCondition
from vllm_omni.model_executor.models.wan.images.image_encoder import ImageEncoder, clip_pixels
from vllm_omni.model_executor.models.wan.transformer.fused_ops import gated_add
from vllm_omni.model_executor.models.wan.transformer.layers import embed_time
from vllm_omni.model_executor.models.wan.transformer.transformer import WanBlock
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, to_uint8
from vllm_omni.model_executor.schedules import few_step_schedule, nearest_schedule
from vllm_omni.model_executor.streaming.chunk_plan import first_pixel_frame
from vllm_omni.testing.parity.comparison import (
    ComparisonReport,
    GoldenScenario,
    check_recorded,
    run_scenarios,
)
from vllm_omni.testing.parity.lingbot_vae import recorded_vae
from vllm_omni.testing.parity.rollouts import (
    RecordedCalls,
    chronological,
    clean_latents,
    ends,
    recorded_layers,
    renoised,
)

_FLOW, _PIXELS, _CONDITION, _DECODED, _T, _SIGMA = 2e-5, 1e-6, 1e-5, 5e-5, 1e-3, 1e-6
_META, _VAE, _CLIP = (
    "mg_meta.json",
    "vae_tiny_weights_orig_names.safetensors",
    "clip_tiny_weights_orig_names.safetensors",
)
_CLIP_KEYS = ("image_size", "patch_size", "dim", "mlp_ratio", "num_heads", "num_layers", "out_dim")
"""Known keys of the recorded CLIP configuration. The model does not use CLIP's projection, which
has width `out_dim`.
"""


def verify(golden_dir: Path) -> ComparisonReport:
    """Run every scenario file in `golden_dir`."""
    return run_scenarios(
        "matrix_game",
        golden_dir,
        {
            "mg_*.safetensors": lambda scenario: _Rollout(scenario).run_scenario(),
            "condition*.safetensors": run_condition,
            "schedule*.json": run_schedules,
            "clip_key_map.json": run_clip_names,
            "key_map_orig_to_diffusers.json": run_names,
        },
        auxiliary=("README*", ".*", "tiny_*.safetensors", _META, _VAE, _CLIP),
    )


# -- rollouts --------------------------------------------------------------------------------------


class _Rollout:
    """A recorded rollout that is rerun one forward pass at a time."""

    def __init__(self, scenario: GoldenScenario) -> None:
        cases = read_json(scenario.directory / _META).get("cases", {})
        if scenario.name not in cases:
            raise ValueError(f"{_META} describes no case {scenario.name!r}")
        self.scenario, self.case = scenario, cases[scenario.name]
        weights = scenario.directory / self.case["weights"]
        values = json.loads(_metadata(weights)["cfg"])
        self.config = MatrixGameConfig.from_checkpoint(
            {**values, "local_attn_size": self.case["local_attn_size"]}
        )
        self.model = MatrixGameTransformer(self.config)
        load_transformer(self.model, open_tensors(weights), self.config)
        if self.case["sink_size"] or self.case["context_noise"]:
            raise ValueError("sinks and context noise are in no released model")
        self.stages = _Stages(self.model, scenario)
        rows, columns = scenario.get("noise").shape[3:]
        self.places = rows * columns // 4
        config = self.config
        windows = {
            "trunk": self._window(self.places, config.num_heads, config.head_dim, config.num_layers)
        }
        if config.mouse_dim:
            windows["mouse"] = self._action_window(self.places, config.mouse_width)
        windows["keyboard"] = self._action_window(1, config.keyboard_width)
        self.windows = ActionWindows(**windows)
        self.cross_kv = self.model.cross_attention_kv(scenario.get("visual_context")[0])
        self.actions_NK = scenario.get("keyboard_cond")[0]
        if self.config.mouse_dim:
            self.actions_NK = torch.cat((self.actions_NK, scenario.get("mouse_cond")[0]), dim=-1)
        self.newest: torch.Tensor | None = None
        self.calls = RecordedCalls(scenario, self.case["calls"], _FLOW)

    def run_scenario(self) -> None:
        """Rerun the rollout with the recorded noise and actions. Compare every forward pass,
        including its stages and caches, and the clip with the recording.
        """
        scenario, case = self.scenario, self.case
        steps = [float(t) for t in case["warped_timesteps"]]
        shift, size = float(case["shift"]), int(case["num_frame_per_block"])
        indices = [1000 - int(step) for step in case["denoising_step_list"]]
        schedule = few_step_schedule("exact", shift, indices, np.float32)
        scenario.compare("timesteps", torch.tensor(schedule.timesteps), torch.tensor(steps), _T)
        clean = nearest_schedule(shift, [0.0])
        condition = scenario.get("cond_concat")[0]
        given = scenario.get("initial_latent")[0] if "initial_latent" in scenario else None
        finished = [] if given is None else [given]
        renoise = start = 0
        for x in [] if given is None else given.split(size, dim=1):
            frames = range(start, start + x.shape[1])
            row = self._open(frames, condition)
            self._call(row, x, 0.0, clean.sigmas_x0[0])
            start = frames.stop
        for x in scenario.get("noise")[0].split(size, dim=1):
            frames = range(start, start + x.shape[1])
            row = self._open(frames, condition)
            for step, timestep in enumerate(schedule.timesteps):
                x0 = self._call(row, x, timestep, schedule.sigmas_x0[step])
                if step + 1 < schedule.num_steps:
                    sigma = schedule.sigmas_noise[step + 1]
                    x = renoised(x0, scenario.get(f"renoise{renoise:02d}")[0], sigma)
                    renoise += 1
            self._call(row, x0, 0.0, clean.sigmas_x0[0])
            finished.append(x0)
            start = frames.stop
        self.calls.finish()
        scenario.compare_recorded("latents", torch.cat(finished, dim=1)[None], "latents", _FLOW)
        for layer in recorded_layers(scenario, "cross"):
            for index, kind in enumerate("kv"):
                ours = self.cross_kv[layer, index]
                scenario.compare_recorded(
                    "cross-attention K/V", ours[None], f"cross{layer}.{kind}", _FLOW
                )

    def _open(self, frames: range, condition: torch.Tensor) -> ActionItem:
        """Return the inputs that all forward passes of a chunk share."""
        pixels = slice(first_pixel_frame(frames.start), first_pixel_frame(frames.stop))
        rows, span = self.actions_NK[pixels], self.config.action_frames
        windows, self.newest = action_windows(rows, self.newest, len(frames), span)
        keys = self.config.keyboard_dim
        mouse = windows[..., keys:] if self.config.mouse_dim else None
        self.stages.windows = windows
        actions = self.model.actions(mouse, frames, self.places)
        self.stages.expect(self.calls.name)
        self.model.write_keyboard(self.windows, frames, windows[..., :keys])
        y = condition[:, frames.start : frames.stop]
        height, width = y.shape[2] // 2, y.shape[3] // 2
        return ActionItem(
            latents=y[:16],
            condition=y,
            timestep=0.0,
            frames=frames,
            rope=rope_tables(self.config.head_dim, frames, height, width),
            cross_kv=self.cross_kv,
            window=self.windows,
            **actions,
        )

    def _call(
        self, row: ActionItem, x: torch.Tensor, timestep: float, sigma: float
    ) -> torch.Tensor:
        name, frames = self.calls.name, row.frames
        self.windows.check_frames(frames)
        self.stages.expect(name)
        flow = self.model([replace(row, latents=x, timestep=timestep)])[0]
        self.stages.finish(name, timestep, self.config)
        x0 = clean_latents(x, flow, sigma)
        self.windows.commit(frames.stop)
        meta = self.calls.compare(x[None], flow[None], x0[None], timestep)
        self.scenario.compare("counters", *self._counters(meta, frames), 0.0)
        self._compare_caches(name)
        return x0

    def _counters(
        self, meta: Mapping[str, Any], frames: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ours = [
            frames.start * self.places,
            frames.start,
            len(frames),
            first_pixel_frame(frames.stop),
        ]
        theirs = [meta[key] for key in ("start", "frame", "frames", "pixel_actions")]
        for name, window in self._named():
            prefix, per_frame = (
                ("", 1) if name == "trunk" else (f"{name}_", window.tokens_per_frame)
            )
            ours += [end // per_frame for end in ends(window)]
            theirs += [meta[f"{prefix}g_end"], meta[f"{prefix}l_end"]]
        return torch.tensor(ours), torch.tensor(theirs)

    def _compare_caches(self, name: str) -> None:
        acting = {layer: block.action_index for layer, block in self._acting().items()}
        for kind, window in self._named():
            recorded = "cache" if kind == "trunk" else kind
            for layer in recorded_layers(self.scenario, f"{name}.{recorded}"):
                ours = chronological(window, layer if kind == "trunk" else acting[layer])
                for part, tensor in zip("kv", ours, strict=True):
                    filled = tensor[None, : ends(window)[1]]
                    if kind == "mouse":
                        filled = filled[0].unflatten(0, (-1, self.places)).transpose(0, 1)
                    self.scenario.compare_recorded(
                        f"{kind} K/V", filled, f"{name}.{recorded}{layer}.{part}", _FLOW
                    )

    def _named(self) -> list[tuple[str, KVWindow]]:
        return [(name.removesuffix("."), window) for name, window in self.windows.by_name.items()]

    def _acting(self) -> dict[int, ActionBlock]:
        return dict(zip(sorted(self.config.action_blocks), self.model.action_blocks(), strict=True))

    def _action_window(self, positions: int, width: int) -> KVWindow:
        heads = self.config.action_heads
        return self._window(positions, heads, width // heads, len(self.config.action_blocks))

    def _window(self, positions: int, heads: int, head_dim: int, layers: int) -> KVWindow:
        return KVWindow(
            num_layers=layers,
            window_frames=int(self.case["local_attn_size"]),
            sink_frames=0,
            tokens_per_frame=positions,
            num_heads=heads,
            head_dim=head_dim,
            dtype=torch.float32,
            device="cpu",
        )


class _Stages:
    """Captures the outputs of the network's modules with hooks, in forward passes whose outputs
    were recorded.
    """

    def __init__(self, model: MatrixGameTransformer, scenario: GoldenScenario) -> None:
        self.model, self.scenario = model, scenario
        self.windows = torch.empty(0)
        self._seen: dict[str, torch.Tensor] = {}
        self._wanted = False
        for layer, block in model.blocks.items():
            parts: dict[str, Any] = {
                "self_attn": block.self_attn,
                "cross_attn": block.cross_attn,
                "ffn": block.ffn,
                "out": block,
            }
            if isinstance(block, ActionBlock):
                module = block.action_model
                parts |= {"proj_keyboard": module.proj_keyboard, "action_out": module}
                if module.config.mouse_dim:
                    parts["proj_mouse"] = module.proj_mouse
            for name, part in parts.items():
                part.register_forward_hook(self._hook(f"block{layer}.{name}"))

    def _hook(self, name: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            if self._wanted and isinstance(module, WanBlock):
                x, update = output
                output = x if update is None else gated_add(x, *update)
            if self._wanted and isinstance(output, torch.Tensor):
                self._seen[name] = output.clone()

        return keep

    def expect(self, name: str) -> None:
        self._wanted = f"{name}.img_emb" in self.scenario
        self._seen = {}

    def finish(self, name: str, timestep: float, config: MatrixGameConfig) -> None:
        if not self._wanted:
            return
        scenario = self.scenario
        context = self.model.embed_context(scenario.get("visual_context")[0])
        scenario.compare_recorded("image projection", context[None], f"{name}.img_emb", _FLOW)
        model, frames = self.model, len(self.windows)
        time, modulation = embed_time(
            [timestep], config.freq_dim, model.time_embedding, model.time_projection, model.device
        )
        scenario.compare_recorded(
            "time embedding", time.expand(frames, -1), f"{name}.time_embedding", _FLOW
        )
        scenario.compare_recorded(
            "time projection",
            modulation.flatten(1).expand(frames, -1),
            f"{name}.time_projection",
            _FLOW,
        )
        keys = config.keyboard_dim
        if config.mouse_dim:
            mouse = self.windows[..., keys:].flatten(1)
            scenario.compare_recorded("mouse window", mouse, f"{name}.mouse_window", 0.0)
        module = model.action_blocks()[0].action_model
        embedded = module.keyboard_embed(self.windows[..., :keys]).flatten(1)
        scenario.compare_recorded("keyboard window", embedded, f"{name}.keyboard_window", _FLOW)
        for key in sorted(scenario.tensors):
            if key.startswith(f"{name}.block"):
                _, layer, part = key.split(".", 2)
                scenario.compare_recorded(
                    f"block {part}", self._seen[f"{layer}.{part}"], key, _FLOW
                )


# -- the image -------------------------------------------------------------------------------------


def run_condition(scenario: GoldenScenario) -> None:
    """Compare image conditioning, CLIP's hidden states and decoding with the recording, in chunks
    and as a whole.
    """
    height, width = int(scenario.meta("height")), int(scenario.meta("width"))
    vae = _vae(scenario)
    image = scenario.get("image_u8")
    cut = np.array(Image.fromarray(image.numpy()).crop(middle_box(image, height, width)))
    scenario.compare_recorded("cut image", torch.from_numpy(cut), "crop_u8", 0.0)
    pixels = cut_image(image, height, width)
    scenario.compare_recorded("pixels", pixels[0, :, 0], "pixels", _PIXELS)

    chunks = [int(frames) for frames in json.loads(scenario.meta("chunk_latents"))]
    encoded, cache = vae.encode(_grey(pixels, chunks[0]), None)
    parts = [encoded]
    for count in chunks[1:]:
        grey = torch.zeros(1, 3, vae.config.temporal_factor * count, height, width)
        encoded, cache = vae.encode(grey, cache)
        parts.append(encoded)
    streamed = torch.cat(parts, dim=2)
    scenario.compare_recorded("condition", streamed, "cond_latent", _CONDITION)
    whole, _ = vae.encode(_grey(pixels, sum(chunks)), None)
    scenario.compare("condition, streamed = whole", streamed, whole, _CONDITION)
    mask = torch.zeros(MASK_CHANNELS, *streamed.shape[2:])
    mask[:, :1] = 1
    scenario.compare_recorded(
        "mask and condition", torch.cat((mask, streamed[0]))[None], "cond_concat", _CONDITION
    )
    first, _ = GreyCondition(vae).next(pixels, chunks[0], None)
    scenario.compare(
        "first chunk as served", first, scenario.get("cond_concat")[0, :, : chunks[0]], _CONDITION
    )

    clip, still = _clip(scenario), pixels[:, :, 0]
    scenario.compare_recorded(
        "CLIP pixels", clip_pixels(still, clip.whole["image_size"]), "clip_input", _CONDITION
    )
    scenario.compare_recorded("CLIP rows", clip.encode(still)[None], "visual_context", _CONDITION)

    latents, decoder = scenario.get("latents"), None
    pixels_1CTHW: list[torch.Tensor] = []
    for part in latents.split(chunks, dim=2):
        frames, decoder = vae.decode(part, decoder)
        pixels_1CTHW.append(frames)
    decoded = torch.cat(pixels_1CTHW, dim=2)
    scenario.compare_recorded("decoded", decoded.transpose(1, 2), "decoded", _DECODED)
    scenario.compare("decoded, chunks = whole", decoded, vae.decode(latents, None)[0], _DECODED)
    scenario.compare_recorded(
        "uint8 frames", to_uint8(decoded, MatrixGame.rounding), "decoded_u8", 1.0
    )


def _grey(image_1C1HW: torch.Tensor, latents: int) -> torch.Tensor:
    """Return the clip [image, grey, grey, ...] that encodes to `latents` latent frames."""
    return torch.cat(
        (image_1C1HW, torch.zeros_like(image_1C1HW).expand(-1, -1, 4 * (latents - 1), -1, -1)),
        dim=2,
    )


def _vae(scenario: GoldenScenario) -> StreamingWanVAE:
    vae = StreamingWanVAE(recorded_vae(scenario))
    load_vae(vae, scenario.directory / _VAE)
    return vae


def _clip(scenario: GoldenScenario) -> ImageEncoder:
    cfg = check_recorded("clip_cfg", json.loads(scenario.meta("clip_cfg")), _CLIP_KEYS)
    encoder = ImageEncoder(
        {
            "hidden_size": cfg["dim"],
            "intermediate_size": int(cfg["dim"] * cfg["mlp_ratio"]),
            "num_hidden_layers": cfg["num_layers"],
            "num_attention_heads": cfg["num_heads"],
            "image_size": cfg["image_size"],
            "patch_size": cfg["patch_size"],
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
        },
        dtype=torch.float32,
    )
    load_image_encoder(encoder, scenario.directory / _CLIP)
    return encoder


# -- tables ----------------------------------------------------------------------------------------


def run_schedules(scenario: GoldenScenario) -> None:
    recorded = read_json(scenario.path)["schedules"]
    for case in recorded:
        indices = [1000 - int(step) for step in case["denoising_step_list"]]
        ours = few_step_schedule("exact", float(case["shift"]), indices, np.float32)
        for name, values, tolerance in (
            ("timesteps", ours.timesteps, _T),
            ("sigmas_x0", ours.sigmas_x0, _SIGMA),
            ("sigmas_noise", ours.sigmas_noise, _SIGMA),
        ):
            scenario.compare(name, torch.tensor(values), torch.tensor(case[name]), tolerance)


def run_names(scenario: GoldenScenario) -> None:
    """Check that the rename rules map both recorded names of each tensor to the name in the
    model.
    """
    recorded = read_json(scenario.path)
    wrong = [
        name for name, theirs in recorded.items() if rename(name, RULES) != rename(theirs, RULES)
    ]
    left = [name for name in recorded if rename(name, RULES) != name.removeprefix("model.")]
    if wrong or left or not recorded:
        raise ValueError(
            f"{len(wrong + left)} of {len(recorded)} names are mapped differently: "
            f"{(wrong + left)[:3]}"
        )
    scenario.compare(
        "tensor names", torch.tensor(len(recorded)), torch.tensor(len(set(recorded.values()))), 0.0
    )


def run_clip_names(scenario: GoldenScenario) -> None:
    recorded, wrong = read_json(scenario.path), []
    for name, targets in recorded.items():
        parts = (
            [name]
            if len(targets) == 1
            else [name.replace(".to_qkv.", f".to_{kind}.") for kind in "qkv"]
        )
        ours = [rename(f"visual.{part}", CLIP_RULES) for part in parts]
        if ours != targets:
            wrong.append(name)
    scenario.compare_names("CLIP tensor names", recorded, wrong)


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})
