# SPDX-License-Identifier: Apache-2.0
"""The benchmarks on a machine without a GPU: the commands in their documentation run, and their
results are consistent.
"""

import argparse
import ast
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_client import SharedEngine

from benchmarks import common
from benchmarks.common import close_session
from vllm_omni.model_executor.models.wan2_2.checkpoint import hf_config

REPO = Path(__file__).parents[2]
_COMMAND = re.compile(r"^ +# .*without a GPU\n +python (benchmarks/.*)$", re.MULTILINE)


def commands() -> list[str]:
    documentation = (
        ast.get_docstring(ast.parse(path.read_text()))
        for path in (REPO / "benchmarks").glob("*.py")
    )
    return sorted(command for text in documentation for command in _COMMAND.findall(text or ""))


def test_every_large_benchmark_documents_a_command() -> None:
    found = {command.split()[0].removeprefix("benchmarks/") for command in commands()}
    assert {
        "lingbot_world.py",
        "matrix_game.py",
        "streaming_wan.py",
        "wan2_2.py",
        "lora.py",
        "lance.py",
    } <= found


def run_benchmark(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def result_of(folder: Path, pattern: str) -> dict[str, Any]:
    (path,) = folder.glob(pattern)
    result: dict[str, Any] = json.loads(path.read_text())["result"]
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("command", commands())
def test_the_documented_command_runs(command: str, tmp_path: Path) -> None:
    run_benchmark(*shlex.split(command), "--out", str(tmp_path))
    assert list(tmp_path.glob("*.json"))


def test_a_session_is_closed_once_it_is_idle(null_engine: SharedEngine) -> None:
    """A close during a chunk, for example after a result that precedes the clean-context pass,
    waits for its end.
    """

    async def scenario() -> None:
        client = null_engine.client
        chunk = asyncio.create_task(
            client.send(session_id="s", prompt="x", options={"steps": 20, "step_ms": 20})
        )
        await client.until_at_step("s", 2)
        assert await client.engine.collective_rpc("close_session", args=("s",)) == [False]
        await close_session(client.engine, "s")
        assert chunk.done() and (await client.stats())["sessions"] == 0

    null_engine.run(scenario())


def test_every_result_has_the_fast_paths_of_its_engines(
    null_engine: SharedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark without an engine records those of the machine, which has no options."""
    monkeypatch.setattr(common, "_paths_of_engines", [])
    args = argparse.Namespace(no_save=False, out=tmp_path)

    def recorded(name: str) -> dict[str, str]:
        common.save(name, {"result": {}}, args)
        (path,) = tmp_path.glob(f"*_{name}.json")
        found = json.loads(path.read_text())["fast_paths"]
        assert all(one["on"] == (not one["reason"]) for one in found)
        return {one["name"]: one["reason"] for one in found}

    assert "GPU" in recorded("machine")["cudnn_fp8_attention"]
    null_engine.run(common.record_fast_paths(null_engine.client.engine))
    assert "--kv-cache-dtype" in recorded("engine")["cudnn_fp8_attention"]


@pytest.mark.nightly
def test_pipeline_parallel_benchmark(tmp_path: Path) -> None:
    """Runs of one GPU, a VAE stage and a stream with other steps share a result file."""
    for row in ("one_gpu", "vae_stage", "matched2_one_gpu"):
        arguments = ("--tiny", "--rows", row, "--out", str(tmp_path))
        run_benchmark("benchmarks/pipeline_parallel.py", *arguments)
    rows = result_of(tmp_path, "*_pipeline_parallel_tiny.json")["rows"]
    assert set(rows) == {"one_gpu", "vae_stage", "matched2_one_gpu"}
    digests = {name: row["latents_digests"] for name, row in rows.items()}
    assert digests["one_gpu"] == digests["vae_stage"] and len(set(digests["one_gpu"])) == 2
    assert digests["matched2_one_gpu"][0] != digests["one_gpu"][0]
    for name, row in rows.items():
        assert row["fps_all_sessions"] > 0 and row["frames_per_chunk"] == 12
        assert len(row["steps_ms"]) == (2 if "matched" in name else 5)
        assert row["stages_ms"]["decode"] > 0
    assert rows["vae_stage"]["num_gpus"] == len(rows["vae_stage"]["session_bytes"]) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("decoder", ["exact", "tiny"])
def test_streams_per_gpu_benchmark(tmp_path: Path, decoder: str) -> None:
    """Each number of streams has a result with the gaps of all counted chunks. No stream plays
    faster than requested.
    """
    arguments = ("--streams", "1", "2", "--policies", "deadline", "--decoder", decoder)
    run_benchmark("benchmarks/streams_per_gpu.py", "--tiny", *arguments, "--out", str(tmp_path))
    rows = result_of(tmp_path, f"*_streams_per_gpu_{decoder}.json")["rows"]
    assert [(row["policy"], row["streams"]) for row in rows] == [("deadline", 1), ("deadline", 2)]
    for row in rows:
        counts = [stream["chunks"] for stream in row["per_stream"]]
        assert row["chunks"] == sum(counts) == 5 * row["streams"]
        assert [len(stream["decode_ms"]) for stream in row["per_stream"]] == counts
        assert row["degraded"] == 0
        assert row["gap_p50"] >= 1 and row["slowest_stream_fps"] <= 16
        assert row["held"] == (
            row["worst_stream_gap_p99"] <= 1.5 and row["slowest_stream_fps"] >= 0.98 * 16
        )


@pytest.fixture
def wan2_2(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    import wan2_2

    return wan2_2


@pytest.mark.parametrize(
    ("size", "billions", "info"),
    [
        (
            "ti2v-5b",
            5.0,
            {"kind": "ti2v", "boundary_ratio": None, "z_dim": 48, "spatial_factor": 16},
        ),
        (
            "t2v-a14b",
            14.3,
            {"kind": "t2v", "boundary_ratio": 0.875, "z_dim": 16, "spatial_factor": 8},
        ),
        (
            "i2v-a14b",
            14.3,
            {"kind": "i2v", "boundary_ratio": 0.9, "z_dim": 16, "spatial_factor": 8},
        ),
    ],
)
def test_full_size_checkpoints_of_wan22(
    wan2_2, tmp_path: Path, size: str, billions: float, info: dict
) -> None:  # type: ignore[no-untyped-def, type-arg]
    """The family accepts the released sizes. Parameters are counted on the meta device with
    diffusers' class.
    """
    import torch
    from diffusers import WanTransformer3DModel

    wan2_2.write_checkpoint(tmp_path / "model", size)
    config = hf_config(tmp_path / "model")
    assert info.items() <= config["wan2_2"]["facts"].items() and config["dtype"] == "bfloat16"
    with torch.device("meta"):
        transformer = WanTransformer3DModel.from_config(config["wan2_2"]["transformer"])
    assert (
        round(sum(parameter.numel() for parameter in transformer.parameters()) / 1e9, 1) == billions
    )


def test_steps_are_counted_for_the_expert_that_ran_them(wan2_2) -> None:  # type: ignore[no-untyped-def]
    """The first step of an expert in a request is excluded if the expert has others."""
    experts = ["transformer", "transformer_2", "transformer_2"]
    seconds = wan2_2.seconds_by_expert([[10.0, 30.0, 20.0], [11.0, 31.0, 21.0]], experts)
    assert seconds == {"transformer": [0.010, 0.011], "transformer_2": [0.020, 0.021]}


@pytest.mark.nightly
def test_wan22_benchmark_with_both_experts(tmp_path: Path) -> None:
    arguments = ("--tiny", "--size", "t2v-a14b", "--steps", "6", "--requests", "2")
    run_benchmark("benchmarks/wan2_2.py", *arguments, "--out", str(tmp_path))
    result = result_of(tmp_path, "*_wan2_2_tiny_t2v_a14b.json")
    assert result["steps_of_expert"] == {"transformer": 2, "transformer_2": 4}
    assert {name: len(values) for name, values in result["seconds_per_step_all"].items()} == {
        "transformer": 2,
        "transformer_2": 6,
    }
    assert all(len(request["timings_ms"]["steps"]) == 6 for request in result["requests"])
