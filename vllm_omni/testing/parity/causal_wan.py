# SPDX-License-Identifier: Apache-2.0
"""Compares causal Wan with golden files: Self-Forcing's rollouts, StreamDiffusionV2's stream batch,
and bidirectional Wan.

All sizes are read from `sf_meta.json`, `sdv2_meta.json` and the shapes of the recorded tensors. A
directory of golden files may therefore use any sizes, windows, chunk lengths, step counts and
seeds.

The tolerances in fp32 are 1e-5 for each forward pass of a Self-Forcing rollout and for
bidirectional Wan, and 2e-5 for the stream batch, because its differences accumulate over ticks.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_omni.model_executor.checkpoint.loading import rename
from vllm_omni.model_executor.checkpoint.tensor_files import read_json
from vllm_omni.model_executor.layers.attention.rope import rope_tables
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.models.causal_wan.cache import ChunkCache
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import open_transformer
from vllm_omni.model_executor.models.causal_wan.checkpoint.weights import load_transformer
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.causal_wan.motion import first_timestep
from vllm_omni.model_executor.models.causal_wan.transformer import CausalWanTransformer
from vllm_omni.model_executor.models.wan.transformer.chunk_transformer import ChunkItem
from vllm_omni.model_executor.models.wan.transformer.weights import TRANSFORMER_RULES
from vllm_omni.model_executor.schedules import FewStepSchedule, few_step_schedule, nearest_schedule
from vllm_omni.testing.parity.comparison import (
    ComparisonReport,
    GoldenScenario,
    read_tensors,
    run_scenarios,
)
from vllm_omni.testing.parity.rollouts import (
    RecordedCalls,
    chronological,
    clean_latents,
    ends,
    recorded_layers,
    renoised,
)

_CALL, _STREAM, _BIDIRECTIONAL = 1e-5, 2e-5, 1e-5

_WEIGHTS = "tiny_causal_wan_state.safetensors"
_SF_META, _SDV2_META, _SDV2_INPUTS = "sf_meta.json", "sdv2_meta.json", "sdv2_inputs.safetensors"


def verify(golden_dir: Path) -> ComparisonReport:
    """Run every scenario file in `golden_dir`."""
    return run_scenarios(
        "causal_wan",
        golden_dir,
        {
            "sf_*.safetensors": run_self_forcing,
            "sdv2_stream_*.safetensors": run_stream_batch,
            "bidirectional_wan.safetensors": run_bidirectional,
            "key_map_orig_to_diffusers.json": run_names,
            "sdv2_meta.json": run_noise_controller,
        },
        auxiliary=("README*", ".*", _WEIGHTS, _SF_META, _SDV2_INPUTS),
    )


def run_self_forcing(scenario: GoldenScenario) -> None:
    """Rerun a rollout with the recorded noise and a strict cache. Compare the forward passes, the
    caches and the clip with the recording.
    """
    case = _case(scenario, _SF_META)
    model, config = _model(scenario.directory)
    noise = scenario.get("noise")[0].transpose(0, 1)  # [C, F, h, w]
    size, tokens = int(case["num_frame_per_block"]), int(case["tokens_per_frame"])
    window = _window(case, config, tokens, int(case["cache_tokens"]) // tokens)
    steps = [float(t) for t in case["warped_timesteps"]]
    schedule = nearest_schedule(float(case["shift"]), steps)
    scenario.compare(
        "timesteps", torch.tensor(schedule.timesteps), torch.tensor(_warped(case, steps)), 1e-3
    )
    clean = nearest_schedule(float(case["shift"]), [0.0])
    cross_kv = model.cross_attention_kv(scenario.get("prompt_embeds")[0])
    given = (
        scenario.get("initial_latent")[0].transpose(0, 1) if "initial_latent" in scenario else None
    )
    finished = [] if given is None else [given]
    calls = RecordedCalls(scenario, case["calls"], _CALL)
    renoise = 0

    def call(x: torch.Tensor, frames: range, timestep: float, sigma: float) -> torch.Tensor:
        window.check_frames(frames)
        flow = model([_row(config, window, cross_kv, x, frames, timestep)])[0]
        x0 = clean_latents(x, flow, sigma)
        window.commit(frames.stop)
        name = calls.name
        batched = [latents.transpose(0, 1)[None] for latents in (x, flow, x0)]
        meta = calls.compare(batched[0], batched[1], batched[2], timestep)
        counters = torch.tensor([frames.start * tokens, len(frames), *ends(window)])
        expected = torch.tensor([meta["start"], meta["frames"], meta["g_end"], meta["l_end"]])
        scenario.compare("start, frames, cache ends", counters, expected, 0.0)
        for layer in recorded_layers(scenario, f"{name}.cache"):
            for kind, ours in zip("kv", chronological(window, layer), strict=True):
                scenario.compare_recorded(
                    "self-attention K/V", ours[None], f"{name}.cache{layer}.{kind}", _CALL
                )
        return x0

    start = 0
    for chunk in [] if given is None else given.split(size, dim=1):
        call(chunk, range(start, start + chunk.shape[1]), 0.0, clean.sigmas_x0[0])
        start += chunk.shape[1]
    for x in noise.split(size, dim=1):
        frames = range(start, start + x.shape[1])
        for step, timestep in enumerate(schedule.timesteps):
            x0 = call(x, frames, timestep, schedule.sigmas_x0[step])
            if step + 1 < schedule.num_steps:
                draw = scenario.get(f"renoise{renoise:02d}").transpose(0, 1)
                x = renoised(x0, draw, schedule.sigmas_noise[step + 1])
                renoise += 1
        call(x0, frames, 0.0, clean.sigmas_x0[0])
        finished.append(x0)
        start = frames.stop
    calls.finish()
    scenario.compare_recorded(
        "latents", torch.cat(finished, dim=1).transpose(0, 1)[None], "latents", _CALL
    )


def _warped(case: Mapping[str, Any], recorded: list[float]) -> list[float]:
    """Return the entries of the warped timestep table that are nearest to the recorded
    timesteps.
    """
    table = few_step_schedule("exact", float(case["shift"]), range(1000)).timesteps
    return [min(table, key=lambda entry: abs(entry - t)) for t in recorded]


def run_stream_batch(scenario: GoldenScenario) -> None:
    """Run the stream batch tick by tick. Slot j contains chunk c - j, and each step has its own K/V
    window.
    """
    case = _case(scenario, _SDV2_META)
    if case["mode"] != "stream" or float(case["adapt_thr"]) > 0:
        raise ValueError(
            f"mode {case['mode']!r} with adapt_thr {case['adapt_thr']}: only the stream batch with "
            "fixed sinks is compared, because other modes of the original have defects"
        )
    meta = read_json(scenario.directory / _SDV2_META)
    inputs, _ = read_tensors(scenario.directory / _SDV2_INPUTS)
    model, config = _model(scenario.directory)
    steps = [float(t) for t in case["steps"]]
    tokens, kv_frames, chunks = (
        int(meta["tokens_per_frame"]),
        int(case["kv_frames"]),
        int(case["chunks"]),
    )
    first_steps = [float(t) for t in meta["first_step_timestep"]]
    cross_kv = model.cross_attention_kv(inputs["prompt_embeds"][0])

    def schedule(chunk: int) -> FewStepSchedule:
        return nearest_schedule(float(meta["shift"]), [first_steps[chunk], *steps[1:]])

    def latents(name: str) -> torch.Tensor:
        if name not in inputs:
            raise ValueError(f"{_SDV2_INPUTS} has no tensor {name!r}")
        value = inputs[name]
        return (value[0] if value.dim() == 5 else value).transpose(0, 1)

    def advance(
        chunk: int, x: torch.Tensor, frames: range, steps_now: Iterable[int]
    ) -> torch.Tensor:
        for step in steps_now:
            row = _row(config, cache.at(step), cross_kv, x, frames, schedule(chunk).timesteps[step])
            flow = model([row])[0]
            x = clean_latents(x, flow, schedule(chunk).sigmas_x0[step])
            if step + 1 < len(steps):
                draw = latents(f"renoise{chunk:02d}.{step + 1}")
                x = renoised(x, draw, schedule(chunk).sigmas_noise[step + 1])
        return x

    x = latents("noisy00")
    first = x.shape[1]
    windows = [
        _window(
            {"local_attn_size": kv_frames, "sink_size": case["sink"]}, config, tokens, kv_frames
        )
    ]
    windows += [windows[0].fork() for _ in steps[1:]]
    cache = ChunkCache.noise_matched(windows)
    x = advance(0, x, range(first), range(len(steps)))
    cache.commit(first)
    scenario.compare_recorded("first chunk", x.transpose(0, 1)[None], "prepare_x0", _STREAM)

    size = latents("noisy01").shape[1]
    slots: list[tuple[int, torch.Tensor] | None] = [None] * len(steps)
    for tick in range(1, chunks + len(steps)):
        slots = [(tick, latents(f"noisy{tick:02d}")) if tick <= chunks else None, *slots[:-1]]
        for step in range(len(steps)):
            if (slot := slots[step]) is not None:
                chunk, x = slot
                frames = range(first + (chunk - 1) * size, first + chunk * size)
                slots[step] = (chunk, advance(chunk, x, frames, [step]))
        if (last := slots[-1]) is not None:
            chunk, x = last
            name = f"chunk{chunk:02d}.x0"
            scenario.compare_recorded(
                "predicted clean latents", x.transpose(0, 1)[None], name, _STREAM
            )
    _compare_final_cache(scenario, cache, chunks, first, size)


def _compare_final_cache(
    scenario: GoldenScenario, cache: ChunkCache, chunks: int, first: int, size: int
) -> None:
    """Compare the K/V window of each step after the last chunk with the recorded cache, in slot
    order.

    Only the slots of real chunks are compared. The recording continues until the pipeline is empty,
    so the windows of earlier steps also contain filler chunks.
    """
    for layer in recorded_layers(scenario, "final_cache"):
        for index, kind in enumerate("kv"):
            recorded = scenario.get(f"final_cache{layer}.{kind}")
            for step, window in enumerate(cache.windows):
                tokens = window.tokens_per_frame
                drained = len(cache.windows) - 1 - step
                end = first + chunks * size
                fed = range(end, end + drained * size)
                overwritten = {window.slot(frame) for frame in fed}
                for slot in range(window.window_frames):
                    if slot not in overwritten and slot < end:
                        part = slice(slot * tokens, (slot + 1) * tokens)
                        scenario.compare(
                            "K/V of each step",
                            window.buffer[layer, index, part],
                            recorded[step, part],
                            _STREAM,
                        )


def run_bidirectional(scenario: GoldenScenario) -> None:
    """Compare one forward pass over a whole clip with the recording. The window is as long as the
    clip.
    """
    model, config = _model(scenario.directory)
    x, timestep = scenario.get("x")[0], float(scenario.get("t")[0])
    frames = range(x.shape[1])
    tokens = model.num_tokens(x) // len(frames)
    window = _window({"local_attn_size": -1}, config, tokens, len(frames))
    cross_kv = model.cross_attention_kv(scenario.get("context")[0])
    flow = model([_row(config, window, cross_kv, x, frames, timestep)])
    scenario.compare_recorded("flow", flow, "out", _BIDIRECTIONAL)


def run_names(scenario: GoldenScenario) -> None:
    """Check that the rename rules map the recorded names as expected, and that the mapped names are
    those of the recorded weights.
    """
    recorded = read_json(scenario.path)
    wrong = [name for name, theirs in recorded.items() if rename(theirs, TRANSFORMER_RULES) != name]
    scenario.compare_names("tensor names", recorded, wrong)
    weights, _ = read_tensors(scenario.directory / _WEIGHTS)
    if missing := sorted(recorded.keys() ^ weights.keys()):
        raise ValueError(
            f"the map and {_WEIGHTS} differ in {len(missing)} names: {', '.join(missing[:3])}"
        )


def run_noise_controller(scenario: GoldenScenario) -> None:
    """Compare the first timestep of each chunk, computed from the recorded noise scale, with the
    recorded timestep.
    """
    meta = read_json(scenario.path)
    ours = [float(first_timestep(scale)) for scale in meta["noise_scale"]]
    scenario.compare(
        "first timestep", torch.tensor(ours), torch.tensor(meta["first_step_timestep"]).float(), 0.0
    )


# -- parts -----------------------------------------------------------------------------------------


def _case(scenario: GoldenScenario, file: str) -> dict[str, Any]:
    cases = read_json(scenario.directory / file).get("cases", {})
    if scenario.name not in cases:
        raise ValueError(f"{file} describes no case {scenario.name!r}")
    case: dict[str, Any] = cases[scenario.name]
    return case


def _model(directory: Path) -> tuple[CausalWanTransformer, CausalWanConfig]:
    values = read_json(directory / _SF_META)["config"]
    config = CausalWanConfig.from_checkpoint(values)
    model = CausalWanTransformer(config)
    load_transformer(model, open_transformer(directory / _WEIGHTS), config)
    return model, config


def _window(
    case: Mapping[str, Any], config: CausalWanConfig, tokens: int, cache_frames: int
) -> KVWindow:
    """Return the K/V window of a case.

    A `local_attn_size` of -1 means global attention. With any other value, a chunk attends to that
    number of the newest frames in the cache.
    """
    attended = int(case["local_attn_size"])
    slides = attended != -1
    return KVWindow(
        num_layers=config.num_layers,
        window_frames=cache_frames,
        sink_frames=int(case["sink_size"]) if slides else cache_frames,
        tokens_per_frame=tokens,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device="cpu",
        max_attention_tokens=attended * tokens if slides and attended < cache_frames else None,
    )


def _row(
    config: CausalWanConfig,
    window: Any,
    cross_kv: torch.Tensor,
    x: torch.Tensor,
    frames: range,
    timestep: float,
) -> ChunkItem:
    rope = rope_tables(config.head_dim, frames, x.shape[2] // 2, x.shape[3] // 2)
    return ChunkItem(
        latents=x, timestep=timestep, frames=frames, rope=rope, cross_kv=cross_kv, window=window
    )
