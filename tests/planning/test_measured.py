# SPDX-License-Identifier: Apache-2.0
"""Tests of the measured results that `vllm-omni plan` prints: their sources, networks and
memory.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.planning.measured import MeasuredRun, all_runs, find_runs
from vllm_omni.planning.memory import GPU_BYTES, plan_memory, splits
from vllm_omni.planning.models import family_plans, model_of, size_names
from vllm_omni.planning.preset_records import all_qualities

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FP8 = {"weight_itemsize": 1.0, "kv_itemsize": 1}
SETTINGS = {"bf16": {}, "FP8 weights and K/V": FP8, "FP8 K/V": {"kv_itemsize": 1}}


def source(run: MeasuredRun) -> dict[str, Any]:
    name, _, row = run.source.partition("#")
    result = json.loads((RESULTS / name).read_text())
    assert all(run.gpu in gpu for gpu in result["hardware"]["gpus"])
    found: dict[str, Any] = result["result"]["rows"][row] if row else result["result"]
    return found


@pytest.mark.parametrize("run", all_runs(), ids=lambda run: run.source)
def test_a_result_agrees_with_its_file(run: MeasuredRun) -> None:
    row = source(run)
    peaks = [memory["torch_peak"] for memory in row["device_memory"]]
    assert run.gpus == row.get("num_gpus", len(peaks))
    assert run.fps in [row.get(f"fps_{kind}") for kind in ("all_sessions", "all_streams")]
    assert run.first_frame_ms == row["time_to_first_frame_ms"]
    assert run.memory_gb == pytest.approx(max(peaks) / 1e9, abs=0.05)
    assert run.sessions == row.get("sessions", row.get("streams", 1))
    options = row.get("model_options") or {}
    assert options.get("preset") in (None, run.preset)
    assert run.window == options.get("window_frames")
    matched = options.get("cache") == "noise_matched"
    assert run.matched_steps == (len(options["denoising_steps"]) if matched else 0)
    if "preset" not in options:
        assert (run.precision != "bf16") == (row.get("quantization") is not None)


@pytest.mark.parametrize("run", all_runs(), ids=lambda run: run.source)
def test_the_computed_memory_is_near_the_measured_one(run: MeasuredRun) -> None:
    """The memory computed for the fullest GPU is within 6 percent or 0.3 GB of the measured memory.

    The computation excludes transient memory of kernels and of the allocator.
    """
    changes: dict[str, Any] = dict(SETTINGS[run.precision])
    if run.window is not None:
        changes["window"] = run.window
    if run.matched_steps:
        row = source(run)
        changes |= {
            "denoise": run.matched_steps,
            "noise_matched": True,
            "in_flight": row["chunks_in_flight"],
        }
    model = model_of(run.model, run.preset or "reference", **changes)
    engines = 2 if run.split.startswith("2 engines of ") else 1
    name = run.split.removeprefix("2 engines of ")
    split = next(each for each in splits(model, run.gpus) if str(each) == name)
    computed = plan_memory(model, GPU_BYTES[run.gpu], split, run.sessions // engines).memory_bytes
    assert computed / 1e9 == pytest.approx(run.memory_gb, rel=0.06, abs=0.3)


@pytest.mark.parametrize(
    "run", [run for run in all_runs() if run.preset], ids=lambda run: run.source
)
def test_a_run_of_a_preset_has_its_settings(run: MeasuredRun) -> None:
    """A measured run of a preset has the preset's settings and one session on one GPU."""
    family = next(name for name, plan in family_plans().items() if run.model in plan.sizes)
    assert run.preset is not None and (run.gpus, run.sessions) == (1, 1)
    preset = get_family(family).presets[run.preset]
    options = source(run).get("model_options") or {}
    assert options.get("preset") == run.preset or preset.model.items() <= options.items()
    assert (run.precision == "bf16") == (preset.kv_cache_dtype is None)


def test_the_recorded_qualities_agree_with_their_files() -> None:
    for row in all_qualities():
        result = json.loads((RESULTS / row.source).read_text())
        values = [value["starts"] for value in result["record"]["values"]]
        assert [row.psnr_db] in values and [row.sharpness] in values


def test_runs_are_found_by_network_size_and_gpus(tmp_path: Path) -> None:
    """Measured runs are found by network size and number of GPUs.

    For a published network, `find_runs` returns the results of networks of the same size. It
    returns none for other video sizes or other networks.
    """
    model = model_of("causal_wan_1_3b")
    assert find_runs(model_of("longlive"), "H200", 4) == find_runs(model, "H200", 4) != []
    assert {run.gpus for run in find_runs(model, "H200", 2)} == {1, 2}
    assert find_runs(model_of("causal_wan_1_3b", height=720, width=1280), "H200", 4) == []
    get_family("causal_wan").make_tiny(tmp_path, 0, get_family("causal_wan").layouts[0])
    assert find_runs(model_of(str(tmp_path)), "H200", 4) == []
    assert {run.model for run in all_runs()} <= set(size_names())
