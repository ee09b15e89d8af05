# SPDX-License-Identifier: Apache-2.0
"""Compares LingBot-World with golden files: transformer rollouts, camera and schedules.

`lingbot_vae.py` compares the VAE. All sizes are read from the metadata and shapes of the recorded
tensors, so golden files may use any sizes, windows, chunk lengths and seeds. The recorded weights
have the original code's parameter names.

In fp32, the tolerance is 2e-5 for flow and K/V. The fp32 tolerance for latents is 1e-4, because
rounding differences grow over several chunks. In bf16, the tolerance is 2 % of the largest recorded
value, because bf16 has 8 significant bits and the original's autocast changes the flow by 0.7 %.
The tolerance for the camera is 1e-5. Schedules must be equal if the reference is fp32, and within
1e-9 if it is fp64.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_omni.model_executor.dtypes import default_dtype
from vllm_omni.model_executor.layers.attention.rope import rope_tables
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.models.lingbot_world import camera as cam
from vllm_omni.model_executor.models.lingbot_world import pretrain
from vllm_omni.model_executor.models.lingbot_world.config import (
    NATIVE_HEIGHT,
    NATIVE_WIDTH,
    LingBotWorldConfig,
)
from vllm_omni.model_executor.models.lingbot_world.transformer import CameraItem, LingBotTransformer
from vllm_omni.model_executor.schedules import FewStepSchedule, few_step_schedule, unipc_flow_table
from vllm_omni.testing.parity.comparison import (
    ComparisonReport,
    GoldenScenario,
    fill_slots,
    read_tensors,
    run_scenarios,
)
from vllm_omni.testing.parity.lingbot_trajectory import CameraTrajectory, prepare_trajectory
from vllm_omni.testing.parity.lingbot_vae import (
    VAE_WEIGHTS,
    run_vae,
    run_vae_cache_shapes,
    run_vae_names,
)
from vllm_omni.testing.parity.rollouts import chronological, clean_latents, ends, renoised
from vllm_omni.worlds.movement import CameraMotion

_FLOW, _KV, _LATENT = 2e-5, 2e-5, 1e-4
_BF16_RELATIVE = 2e-2
_ROLLED_OUT = 1e-4
"""Tolerance for relative L2 distances after a rollout. The tolerance is large because guidance and
the solver amplify rounding differences over 40 steps.
"""
_CAMERA = 1e-5
_SIGMA = 1e-9

_BRANCHES = {"cond": "context", "uncond": "context_null"}
_DIT_WEIGHTS, _DIT_INPUTS = "dit_tiny_weights.safetensors", "dit_inputs.safetensors"
_PRETRAIN_WEIGHTS, _PRETRAIN_INPUTS = (
    "pretrain_tiny_weights.safetensors",
    "pretrain_inputs.safetensors",
)


def verify(golden_dir: Path) -> ComparisonReport:
    """Run every scenario file in `golden_dir`."""
    return run_scenarios(
        "lingbot_world",
        golden_dir,
        {
            "dit_*.safetensors": run_rollout,
            "pretrain_*.safetensors": run_pretrain,
            "camera*.safetensors": run_camera,
            "act_condition*.safetensors": run_act_condition,
            "schedule*.json": run_schedules,
            "vae*.safetensors": run_vae,
            "vae_key_map.json": run_vae_names,
            "vae_dec_cache_shapes.json": run_vae_cache_shapes,
        },
        auxiliary=(
            "README*",
            ".*",
            _DIT_WEIGHTS,
            _DIT_INPUTS,
            _PRETRAIN_WEIGHTS,
            _PRETRAIN_INPUTS,
            VAE_WEIGHTS,
        ),
    )


# -- transformer -----------------------------------------------------------------------------------


def run_rollout(scenario: GoldenScenario) -> None:
    """Rerun a rollout over several chunks with the recorded noise. Compare all recorded stages."""
    values = json.loads(scenario.meta("cfg"))
    config = LingBotWorldConfig.from_checkpoint(values)
    bf16 = any(name in scenario.meta("dtype") for name in ("bf16", "bfloat16"))
    dtype = torch.bfloat16 if bf16 else torch.float32
    model = _load_transformer(scenario.directory / _DIT_WEIGHTS, config, dtype)
    inputs = {
        name: tensor.float()
        for name, tensor in read_tensors(scenario.directory / _DIT_INPUTS)[0].items()
    }
    window = _window(scenario, values, config, dtype)
    schedule = _recorded_schedule(scenario)
    chunk_frames = int(scenario.meta("chunk"))

    def compare(stage: str, ours: torch.Tensor, name: str, tolerance: float) -> None:
        if name in scenario:
            if bf16:
                tolerance = _BF16_RELATIVE * float(scenario.get(name).abs().max())
            scenario.compare_recorded(stage, ours, name, tolerance)

    cross_kv = model.cross_attention_kv(inputs["context"])
    for layer in range(config.num_layers):
        for kind, ours in zip("kv", cross_kv[layer], strict=True):
            compare("cross-attention K/V", ours.unsqueeze(0), f"xattn{layer}.{kind}", _KV)

    for chunk in range(int(scenario.meta("nchunks"))):
        frames = range(chunk * chunk_frames, (chunk + 1) * chunk_frames)
        part = slice(frames.start, frames.stop)
        window.check_frames(frames)
        x, y = inputs["noise"][:, part], inputs["y"][:, part]
        _, _, height, width = x.shape
        if x.shape[1] != chunk_frames:
            raise ValueError(
                f"{_DIT_INPUTS} holds {inputs['noise'].shape[1]} frames, chunk {chunk} needs "
                f"{frames.stop}"
            )
        row: dict[str, Any] = {
            "condition": y,
            "frames": frames,
            "rope": rope_tables(config.head_dim, frames, height // 2, width // 2),
            "camera": model.camera_modulation(inputs["camera"][0][:, part]),
            "cross_kv": cross_kv,
            "window": window,
        }
        for step, timestep in enumerate(schedule.timesteps):
            name = f"c{chunk}.s{step}"
            compare("noisy latents", x, f"{name}.x", _LATENT)
            flow = model([CameraItem(latents=x, timestep=timestep, **row)])[0]
            scenario.get(f"{name}.flow")  # every step's flow must have been recorded
            compare("flow", flow, f"{name}.flow", _FLOW)
            x0 = clean_latents(x, flow, schedule.sigmas_x0[step])
            compare("predicted clean latents", x0, f"{name}.x0", _LATENT)
            if step + 1 < schedule.num_steps:
                x = renoised(x0, scenario.get(f"{name}.eps"), schedule.sigmas_noise[step + 1])
        model([CameraItem(latents=x0, timestep=0.0, **row)], kv_only=True)
        window.commit(frames.stop)
        compare("latents", x0, f"c{chunk}.latent", _LATENT)
        for layer in range(config.num_layers):
            for kind, ours in zip("kv", chronological(window, layer), strict=True):
                compare("self-attention K/V", ours.unsqueeze(0), f"c{chunk}.kv{layer}.{kind}", _KV)
        if f"c{chunk}.ends" in scenario:
            scenario.compare_recorded(
                "cache ends", torch.tensor(ends(window)), f"c{chunk}.ends", 0.0
            )


def run_pretrain(scenario: GoldenScenario) -> None:
    """Rerun a recorded rollout of the undistilled model.

    A rollout of this model uses two caches, guidance, and a multi-step solver that restarts with
    each chunk.
    """
    config = LingBotWorldConfig.from_checkpoint(values := json.loads(scenario.meta("cfg")))
    if (float(scenario.meta("guidance")), int(scenario.meta("steps"))) != (
        pretrain.GUIDANCE,
        pretrain.STEPS,
    ):
        raise ValueError(
            f"only guidance {pretrain.GUIDANCE} and {pretrain.STEPS} steps are supported"
        )
    model = _load_transformer(scenario.directory / _PRETRAIN_WEIGHTS, config, torch.float32)
    inputs = read_tensors(scenario.directory / _PRETRAIN_INPUTS)[0]
    tokens, chunk_frames = int(scenario.meta("frame_seqlen")), int(scenario.meta("chunk"))
    num_chunks, shift = int(scenario.meta("nchunks")), float(scenario.meta("shift"))
    slides = values.get("local_attn_size", -1) != -1
    window_frames = values["local_attn_size"] if slides else chunk_frames * num_chunks
    sizes: dict[str, Any] = {
        "num_layers": config.num_layers,
        "window_frames": window_frames,
        "sink_frames": values.get("sink_size", 0) if slides else window_frames,
        "tokens_per_frame": tokens,
        "num_heads": config.num_heads,
        "head_dim": config.head_dim,
        "dtype": torch.float32,
        "device": "cpu",
    }
    windows = {"cond": KVWindow(**sizes), "uncond": KVWindow(**sizes)}
    cross_kv = {name: model.cross_attention_kv(inputs[key]) for name, key in _BRANCHES.items()}
    solver = pretrain.unipc(shift)
    scenario.compare_recorded("timesteps", solver.timesteps, "sched.timesteps", 0.0)
    scenario.compare_recorded("sigmas", solver.sigmas, "sched.sigmas", _CAMERA)
    for chunk in range(num_chunks):
        frames = range(chunk * chunk_frames, (chunk + 1) * chunk_frames)
        part = slice(frames.start, frames.stop)
        x = inputs["noise"][:, part]
        _, _, height, width = x.shape
        rope = rope_tables(config.head_dim, frames, height // 2, width // 2)
        camera = model.camera_modulation(inputs["camera"][0][:, part])
        shared: dict[str, Any] = {
            "frames": frames,
            "rope": rope,
            "camera": camera,
            "condition": inputs["y"][:, part],
        }

        def rows(latents: torch.Tensor, timestep: float) -> list[CameraItem]:
            noisy: dict[str, Any] = {"latents": latents, "timestep": timestep}
            return [
                CameraItem(cross_kv=cross_kv[name], window=window, **noisy, **shared)  # noqa: B023
                for name, window in windows.items()
            ]

        solver = pretrain.unipc(shift)
        for step, timestep in enumerate(solver.timesteps.tolist()):
            flows = dict(zip(windows, model(rows(x, float(timestep))), strict=True))
            for name, flow in flows.items():
                if step == 0 and chunk == 0:
                    scenario.compare_recorded("first flow", flow, f"c{chunk}.s{step}.{name}", _FLOW)
                elif f"c{chunk}.s{step}.{name}" in scenario:
                    scenario.compare_relative("flow", flow, f"c{chunk}.s{step}.{name}", _ROLLED_OUT)
            x = pretrain.solver_step(
                solver, step, x, pretrain.guided(flows["cond"], flows["uncond"])
            )
            if f"c{chunk}.s{step}.x_next" in scenario:
                scenario.compare_relative(
                    "solver's latents", x, f"c{chunk}.s{step}.x_next", _ROLLED_OUT
                )
        scenario.compare_relative("latents", x, f"c{chunk}.latent", _ROLLED_OUT)
        model(rows(x, 0.0), kv_only=True)
        for window in windows.values():
            window.commit(frames.stop)
        scenario.compare_recorded(
            "cache ends", torch.tensor(ends(windows["cond"])), f"c{chunk}.ends", 0.0
        )
    for name, window in windows.items():
        for layer in range(config.num_layers):
            for kind, ours in zip("kv", chronological(window, layer), strict=True):
                if f"kv{layer}.{name}.{kind}" in scenario:
                    scenario.compare_relative(
                        "self-attention K/V",
                        ours.unsqueeze(0),
                        f"kv{layer}.{name}.{kind}",
                        _ROLLED_OUT,
                    )


def _load_transformer(
    path: Path, config: LingBotWorldConfig, dtype: torch.dtype
) -> LingBotTransformer:
    weights, _ = read_tensors(path)
    with default_dtype(dtype):
        model = LingBotTransformer(config)
    fill_slots(checkpoint_slots(model), weights, path.name)
    return model


def _window(
    scenario: GoldenScenario, values: dict[str, Any], config: LingBotWorldConfig, dtype: torch.dtype
) -> KVWindow:
    tokens = int(scenario.meta("frame_seqlen"))
    cache_tokens, attention_tokens = (
        int(scenario.meta("kv_size")),
        int(scenario.meta("max_attention_size")),
    )
    if cache_tokens % tokens:
        raise ValueError(
            f"kv_size {cache_tokens} is not a whole number of frames of {tokens} tokens"
        )
    cache_frames = cache_tokens // tokens
    slides = values.get("local_attn_size", -1) != -1
    return KVWindow(
        num_layers=config.num_layers,
        window_frames=cache_frames,
        sink_frames=values.get("sink_size", 0) if slides else cache_frames,
        tokens_per_frame=tokens,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device="cpu",
        max_attention_tokens=attention_tokens if attention_tokens < cache_tokens else None,
    )


def _recorded_schedule(scenario: GoldenScenario) -> FewStepSchedule:
    """Compare the timesteps of the schedule for the recorded shift and indices with the recorded
    timesteps, and return the schedule.

    Integer timesteps indicate the `original` convention.
    """
    timesteps = scenario.get("sched.timesteps")
    convention = "exact" if timesteps.is_floating_point() else "original"
    indices = json.loads(scenario.meta("index"))
    schedule = few_step_schedule(convention, float(scenario.meta("shift")), indices)  # type: ignore[arg-type]
    tolerance = 1e-3 if convention == "exact" else 0.0  # float timesteps may be computed in fp32
    scenario.compare(
        "timesteps", torch.tensor(schedule.timesteps, dtype=torch.float64), timesteps, tolerance
    )
    return schedule


# -- camera ----------------------------------------------------------------------------------------


def run_camera(scenario: GoldenScenario) -> None:
    """Compare uploaded trajectories, the integration of actions, and the camera maps of chunks with
    the recording.
    """
    height, width = int(scenario.meta("h")), int(scenario.meta("w"))
    clips = sorted(
        (name.removesuffix(".poses_in") for name in scenario.tensors if name.endswith(".poses_in")),
        key=lambda clip: len(scenario.tensors[f"{clip}.poses_in"]),
    )
    for clip in clips:
        _compare_clip(scenario, clip, height, width)
    if "full.values" in scenario:
        _compare_full_size(scenario, clips)
    if any(name.startswith("act.") for name in scenario.tensors):
        _compare_actions(scenario, height, width)


def _clip(scenario: GoldenScenario, clip: str, height: int, width: int) -> CameraTrajectory:
    named = re.fullmatch(r"f(\d+)", clip)
    return prepare_trajectory(
        scenario.get(f"{clip}.poses_in"),
        scenario.get(f"{clip}.intrinsics_in"),
        height,
        width,
        num_frames=int(named[1]) if named else None,
        chunk_frames=int(scenario.metadata.get("chunk", 3)),
    )


def _compare_clip(scenario: GoldenScenario, clip: str, height: int, width: int) -> None:
    path = _clip(scenario, clip, height, width)
    maps = cam.camera_map(path.relative_N44, path.intrinsics_N4, height, width).unsqueeze(0)
    stages = {
        "interp": path.poses_N44,
        "rel": path.relative_N44,
        "K": path.intrinsics_N4[0],
        "folded": maps,
        "folded_last": maps[:, :, -1:],
    }
    for name in [name for name in scenario.tensors if name.startswith(f"{clip}.folded_first")]:
        stages[name.removeprefix(f"{clip}.")] = maps[:, :, : scenario.get(name).shape[2]]
    for stage, ours in stages.items():
        if f"{clip}.{stage}" in scenario:
            scenario.compare_recorded(f"{clip} {stage}", ours, f"{clip}.{stage}", _CAMERA)


def _compare_full_size(scenario: GoldenScenario, clips: list[str]) -> None:
    """Compare individual cells (frame, row, column) of the longest clip at the native size with the
    recorded cells.
    """
    if not clips:
        raise ValueError("full.values needs a recorded clip (`*.poses_in`)")
    path = _clip(scenario, clips[-1], NATIVE_HEIGHT, NATIVE_WIDTH)
    frame, row, column = scenario.get("full.cells").unbind(1)
    used = sorted(set(frame.tolist()))
    maps = cam.camera_map(
        path.relative_N44[used], path.intrinsics_N4[used], NATIVE_HEIGHT, NATIVE_WIDTH
    )
    index = torch.tensor([used.index(f) for f in frame.tolist()])
    scenario.compare_recorded(
        "full size cells", maps[:, index, row, column].T, "full.values", _CAMERA
    )
    if "full.K" in scenario:
        scenario.compare_recorded("full size K", path.intrinsics_N4[0], "full.K", _CAMERA)


def _compare_actions(scenario: GoldenScenario, height: int, width: int) -> None:
    held = cam.read_keys(actions := json.loads(scenario.meta("actions")), len(actions))
    start = cam.CameraTail.origin()
    poses, _ = cam.integrate_actions(held, start)
    # `held` has one entry per video frame.
    by_frame = [CameraMotion.of_keys([keys], yaw_degrees=2.0, pitch_degrees=2.0) for keys in held]
    offline, _ = cam.integrate_motions(by_frame, start)
    origin = start.pose_44.unsqueeze(0)
    for name, ours in (
        ("original_c2ws", torch.cat((origin, offline))),
        ("sglang_c2ws", torch.cat((origin, poses))),
        ("vllm_c2ws", poses),
    ):
        if f"act.{name}" in scenario:
            scenario.compare_recorded(f"actions {name}", ours, f"act.{name}", _CAMERA)
    pattern = re.compile(r"act\.(sglang|vllm_action|vllm_realtime)_chunk(\d+)")
    for name in sorted(scenario.tensors):
        if match := pattern.fullmatch(name):
            frames = scenario.get(name).shape[2]
            relative = _chunk_relative(
                match[1], poses, range(int(match[2]) * frames, (int(match[2]) + 1) * frames)
            )
            maps = cam.camera_map(
                relative, cam.action_intrinsics(frames, height, width), height, width
            )
            scenario.compare_recorded(
                f"actions {match[1]} chunks", maps.unsqueeze(0), name, _CAMERA
            )


def run_act_condition(scenario: GoldenScenario) -> None:
    """Compare a camera path that is uploaded together with keys: the relative poses and keys of
    each latent frame, and the action map computed from them.
    """
    height, width = json.loads(scenario.meta("size"))
    recorded = scenario.get("wasd_latent")
    wasd = scenario.get("wasd")
    poses, intrinsics = scenario.get("poses"), scenario.get("intrinsics")
    chunk_frames = int(scenario.metadata.get("chunk", 1))
    path = prepare_trajectory(poses, intrinsics, height, width, chunk_frames=chunk_frames)
    flags = cam.per_latent(cam.read_flags(wasd, len(wasd)), range(len(recorded)))
    scenario.compare_recorded("act relative poses", path.relative_N44, "relative", _CAMERA)
    scenario.compare_recorded("act flags", flags, "wasd_latent", 0.0)
    maps = cam.action_map(path.relative_N44, path.intrinsics_N4, flags, height, width)
    scenario.compare_recorded("act map", maps.unsqueeze(0), "camera", _CAMERA)


def _chunk_relative(convention: str, poses_N44: torch.Tensor, frames: range) -> torch.Tensor:
    """Return the scaled relative poses of a chunk, as a public implementation computes them."""
    chunk = poses_N44[frames.start : frames.stop]
    if len(chunk) != len(frames):
        raise ValueError(f"{len(poses_N44)} actions are recorded, a chunk needs {frames.stop}")
    # SGLang scales the whole history by its largest step so far. The first pose is only a
    # reference.
    if convention == "sglang":
        return cam.scaled_translations(cam.relative_poses(poses_N44[: frames.stop]))[frames.start :]
    before = poses_N44[frames.start - 1] if frames.start else cam.CameraTail.origin().pose_44
    relative = cam.relative_poses(chunk, before)
    return cam.scaled_translations(
        relative, cam.MOVE_UNIT if convention == "vllm_realtime" else None
    )


# -- schedules -------------------------------------------------------------------------------------


def run_schedules(scenario: GoldenScenario) -> None:
    """Compare each recorded table with the schedule for the table's indices and the shift in the
    table's name.
    """
    tables = json.loads(scenario.path.read_text())
    if not tables:
        raise ValueError("no schedule is recorded")
    for name, rows in tables.items():
        match = re.search(r"shift([\d.]+)", name)
        if match is None:
            raise ValueError(f"schedule {name!r} does not name its shift")
        compare = _compare_original if name.startswith("original") else _compare_exact
        compare(scenario, name, float(match[1]), rows)


def _compare_original(
    scenario: GoldenScenario, name: str, shift: float, rows: list[dict[str, Any]]
) -> None:
    schedule = few_step_schedule("original", shift, [row["index"] for row in rows])
    timesteps, sigmas = unipc_flow_table(shift)
    for step, row in enumerate(rows):
        same_t = np.flatnonzero(timesteps == row["t_model"]).tolist()
        if same_t != row["duplicates"]:
            raise ValueError(
                f"{name}: entries {same_t} share t = {row['t_model']}, recorded {row['duplicates']}"
            )
        _compare_values(scenario, f"{name} t", schedule.timesteps[step], row["t_model"], 0.0)
        for ours, key in (
            (schedule.sigmas_x0[step], "sigma_x0"),
            (schedule.sigmas_noise[step], "sigma_addnoise"),
            (float(sigmas[row["index"]]), "sigma_at_index"),
        ):
            _compare_values(scenario, f"{name} sigma", ours, row[key], _SIGMA)


def _compare_exact(
    scenario: GoldenScenario, name: str, shift: float, rows: list[dict[str, Any]]
) -> None:
    """Compare the schedule with a recorded table in the `exact` convention.

    If all values of the table can be represented in fp32, the table was computed in fp32 and must
    be bit-identical.
    """
    default = (0, 250, 500, 750) if "v2" in name else (0, 179, 358, 679)
    indices = [
        row.get("idx", default[min(step, len(default) - 1)]) for step, row in enumerate(rows)
    ]
    single = all(
        float(np.float32(row[key])) == row[key] for row in rows for key in ("sigma", "t_model")
    )
    schedule = few_step_schedule("exact", shift, indices, np.float32 if single else np.float64)
    tolerance = 0.0 if single else _SIGMA
    for step, row in enumerate(rows):
        _compare_values(scenario, f"{name} t", schedule.timesteps[step], row["t_model"], tolerance)
        _compare_values(
            scenario, f"{name} sigma", schedule.sigmas_x0[step], row["sigma"], tolerance
        )


def _compare_values(
    scenario: GoldenScenario, stage: str, ours: float, recorded: float, tolerance: float
) -> None:
    pair = torch.tensor([ours, recorded], dtype=torch.float64)
    scenario.compare(stage, pair[0], pair[1], tolerance)
