# SPDX-License-Identifier: Apache-2.0
"""Compares ABot-World-0's rollouts, action adapter, images and schedule with golden files.

All sizes are read from `abot_meta.json` and from the metadata and shapes of the recorded tensors. A
directory of golden files may therefore use any sizes, windows, numbers of references, position
limits and step lists.

The tolerances in fp32 are 2e-5 for rollouts (including their stages and caches) and for the
adapter, 0 for counters and resized images, 1e-6 for pixels, 1e-5 for encoded images, 1e-3 for
timesteps and 1e-6 for sigmas. A bf16 rollout is rerun with bf16 weights, and the relative L2
distance of its results from the recording may be at most 3e-2.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch.nn import functional

from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors, read_json
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.layers.attention.rope import apply_rope, rope_tables
from vllm_omni.model_executor.layers.kv_cache.pinned_window import PinnedWindow
from vllm_omni.model_executor.models.abot_world.checkpoint import fold_keys, load_transformer
from vllm_omni.model_executor.models.abot_world.config import SPACE, AbotWorldConfig
from vllm_omni.model_executor.models.abot_world.transformer import (
    AbotItem,
    AbotWorldTransformer,
    KeyAdapter,
)
from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.images.files import (
    fit_image,
    image_pixels,
    stretch_image,
)
from vllm_omni.model_executor.models.wan.transformer.fused_ops import gated_add
from vllm_omni.model_executor.models.wan.transformer.layers import embed_time, patchify
from vllm_omni.model_executor.models.wan.transformer.transformer import WanBlock
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE
from vllm_omni.model_executor.schedules import (
    FewStepSchedule,
    few_step_schedule,
    nearest_schedule,
)
from vllm_omni.model_executor.streaming.pinned import next_base
from vllm_omni.testing.parity.comparison import ComparisonReport, GoldenScenario, run_scenarios
from vllm_omni.testing.parity.rollouts import recorded_layers

_FLOW, _PIXELS, _LATENT, _T, _SIGMA, _BF16 = 2e-5, 1e-6, 1e-5, 1e-3, 1e-6, 3e-2
_META, _SHIFT = "abot_meta.json", 5.0
_VAE_WEIGHTS = "wan22_vae_tiny_weights_orig_names.safetensors"


def verify(golden_dir: Path) -> ComparisonReport:
    """Run every scenario file in `golden_dir`."""
    return run_scenarios(
        "abot_world",
        golden_dir,
        {
            "abot_condition*.safetensors": run_condition,
            "abot_*.safetensors": lambda scenario: _Rollout(scenario).run_scenario(),
            "schedule*.json": run_schedule,
        },
        auxiliary=("README*", ".*", "abot_tiny_weights*.safetensors", _META, "wan22_vae*"),
    )


def read_config(values: Mapping[str, Any], case: Mapping[str, Any], side: int) -> AbotWorldConfig:
    """Return the architecture of a recorded case, with reference images of `side` x `side`
    pixels.
    """
    return AbotWorldConfig.from_checkpoint(
        {
            **values,
            "local_attn_size": case["window"],
            "sink_size": case["sink"],
            "num_frames_per_block": case["chunk"],
            "ref_num_slots": case["ref_slots"],
            "ref_resolution": side,
        }
    )


def schedule_of(steps: list[int]) -> FewStepSchedule:
    indices = [1000 - int(step) for step in steps]
    return few_step_schedule("exact", _SHIFT, indices, np.float32)


class _Rollout:
    """A recorded rollout that is rerun one forward pass at a time."""

    def __init__(self, scenario: GoldenScenario) -> None:
        cases = read_json(scenario.directory / _META).get("cases", {})
        if scenario.name not in cases:
            raise ValueError(f"{_META} describes no case {scenario.name!r}")
        self.scenario, self.case = scenario, cases[scenario.name]
        self.dtype = getattr(torch, self.case["dtype"].removeprefix("torch."))
        self.references = "ref_latents" in scenario and scenario.get("ref_latents").shape[0] > 0
        side = AbotWorldConfig.pixels_per_cell * 2
        if self.references:
            side = scenario.get("ref_latents").shape[-1] * AbotWorldConfig.pixels_per_cell
        weights = scenario.directory / self.case["weights"]
        values = json.loads(_metadata(weights)["cfg"])
        self.config = read_config(values, self.case, side)
        with default_dtype(self.dtype):
            self.model = AbotWorldTransformer(self.config)
        load_transformer(self.model, open_tensors(weights), self.config)
        self.size = tuple(scenario.get("noise").shape[1:])
        self.per_frame = self.size[2] * self.size[3] // 4
        self.window = PinnedWindow(
            **self.model.window_sizes(self.per_frame),
            window_frames=int(self.case["window"]),
            sink_frames=0,
            device="cpu",
        )
        self.base = 0
        self.calls = 0
        self.text = [
            scenario.get(f"context{index}")[0]
            for index in range(2)
            if f"context{index}" in scenario
        ]
        self.stages = _Stages(self.model, scenario)

    def run_scenario(self) -> None:
        """Rerun the rollout with the recorded noise and keys. Compare every forward pass and its
        stages, the caches of the last pass, and the clip with the recording.
        """
        scenario, case = self.scenario, self.case
        schedule = schedule_of(case["steps"])
        recorded = torch.tensor([float(t) for t in case["timesteps"]])
        scenario.compare("timesteps", torch.tensor(schedule.timesteps), recorded, _T)
        clean_sigma = nearest_schedule(_SHIFT, [0.0]).sigmas_x0[0]
        given = scenario.get("first_frame")[0] if "first_frame" in scenario else None
        actions, noise = scenario.get("actions"), scenario.get("noise")[0]
        self._check_keys(actions)
        finished: list[torch.Tensor] = []
        renoise, switch, context = 0, case.get("prompt_switch_chunk"), self.text[0]
        cross_kv = self.model.cross_attention_kv(context)
        for index, x in enumerate(noise.float().split(int(case["chunk"]), dim=1)):
            if index == switch:
                context = self.text[1]
                cross_kv = self.model.cross_attention_kv(context)
            start = sum(part.shape[1] for part in finished)
            frames = range(start, start + x.shape[1])
            self.window.check_frames(frames)
            row = self._start_chunk(frames, x, cross_kv, actions[index])
            self.stages.context = context
            image = None if index or given is None else given.float()
            x = _with_image(x, image)
            for step, timestep in enumerate(schedule.timesteps):
                sigmas = torch.full((x.shape[1],), schedule.sigmas_x0[step], dtype=torch.float64)
                if image is not None:
                    sigmas[0] = clean_sigma
                x0 = self._call(row, x, timestep, image is not None, sigmas)
                if step + 1 < schedule.num_steps:
                    sigma = schedule.sigmas_noise[step + 1]
                    drawn = scenario.get(f"renoise{renoise:02d}")[0].double()
                    x0 = ((1 - sigma) * x0.double() + sigma * drawn).float()
                    renoise += 1
                x = _with_image(x0, image)
            self._call(row, x, 0.0, False, None)
            self.window.commit(frames.stop)
            finished.append(x)
        if self.calls != len(case["calls"]):
            raise ValueError(f"{len(case['calls'])} calls are recorded, got {self.calls}")
        self._compare("latents", torch.cat(finished, dim=1)[None], "latents")
        for layer in recorded_layers(scenario, "cross"):
            for kind, name in enumerate("kv"):
                ours = cross_kv[layer, kind][None]
                self._compare("cross-attention K/V", ours, f"cross{layer}.{name}")

    def _check_keys(self, actions: torch.Tensor) -> None:
        """Compare the recorded key rows with the recorded names of the held keys."""
        names = [name.upper() for name in SPACE.button_names]
        ours = [[float(name in held) for name in names] for held in self.case["actions"]]
        self.scenario.compare("keys", torch.tensor(ours), actions.float(), 0.0)

    def _start_chunk(
        self, frames: range, x: torch.Tensor, cross_kv: torch.Tensor, keys: torch.Tensor
    ) -> AbotItem:
        """Return the inputs that all forward passes of a chunk share."""
        positions, limit = self.case["positions"], self.case["rebase_max_pos"]
        limits = {} if limit is None else {"largest": int(limit)}
        window = int(self.case["window"])
        self.base = next_base(self.base, frames, window, positions, **limits)
        self.window.place_pinned(self.base)
        lead = self.config.reference_tokens if frames.start == 0 else 0
        references = given = None
        if self.references and lead:
            references = self.model.reference_patches(self.scenario.get("ref_latents"))
            given = self.scenario.get("ref_mask").float()
        return AbotItem(
            latents=x,
            timestep=0.0,
            frames=frames,
            rope=self.model.chunk_rope(frames, x.shape, lead=lead > 0),
            cross_kv=cross_kv,
            window=self.window,
            lead_tokens=lead,
            keys=self.model.embed_keys(keys.float().expand(len(frames), -1), x.shape),
            references=references,
            given=given,
        )

    def _call(
        self,
        row: AbotItem,
        x: torch.Tensor,
        timestep: float,
        has_image: bool,
        sigmas: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run one forward pass and compare its results with the recorded ones. Return x0, or `x` if
        there are no `sigmas`.
        """
        name, scenario = f"call{self.calls:02d}", self.scenario
        if self.calls == len(self.case["calls"]):
            raise ValueError(f"{self.calls} calls are recorded, the rollout makes more")
        meta = self.case["calls"][self.calls]
        clean = row.lead_tokens + (self.per_frame if has_image else 0)
        self.stages.expect(name)
        item = replace(row, latents=x, timestep=timestep, clean_tokens=clean)
        flow = self.model([item])[0]
        times = torch.full((x.shape[1],), timestep)
        times[: int(has_image)] = 0.0
        self.stages.finish(name, times, row)
        scenario.compare("call timesteps", times, torch.tensor(meta["t"]), _T)
        self._compare_counters(meta, row)
        if f"{name}.in" in scenario:
            self._compare("input", x[None], f"{name}.in")
        self._compare("flow", flow[None], f"{name}.flow")
        self._compare_caches(name, row.frames)
        self.calls += 1
        if sigmas is None:
            return x
        x0 = (x.double() - sigmas.view(1, -1, 1, 1) * flow.double()).float()
        if f"{name}.x0" in scenario:
            self._compare("predicted clean latents", x0[None], f"{name}.x0")
        return x0

    def _compare_counters(self, meta: Mapping[str, Any], row: AbotItem) -> None:
        pinned, stop = self.config.reference_tokens, row.frames.stop
        visible = min(stop, self.window.window_frames)
        ours = [
            row.frames.start * self.per_frame,
            row.frames.start,
            pinned,
            pinned + stop * self.per_frame,
            pinned + visible * self.per_frame,
            -1 if self.case["positions"] == "window" else self.base,
        ]
        keys = "start_tokens", "start_frame", "ref_tokens", "global_end", "local_end", "rope_base"
        theirs = [meta[key] for key in keys]
        self.scenario.compare("counters", torch.tensor(ours), torch.tensor(theirs), 0.0)

    def _compare_caches(self, name: str, frames: range) -> None:
        """Compare the keys and values in the window, oldest first, with those recorded after the
        forward pass, if any.
        """
        window, config, scenario = self.window, self.config, self.scenario
        visible = window.visible_frames(frames.stop)
        order = window.token_positions([window.slot(frame) for frame in visible])
        grid = self.size[2] // 2, self.size[3] // 2
        side = config.latent_size(config.reference_size, config.reference_size)[0] // 2
        starts = [config.reference_position(slot) for slot in range(config.reference_slots)]
        for layer in _layers_of(scenario, f"{name}.v"):
            pinned_k, pinned_v = window.buffer[layer, :, : window.pinned_tokens]
            k, v = window.buffer[layer].index_select(1, order)
            self._compare("cached V", torch.cat((pinned_v, v))[None], f"{name}.v{layer}")
            raw = self._rotated(k, visible, grid, -1)
            if f"{name}.k_roped{layer}" in scenario:
                placed = self._rotated(raw, [at - self.base for at in visible], grid, 1)
                self._compare("cached K", placed[None], f"{name}.k_roped{layer}")
            lead = self._rotated(pinned_k, [at + self.base for at in starts], (side, side), -1)
            whole = torch.cat((lead, raw))[None]
            self._compare("cached K without positions", whole, f"{name}.k_raw{layer}")

    def _rotated(
        self, k_TNH: torch.Tensor, positions: list[int], grid: tuple[int, int], direction: int
    ) -> torch.Tensor:
        """Return the keys of frames at `positions` with the rotary embedding applied (1) or undone
        (-1).
        """
        parts = [k_TNH[:0].float()]
        for part, at in zip(k_TNH.split(grid[0] * grid[1]), positions, strict=False):
            cos, sin = rope_tables(self.config.head_dim, range(at, at + 1), *grid)
            parts.append(apply_rope(part, cos, direction * sin))
        return torch.cat(parts)

    def _compare(self, stage: str, ours: torch.Tensor, name: str) -> None:
        if self.dtype == torch.float32:
            self.scenario.compare_recorded(stage, ours, name, _FLOW)
        else:
            self.scenario.compare_relative(stage, ours.float(), name, _BF16)


