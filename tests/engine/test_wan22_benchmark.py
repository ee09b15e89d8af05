# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/wan2_2.py` runs on a real engine, and the checkpoints it writes at full size are
the released models.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.model_executor.models.wan2_2.checkpoint import hf_config

REPO = Path(__file__).parents[2]


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
def test_full_size_checkpoints(
    wan2_2, tmp_path: Path, size: str, billions: float, info: dict
) -> None:  # type: ignore[no-untyped-def, type-arg]
    """The family takes them; parameters are counted without memory, in diffusers' own class."""
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
    """The first step of an expert in a request is left out where it has others."""
    experts = ["transformer", "transformer_2", "transformer_2"]
    seconds = wan2_2.seconds_by_expert([[10.0, 30.0, 20.0], [11.0, 31.0, 21.0]], experts)
    assert seconds == {"transformer": [0.010, 0.011], "transformer_2": [0.020, 0.021]}


@pytest.mark.nightly
def test_a_request_over_both_experts(tmp_path: Path) -> None:
    script = REPO / "benchmarks" / "wan2_2.py"
    options = [
        "--tiny",
        "--size",
        "t2v-a14b",
        "--steps",
        "6",
        "--requests",
        "2",
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(script), *options],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    (path,) = tmp_path.glob("*_wan2_2_tiny_t2v_a14b.json")
    result = json.loads(path.read_text())["result"]
    assert result["steps_of_expert"] == {"transformer": 2, "transformer_2": 4}
    assert {name: len(values) for name, values in result["seconds_per_step_all"].items()} == {
        "transformer": 2,
        "transformer_2": 6,
    }
    assert all(len(request["timings_ms"]["steps"]) == 6 for request in result["requests"])
