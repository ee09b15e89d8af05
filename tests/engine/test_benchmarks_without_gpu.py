# SPDX-License-Identifier: Apache-2.0
"""The benchmarks run without a GPU: their documented commands work, and their results are
consistent.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.haproxy import needs_haproxy

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


@pytest.mark.nightly
@pytest.mark.parametrize("command", commands())
def test_the_documented_command_runs(command: str, tmp_path: Path) -> None:
    run_benchmark(*shlex.split(command), "--out", str(tmp_path))
    assert list(tmp_path.glob("*.json"))


@pytest.mark.nightly
@needs_haproxy
def test_a_trace_of_visits_is_replayed_on_two_servers(tmp_path: Path) -> None:
    """All viewers in a replayed trace are served, and some of them follow their sessions to the
    other server.
    """
    run_benchmark(
        "benchmarks/fleet_trace.py",
        *shlex.split("--servers 2 --ways both --seconds 15 --play-s 4 --idle-s 2 --chunk-s 0.05"),
        *("--out", str(tmp_path)),
    )
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    found = result["ways"]["both"]
    assert found["ends"] == {"played": result["trace"]["visits"]}
    assert found["moves"] > 0
    assert found["chunks"] > 20


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
    """The Wan 2.2 family accepts checkpoints of the released sizes. Parameters are counted by
    instantiating diffusers' class on the meta device.
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