class _Stages:
    """Captures the outputs of the network's modules with hooks, in forward passes whose outputs
    were recorded.
    """

    def __init__(self, model: AbotWorldTransformer, scenario: GoldenScenario) -> None:
        self.model, self.scenario = model, scenario
        self.context = torch.empty(0)
        self._seen: dict[str, torch.Tensor] = {}
        self._wanted = False
        for layer, block in model.blocks.items():
            parts: dict[str, Any] = {"self_attn": block.self_attn}
            parts["cross_attn"] = block.cross_attn
            parts |= {"ffn": block.ffn, "out": block}
            for name, part in parts.items():
                part.register_forward_hook(self._hook(f"block{layer}.{name}"))
        model.get_submodule("head").register_forward_hook(self._hook("head"))

    def _hook(self, name: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            if self._wanted and isinstance(module, WanBlock):
                x, update = output
                output = x if update is None else gated_add(x, *update)
            if self._wanted and isinstance(output, torch.Tensor):
                self._seen[name] = output.clone()

        return keep

    def expect(self, name: str) -> None:
        self._wanted = f"{name}.patch" in self.scenario
        self._seen = {}

    def finish(self, name: str, times_F: torch.Tensor, row: AbotItem) -> None:
        if not self._wanted:
            return
        scenario, model, latents = self.scenario, self.model, row.latents
        x = scenario.get(f"{name}.in")[0]
        grid = (x.shape[1], x.shape[2] // 2, x.shape[3] // 2)

        def planes(tokens_TD: torch.Tensor) -> torch.Tensor:
            return tokens_TD.unflatten(0, grid).permute(3, 0, 1, 2)

        patches = planes(model.patch_embedding(patchify(x.contiguous())))
        self._compare("patches", patches[None], f"{name}.patch")
        assert row.keys is not None
        self._compare("added by keys", planes(row.keys)[None], f"{name}.act")
        vector_D = model.act_control_adapter.conv(scenario.get("actions")[_chunk(row)].float())
        expanded = vector_D[None, :, None, None].expand(grid[0], -1, *grid[1:])
        self._compare("key vector", expanded, f"{name}.act_conv")
        self._compare("text", model.embed_context(self.context)[None], f"{name}.text")
        self._compare_times(name, times_F, "")
        if f"{name}.patch_ref" in scenario:
            latents_SChw = scenario.get("ref_latents")
            slots = model.patch_embedding(model.reference_patches(latents_SChw))
            side = latents_SChw.shape[-1] // 2
            tiles = slots.unflatten(0, (-1, 1, side, side)).permute(0, 4, 1, 2, 3)
            self._compare("reference patches", tiles, f"{name}.patch_ref")
        if f"{name}.time_e_ref" in scenario:
            self._compare_times(name, torch.zeros(1), "_ref")
        head = self._seen["head"][:, row.lead_tokens :].unflatten(1, (latents.shape[1], -1))
        self._compare("head", head, f"{name}.head")
        for key in sorted(scenario.tensors):
            if key.startswith(f"{name}.block"):
                _, layer, part = key.split(".", 2)
                self._compare(f"block {part}", self._seen[f"{layer}.{part}"], key)

    def _compare_times(self, name: str, times_F: torch.Tensor, suffix: str) -> None:
        model = self.model
        layers = model.time_embedding, model.time_projection
        freq_dim = model.config.freq_dim
        time, modulation = embed_time(times_F.tolist(), freq_dim, *layers, model.device)
        self._compare("time embedding", time, f"{name}.time_e{suffix}")
        self._compare("time projection", modulation.flatten(1), f"{name}.time_e0{suffix}")

    def _compare(self, stage: str, ours: torch.Tensor, name: str) -> None:
        self.scenario.compare_recorded(stage, ours, name, _FLOW)


def _chunk(row: AbotItem) -> int:
    return row.frames.start // len(row.frames)


def _with_image(x: torch.Tensor, image: torch.Tensor | None) -> torch.Tensor:
    return x if image is None else torch.cat((image, x[:, image.shape[1] :]), dim=1)


def _layers_of(scenario: GoldenScenario, prefix: str) -> list[int]:
    """Return the layers that have a `{prefix}{layer}` tensor in the file."""
    names = [name.removeprefix(prefix) for name in scenario.tensors if name.startswith(prefix)]
    return sorted(int(name) for name in names if name.isdigit())


# -- images and keys -------------------------------------------------------------------------------


def run_condition(scenario: GoldenScenario) -> None:
    """Compare the start images, the reference images and the output of the action adapter with the
    recording.
    """
    height, width = (int(side) for side in json.loads(scenario.meta("size")))
    vae = recorded_vae(scenario)
    for number in _numbers(scenario, "image"):
        name = f"image{number}"
        fitted = fit_image(scenario.get(f"{name}_u8"), height, width)
        scenario.compare_recorded("fitted image", fitted, f"{name}_fitted_u8", 0.0)
        pixels = image_pixels(fitted)
        scenario.compare_recorded("pixels", pixels[:, :, 0], f"{name}_pixels", _PIXELS)
        rounded = fitted.to(torch.bfloat16).mul(2 / 255).sub(1).permute(2, 0, 1)[None]
        scenario.compare_recorded("pixels in bf16", rounded, f"{name}_pixels_bf16", _PIXELS)
        latent, _ = vae.encode(pixels, None)
        scenario.compare_recorded("image latents", latent, f"{name}_latent", _LATENT)
    side, latents = int(scenario.meta("ref_resolution")), []
    for number in _numbers(scenario, "ref"):
        resized = stretch_image(scenario.get(f"ref{number}_u8"), side)
        scenario.compare_recorded("resized reference", resized, f"ref{number}_resized_u8", 0.0)
        latents.append(vae.encode(image_pixels(resized), None)[0][0, :, 0])
    scenario.compare_recorded("reference latents", torch.stack(latents), "ref_latents", _LATENT)
    _compare_adapter(scenario)


def _compare_adapter(scenario: GoldenScenario) -> None:
    """Compare the output of the action adapter with the recorded output and with a dense
    convolution.
    """
    prefix = "adapter16.weights."
    stored = {
        name.removeprefix(prefix): scenario.get(name).float()
        for name in scenario.tensors
        if name.startswith(prefix)
    }
    weight, recorded = stored["conv.weight"], scenario.get("adapter16.out")
    adapter = KeyAdapter(AbotWorldConfig(dim=weight.shape[0] * 6, num_heads=weight.shape[0]))
    residual = adapter.residual_blocks[0]
    adapter.conv.weight = torch.nn.Parameter(fold_keys(weight, tuple(weight.shape)))
    adapter.conv.bias = torch.nn.Parameter(stored["conv.bias"])
    for name in ("conv1", "conv2"):
        layer = getattr(residual, name)
        layer.weight = torch.nn.Parameter(stored[f"residual_blocks.0.{name}.weight"])
        layer.bias = torch.nn.Parameter(stored[f"residual_blocks.0.{name}.bias"])
    keys = scenario.get("adapter16.actions").float()
    grid = recorded.shape[3:]
    ours = adapter(keys, *grid)
    scenario.compare("adapter", ours.transpose(0, 1)[None], recorded, _FLOW)
    planes = keys.repeat_interleave(weight.shape[1] // keys.shape[1], dim=1)
    dense = planes[:, :, None, None].expand(-1, -1, 2 * grid[0], 2 * grid[1])
    vector = functional.conv2d(dense, weight, stored["conv.bias"], stride=2)
    scenario.compare("adapter, dense", ours, residual(vector), _FLOW)


def recorded_vae(scenario: GoldenScenario) -> StreamingWanVAE:
    """Return the tiny VAE that encoded the images. Its weights are in the scenario's directory, or
    in a `wan22_vae` directory next to it.
    """
    places = (scenario.directory, scenario.directory.parent / "wan22_vae")
    path = next((place / _VAE_WEIGHTS for place in places if (place / _VAE_WEIGHTS).exists()), None)
    if path is None:
        raise ValueError(f"{_VAE_WEIGHTS} is missing here and in ../wan22_vae")
    metadata = _metadata(path)
    cfg = json.loads(metadata["cfg"])
    mean, std = (tuple(json.loads(metadata[key])) for key in ("mean", "std"))
    sizes = {"base_dim": cfg["dim"], "decoder_base_dim": cfg["dec_dim"], "z_dim": cfg["z_dim"]}
    config = replace(WAN_2_2_VAE, latents_mean=mean, latents_std=std, **sizes)
    vae = StreamingWanVAE(config, decoder=False)
    load_vae(vae, path)
    return vae


def _numbers(scenario: GoldenScenario, kind: str) -> list[int]:
    names = [name.removeprefix(kind).removesuffix("_u8") for name in scenario.tensors]
    return sorted(int(name) for name in names if name.isdigit())


# -- tables ----------------------------------------------------------------------------------------


def run_schedule(scenario: GoldenScenario) -> None:
    recorded = read_json(scenario.path)
    ours, zero = schedule_of(recorded["list"]), nearest_schedule(_SHIFT, [0.0])
    for name, values, theirs, tolerance in (
        ("timesteps", ours.timesteps, recorded["timesteps"], _T),
        ("sigmas", ours.sigmas_x0, recorded["sigmas"], _SIGMA),
        ("sigma of t = 0", zero.sigmas_x0, [recorded["sigma_of_t0"]], _SIGMA),
    ):
        scenario.compare(name, torch.tensor(values), torch.tensor(theirs), tolerance)


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})
