# SPDX-License-Identifier: Apache-2.0
"""Compares DreamX-World's rollouts, camera, image and colour correction with golden files.

All sizes are read from `dreamx_meta.json` and from the metadata and shapes of the recorded tensors.
A directory of golden files may therefore use any sizes, windows, sinks, chunk lengths, step lists
and trajectories.

The tolerances in fp32 are 3e-5 for rollouts (including their stages and caches), 0 for counters,
1e-6 for poses and pixels, 1e-5 for image latents, and 1.5 of 255 levels for the colour correction.
The relative L2 distance of a bf16 rollout from its recording may be at most 3e-2.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vllm_omni.actions import CAMERA_SPACE, ActionFrames
from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors, read_json
from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.layers.attention.rope import apply_rope, rope_tables
from vllm_omni.model_executor.layers.kv_cache.sink_window import SinkWindow
from vllm_omni.model_executor.models.dreamx_world.camera import (
    projections,
    trained_focal,
    walk,
)
from vllm_omni.model_executor.models.dreamx_world.checkpoint import load_transformer
from vllm_omni.model_executor.models.dreamx_world.config import (
    DreamXConfig,
    DreamXOptions,
    rounded_timestep,
)
from vllm_omni.model_executor.models.dreamx_world.transformer import DreamXTransformer, PosedItem
from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.images.files import pixels_of, resize_image
from vllm_omni.model_executor.models.wan.transformer.fused_ops import gated_add
from vllm_omni.model_executor.models.wan.transformer.transformer import WanBlock
from vllm_omni.model_executor.models.wan.vae.color_correction import correct_frames
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE
from vllm_omni.model_executor.schedules import nearest_schedule
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.testing.parity.comparison import (
    ComparisonReport,
    GoldenScenario,
    read_tensors,
    run_scenarios,
)
from vllm_omni.testing.parity.rollouts import recorded_layers, renoised
from vllm_omni.worlds.movement import inverse_poses, rotation

_FLOW, _POSE, _T, _BF16 = 3e-5, 1e-6, 1e-3, 3e-2
_BF16_POSE = 1e-2
_LATENT, _LEVELS = 1e-5, 1.5
_META, _VAE = "dreamx_meta.json", "wan22_vae*weights*.safetensors"
_SHIFT = 5.0


def verify(golden_dir: Any) -> ComparisonReport:
    """Run every scenario file in `golden_dir`."""
    return run_scenarios(
        "dreamx_world",
        golden_dir,
        {
            "dreamx_camera*.safetensors": run_camera,
            "dreamx_condition*.safetensors": run_condition,
            "dreamx_*.safetensors": lambda scenario: _Rollout(scenario).run_scenario(),
        },
        auxiliary=("README*", ".*", "*weights*.safetensors", _META),
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
        self.dtype = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16}[
            self.case["dtype"]
        ]
        self.config = DreamXConfig.from_checkpoint(json.loads(read_tensors(weights)[1]["cfg"]))
        with default_dtype(self.dtype):
            self.model = DreamXTransformer(self.config)
        load_transformer(self.model, open_tensors(weights), self.config)
        rows, columns = scenario.get("noise").shape[3:]
        self.grid = rows // 2, columns // 2
        chunk, window, sink = (int(self.case[key]) for key in ("chunk", "window", "sink"))
        self.plan = ChunkPlan(chunk, chunk, window, sink)
        self.window = SinkWindow(
            moving=True,
            num_layers=self.config.num_layers,
            window_frames=self.plan.window_frames,
            sink_frames=self.plan.sink_frames,
            tokens_per_frame=self.grid[0] * self.grid[1],
            num_heads=self.config.num_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            device="cpu",
        )
        self.cross_kv = self.model.cross_attention_kv(scenario.get("context0")[0])
        self.matrices = self._camera()
        self.stages = _Stages(self.model, scenario)
        self.num_calls = 0

    def run_scenario(self) -> None:
        """Rerun the rollout with the recorded noise. Compare every forward pass, its stages, the
        caches and the clip with the recording.
        """
        scenario, case = self.scenario, self.case
        rounds = bool(case["timesteps_rounded_to_bf16"]) or self.dtype == torch.bfloat16
        options = DreamXOptions(denoising_steps=[int(step) for step in case["steps"]])
        schedule = options.schedule(rounded=rounds)
        exact = torch.tensor(options.schedule(rounded=False).timesteps)
        scenario.compare("timesteps", exact, torch.tensor(case["timesteps"]), _T)
        context = float(case["context_noise"])
        context = rounded_timestep(context) if rounds else context
        sigma_clean = nearest_schedule(_SHIFT, [0.0]).sigmas_x0[0]
        image, finished, draws = scenario.get("first_frame")[0], [], 0
        for index, x in enumerate(scenario.get("noise")[0].split(self.plan.chunk_frames, dim=1)):
            item = self._open(index, x)
            for step, timestep in enumerate(schedule.timesteps):
                sigmas = torch.full((1, x.shape[1], 1, 1), schedule.sigmas_x0[step])
                if index == 0:
                    sigmas[:, 0] = sigma_clean
                x0 = self._call(item, x, timestep, sigmas, given=int(index == 0))
                x = x0
                if step + 1 < schedule.num_steps:
                    noise = scenario.get(f"renoise{draws:02d}")[0]
                    x, draws = renoised(x0, noise, schedule.sigmas_noise[step + 1]), draws + 1
                if index == 0:
                    x = torch.cat((image, x[:, 1:]), dim=1)
            sigma_context = nearest_schedule(_SHIFT, [context]).sigmas_x0[0]
            sigmas = torch.full((1, x.shape[1], 1, 1), sigma_context)
            self._call(item, x, context, sigmas, given=0)
            finished.append(x)
        if self.num_calls != len(case["calls"]):
            raise ValueError(
                f"{len(case['calls'])} calls are recorded, the rollout makes {self.num_calls}"
            )
        self._compare("latents", torch.cat(finished, dim=1)[None], "latents")
        for layer in recorded_layers(scenario, "cross"):
            for kind, ours in zip("kv", self.cross_kv[layer], strict=True):
                self._compare("cross-attention K/V", ours[None], f"cross{layer}.{kind}")

    def _camera(self) -> torch.Tensor:
        """Compute the camera matrices of all latent frames from the recorded poses, compare them
        with the recorded matrices, and return them.
        """
        scenario = self.scenario
        rows = scenario.get("cam_rows")[:, 7:].double().unflatten(1, (3, 4))
        recorded = scenario.get("viewmats")
        poses_F44 = inverse_poses(_square(rows[_pixel_frames(self.plan, len(recorded))]))
        ours = relative_views(poses_F44, self.case["pose"] == "global")
        tolerance = _BF16_POSE * float(recorded.abs().max()) if self._rounds else _POSE
        scenario.compare("view matrices", ours.float(), recorded, tolerance)
        focal, stated = trained_focal(1)[0].float(), scenario.get("K")
        scenario.compare("focal lengths", focal, stated.diagonal()[:2], tolerance)
        return projections(ours, trained_focal(len(ours)))

    @property
    def _rounds(self) -> bool:
        return self.dtype == torch.bfloat16

    def _open(self, index: int, x: torch.Tensor) -> PosedItem:
        """Return the inputs that all forward passes of a chunk share."""
        frames = self.plan.frames(index)
        self.window.check_frames(frames)
        self.window.open(frames)
        return PosedItem(
            latents=x,
            timestep=0.0,
            frames=frames,
            rope=rope_tables(self.config.head_dim, frames, *self.grid),
            cross_kv=self.cross_kv,
            window=self.window,
            camera=self.model.camera(self.matrices[:, frames.start : frames.stop], x.shape),
        )

    def _call(
        self, item: PosedItem, x: torch.Tensor, timestep: float, sigmas: torch.Tensor, *, given: int
    ) -> torch.Tensor:
        """Run one forward pass with `given` clean frames at the start, and compare its results with
        the recorded ones.
        """
        scenario, name = self.scenario, f"call{self.num_calls:02d}"
        if self.num_calls >= len(self.case["calls"]):
            raise ValueError(f"{self.num_calls} calls are recorded, the rollout makes more")
        meta, size = self.case["calls"][self.num_calls], self.window.tokens_per_frame
        self.num_calls += 1
        self.stages.expect(name)
        inputs = replace(item, latents=x, timestep=timestep, clean_tokens=given * size)
        flow = self.model([inputs])[0]
        times = torch.tensor([0.0] * given + [timestep] * (x.shape[1] - given))
        self.stages.finish(name, times)
        scenario.compare("call timesteps", times, torch.tensor(meta["t"]), _T)
        x0 = (x.double() - sigmas.double() * flow.double()).float()
        for stage, ours, recorded in (
            ("input", x, f"{name}.in"),
            ("flow", flow, f"{name}.flow"),
            ("predicted clean latents", x0, f"{name}.x0"),
        ):
            if recorded in scenario or stage == "flow":
                self._compare(stage, ours[None], recorded)
        if meta["clean"]:
            self.window.commit(item.frames.stop)  # the sink frames come from this forward pass
            self._compare_caches(name)
        stop, visible = item.frames.stop, min(item.frames.stop, self.window.window_frames)
        counters = [item.frames.start * size, stop * size, visible * size]
        theirs = [meta[key] for key in ("start_tokens", "global_end", "local_end")]
        scenario.compare("counters", torch.tensor(counters), torch.tensor(theirs), 0.0)
        return x0

    def _compare_caches(self, name: str) -> None:
        layers = [layer for layer in self.model.blocks if f"{name}.v{layer}" in self.scenario]
        for layer in map(int, layers):
            keys, values = self._recorded_cache(layer)
            self._compare("raw keys", keys[None], f"{name}.k_raw{layer}")
            self._compare("values", values[None], f"{name}.v{layer}")

    def _recorded_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K before rotation, and V, in the order of the original: sink frames first, then
        the other frames, oldest first.
        """
        window, size = self.window, self.window.tokens_per_frame
        keys, values = [], []
        for frame in window.visible_frames(window.committed_frames):
            held = window.sinks if frame < window.sink_frames else window.buffer
            tokens = slice(window.slot(frame) * size, (window.slot(frame) + 1) * size)
            cos, sin = rope_tables(self.config.head_dim, range(frame, frame + 1), *self.grid)
            keys.append(apply_rope(held[layer, 0, tokens], cos, -sin))
            values.append(held[layer, 1, tokens].float())
        return torch.cat(keys), torch.cat(values)

    def _compare(self, stage: str, ours: torch.Tensor, name: str) -> None:
        if self._rounds:
            self.scenario.compare_relative(stage, ours.float(), name, _BF16)
        else:
            self.scenario.compare_recorded(stage, ours, name, _FLOW)


