# SPDX-License-Identifier: Apache-2.0
"""A comparison with recordings passes only if at least one value has been compared."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_omni.testing.parity.comparison import ComparisonReport, GoldenScenario, run_scenarios


def double(scenario: GoldenScenario) -> None:
    """Replay a scenario with a model that doubles its input."""
    for name in [name for name in scenario.tensors if name.startswith("in")]:
        ours = 2 * scenario.get(name)
        scenario.compare_recorded("double", ours, name.replace("in", "out"), 1e-3)


def verify(directory: Path) -> ComparisonReport:
    return run_scenarios("doubler", directory, {"*.safetensors": double})


Recorder = Callable[..., Path]


@pytest.fixture
def record(tmp_path: Path) -> Recorder:
    def write(**tensors: torch.Tensor) -> Path:
        save_file(tensors, tmp_path / "a.safetensors")
        (tmp_path / "README.md").write_text("what was recorded")
        return tmp_path

    return write


def test_equal_results_pass_and_report_the_largest_difference(record: Recorder) -> None:
    report = verify(
        record(
            in0=torch.ones(2),
            out0=torch.full((2,), 2.0),
            in1=torch.ones(2),
            out1=torch.tensor([2.0, 2.0005]),
        )
    )
    assert report.ok
    assert [(row.scenario, row.stage, row.compared) for row in report.rows] == [("a", "double", 2)]
    assert report.rows[0].max_abs_diff == pytest.approx(5e-4, rel=1e-3)
    assert "OK: 1 scenarios, 1 stages within tolerance" in report.to_text()


def test_a_file_with_nothing_to_compare_fails(record: Recorder, tmp_path: Path) -> None:
    """A recorded file that contains nothing to compare makes the comparison fail, even if another
    file passes.
    """
    record(in0=torch.ones(2), out0=torch.full((2,), 2.0))
    save_file({}, tmp_path / "empty.safetensors")
    report = verify(tmp_path)
    assert not report.ok
    assert [row.scenario for row in report.rows if not row.ok] == ["empty"]


@pytest.mark.parametrize("wrong", [2.1, float("nan"), float("inf")])
def test_a_wrong_value_fails(record: Recorder, wrong: float) -> None:
    report = verify(record(in0=torch.ones(2), out0=torch.tensor([2.0, wrong])))
    assert not report.ok
    assert "OVER" in report.to_text()
    assert json.loads(report.to_json())["ok"] is False


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"in0": torch.ones(2), "out0": torch.ones(3)}, "shape"),
        ({"in0": torch.ones(2)}, "has no tensor 'out0'"),
        ({"other": torch.ones(2)}, "1 recorded tensors were not compared: other"),
        ({"in0": torch.ones(0), "out0": torch.ones(0)}, "is empty"),
    ],
)
def test_a_scenario_that_cannot_be_compared_fails(
    record: Recorder, tensors: dict[str, torch.Tensor], message: str
) -> None:
    report = verify(record(**tensors))
    assert not report.ok
    assert message in report.to_text()


def test_an_unknown_file_fails(tmp_path: Path) -> None:
    (tmp_path / "audio.npz").write_bytes(b"x")
    report = verify(tmp_path)
    assert not report.ok
    assert "no scenario of this model has such a file name" in report.to_text()


def test_a_damaged_file_fails(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    assert "can not be read as safetensors" in verify(tmp_path).to_text()


def test_a_directory_without_a_scenario_fails(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    report = verify(tmp_path)
    assert not report.ok
    assert "holds no scenario of doubler" in report.to_text()


def test_a_comparison_without_values_fails(tmp_path: Path) -> None:
    save_file({"ignored": torch.ones(1)}, tmp_path / "a.safetensors")
    report = run_scenarios("lazy", tmp_path, {"*": lambda scenario: None})
    assert not report.ok