def _pixel_frames(plan: ChunkPlan, num_frames: int) -> list[int]:
    """Return, for each latent frame, the index of the video frame that defines its pose."""
    return [plan.rate.first_frame(frame) for frame in range(num_frames)]


def _square(rows_N34: torch.Tensor) -> torch.Tensor:
    """Return fp64 matrices [N, 4, 4] with the given upper three rows."""
    last = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64).expand(len(rows_N34), 1, 4)
    return torch.cat((rows_N34.double(), last), dim=1)


def relative_views(poses_F44: torch.Tensor, whole_clip: bool) -> torch.Tensor:
    """Return the view matrix of each latent frame relative to its reference frame. The reference is
    the last latent frame of the previous chunk of three frames or, with `whole_clip`, the first
    frame of the clip.
    """
    frames = torch.arange(len(poses_F44))
    references = (frames // 3 * 3 - 1).clamp_min(0)
    if whole_clip:
        references = torch.zeros_like(references)
    return inverse_poses(poses_F44) @ poses_F44[references]


class _Stages:
    """Captures the outputs of the network's modules with hooks, in forward passes whose outputs
    were recorded.
    """

    def __init__(self, model: DreamXTransformer, scenario: GoldenScenario) -> None:
        self.model, self.scenario = model, scenario
        self._seen: dict[str, torch.Tensor] = {}
        self._wanted = False
        parts: dict[str, Any] = {"patch": model.patch_embedding, "head": model.head}
        for layer, block in model.blocks.items():
            for name in ("self_attn", "cam_self_attn", "cross_attn", "ffn"):
                if hasattr(block, name):
                    parts[f"block{layer}.{name}"] = getattr(block, name)
            parts[f"block{layer}.out"] = block
        for name, part in parts.items():
            part.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def keep(module: Any, inputs: Any, output: Any) -> None:
            if self._wanted and isinstance(module, WanBlock):
                x, update = output
                output = x if update is None else gated_add(x, *update)
            if self._wanted and isinstance(output, torch.Tensor):
                self._seen[name] = output.clone()

        return keep

    def expect(self, name: str) -> None:
        self._wanted, self._seen = f"{name}.patch" in self.scenario, {}

    def finish(self, name: str, times_F: torch.Tensor) -> None:
        if not self._wanted:
            return
        scenario, model = self.scenario, self.model
        text = model.embed_context(scenario.get("context0")[0].to(model.dtype))
        times = [model._time(float(timestep)) for timestep in times_F]
        own = {
            "text": text[None],
            "time_e": torch.stack([time for time, _ in times]),
            "time_e0": torch.stack([modulation.flatten() for _, modulation in times]),
            **self._seen,
        }
        for key in sorted(scenario.tensors):
            stage = key.removeprefix(f"{name}.")
            if stage == key or stage in ("in", "flow", "x0") or stage.startswith(("k_raw", "v")):
                continue
            recorded = scenario.get(key)
            if stage == "patch":
                recorded = recorded.flatten(2).transpose(1, 2)
            kind = stage.split(".")[-1]
            scenario.compare(f"stage {kind}", own[stage].view_as(recorded), recorded, _FLOW)


# -- the camera ------------------------------------------------------------------------------------


def run_camera(scenario: GoldenScenario) -> None:
    """Compare the poses computed from keys, and the view matrices relative to both kinds of
    reference, with the recorded ones.
    """
    focal = trained_focal(1)[0].float()
    scenario.compare("focal lengths", focal, scenario.get("K").diagonal()[:2], _POSE)
    cases: list[Mapping[str, Any]] = json.loads(scenario.meta("cases"))
    options, plan = DreamXOptions(), ChunkPlan(3, 3, 12, 3)
    counts = {"share": 0, "speed": 0}
    for case in cases:
        kind = case["kind"].split(" ")[0]
        name, counts[kind] = f"{kind}{counts[kind]}", counts[kind] + 1
        if kind == "speed":
            _compare_speed(scenario, case, name)
            continue
        start = torch.eye(4, dtype=torch.float64)
        poses = walk(_held(case["keys"]), start, options.key_step, options.key_degrees)
        views = inverse_poses(poses)[:, :3].float()
        scenario.compare_recorded("poses", views, f"{name}.w2c", _POSE)
        for rule in ("chunk", "global"):
            recorded = scenario.get(f"{name}.viewmats_{rule}")
            ours = relative_views(poses[_pixel_frames(plan, len(recorded))], rule == "global")
            scenario.compare(f"view matrices, {rule}", ours.float(), recorded, _POSE)


def _compare_speed(scenario: GoldenScenario, case: Mapping[str, Any], name: str) -> None:
    """Compare poses in the convention of the offline model's script. This package does not serve
    the offline model. In this convention, each action moves the camera by a total distance equal to
    the action's speed, or turns the camera by ten times as many degrees.
    """
    yaw = pitch = 0.0
    position, views = torch.zeros(3, dtype=torch.float64), [torch.eye(4, dtype=torch.float64)]
    for held, speed in zip(case["actions"], case["speeds"], strict=True):
        sine, cosine = math.sin(yaw), math.cos(yaw)
        ahead, aside, turn_yaw, turn_pitch = (
            float(speed) * ((plus in held) - (minus in held))
            for plus, minus in ("ws", "da", "jl", "ki")
        )
        move = torch.tensor(
            [
                -ahead * sine * math.cos(pitch) + aside * cosine,
                ahead * math.sin(pitch),
                ahead * cosine * math.cos(pitch) + aside * sine,
            ],
            dtype=torch.float64,
        )
        length = int(case["duration_per_action"])
        for share in (step / length for step in range(1, length + 1)):
            angles = (
                torch.tensor([math.degrees(now) + 10 * turn * share], dtype=torch.float64)
                for now, turn in ((yaw, turn_yaw), (pitch, turn_pitch))
            )
            view = torch.eye(4, dtype=torch.float64)
            view[:3, :3] = (rotation(1, next(angles)) @ rotation(0, next(angles)))[0]
            view[:3, 3] = -view[:3, :3] @ (position + share * move)
            views.append(view)
        position = position + move
        yaw += math.radians(10 * turn_yaw)
        pitch += math.radians(10 * turn_pitch)
    ours = torch.stack(views[: int(case["frames"])]).float()
    scenario.compare_recorded("poses, offline script", ours[:, :3], f"{name}.w2c", _POSE)
    scenario.compare_recorded("view matrices, offline script", ours[::4], f"{name}.viewmats", _POSE)


def _held(keys: list[str]) -> ActionFrames:
    """Return the keys held in each video frame."""
    rows = [[name in held for name in CAMERA_SPACE.button_names] for held in keys]
    nothing = torch.zeros(len(rows), 0)
    return ActionFrames(torch.tensor(rows), nothing, nothing.sum(1))


# -- image and colours -----------------------------------------------------------------------------


def run_condition(scenario: GoldenScenario) -> None:
    """Compare the images that the VAE receives, their latents, and the colour correction with the
    recording.
    """
    height, width = json.loads(scenario.meta("size"))
    vae = _load_vae(scenario)
    for name in sorted(name for name in scenario.tensors if name.endswith("_u8")):
        if name.endswith("_resized_u8"):
            continue
        image = name.removesuffix("_u8")
        resized = resize_image(scenario.get(name), height, width)
        scenario.compare_recorded("resized image", resized, f"{image}_resized_u8", 0.0)
        pixels = pixels_of(resized)
        scenario.compare_recorded("pixels", pixels[:, :, 0], f"{image}_pixels", _POSE)
        latent, _ = vae.encode(pixels, None)
        scenario.compare_recorded("image latent", latent, f"{image}_latent", _LATENT)
    frames = (scenario.get("lab.in") / 255).permute(0, 3, 1, 2)
    for name in sorted(name for name in scenario.tensors if name.startswith("lab.out_strength")):
        digits = name.removeprefix("lab.out_strength")  # "03" means 0.3
        strength = float(f"{digits[:1]}.{digits[1:] or '0'}")
        target, corrected = None, []
        for part in (frames[:9], *frames[9:].split(12)):
            done, target = correct_frames(part, target, strength)
            corrected.append(done)
        ours = torch.cat(corrected).permute(0, 2, 3, 1) * 255
        scenario.compare_recorded(f"colours, strength {strength:g}", ours, name, _LEVELS)


def _load_vae(scenario: GoldenScenario) -> StreamingWanVAE:
    """Return the recorded VAE. Its weights are in a `wan22_vae` directory next to the scenario's
    directory, or in the scenario's directory.
    """
    folders = scenario.directory, scenario.directory.parent / "wan22_vae"
    path = next((path for folder in folders for path in sorted(folder.glob(_VAE))), None)
    if path is None:
        raise ValueError(f"{_VAE} is neither in this folder nor in ../wan22_vae")
    stated = read_tensors(path)[1]
    sizes = json.loads(stated["cfg"])
    vae = StreamingWanVAE(
        replace(
            WAN_2_2_VAE,
            base_dim=sizes["dim"],
            decoder_base_dim=sizes["dec_dim"],
            z_dim=sizes["z_dim"],
            temporal_downsample=tuple(sizes["temperal_downsample"]),
            latents_mean=tuple(json.loads(stated["mean"])),
            latents_std=tuple(json.loads(stated["std"])),
        )
    )
    load_vae(vae, path)
    return vae
