# SPDX-License-Identifier: Apache-2.0
"""Tests of the benchmark results recorded in the package: the rows that a machine can repeat, and
comparisons with the recorded results.
"""

from pathlib import Path
from typing import Any

import pytest
from helpers.scripts import load_script

from vllm_omni.planning.baselines import (
    Baseline,
    BaselineCheck,
    BaselineValue,
    Machine,
    all_baselines,
    choose_rows,
    compare_result,
    gpu_kind,
)

results_page = load_script(Path(__file__).parents[2] / "scripts" / "results_page.py")
H200 = Machine("Xeon", 16, "H200", 140 * 10**9)
RTX_4090 = Machine("Xeon", 16, "RTX 4090", 24 * 10**9)
CPU = Machine("EPYC", 2)


def row(name: str, script: str | None, gpu: str | None = "H200", **changes: Any) -> Baseline:
    values = (
        BaselineValue("chunk, ms", (90.0, 100.0, 130.0)),
        BaselineValue("peak memory, GB", (changes.pop("memory_gb", 10.0) if gpu else 0.0,)),
    )
    check = None
    if script is not None:
        check = BaselineCheck(script, (), "chunk_interval_ms", "chunk, ms")
    return Baseline(
        name,
        f"row {name}",
        "2026-01-01",
        "0",
        "python benchmarks/x.py",
        changes.get("cpu", "EPYC"),
        changes.get("cores", 2),
        gpu,
        1 if gpu else 0,
        values,
        check,
    )


def test_the_file_has_all_results_and_a_row_for_each_kind_of_machine() -> None:
    """The file contains all results, and every machine has rows that it can repeat: a CPU machine,
    a GPU with recorded results, and a GPU without recorded results.
    """
    names = sorted(one.name for one in all_baselines())
    assert names == sorted(one.name for one in results_page.load_rows())
    assert [one.check.script for one in choose_rows(CPU) if one.check] == ["demo_world"]
    assert {one.gpu for one in choose_rows(H200)} == {"H200"}
    assert len(choose_rows(H200)) == 4
    chosen = choose_rows(RTX_4090)
    assert chosen and all((one.median("peak memory, GB") or 0) <= 24 for one in chosen)


def test_one_row_of_each_benchmark_is_chosen_with_the_same_hardware_first() -> None:
    rows = [
        row("a", "world", "H100"),
        row("b", "world"),
        row("c", "world"),
        row("d", "stream", "H100"),
        row("e", None),
        row("f", "demo", None),
        row("g", "large", memory_gb=141.0),
    ]
    assert [one.name for one in choose_rows(H200, rows=rows)] == ["b", "d"]
    assert [one.name for one in choose_rows(CPU, rows=rows)] == ["f"]


def test_named_rows_are_chosen_and_others_are_refused() -> None:
    """Rows can be chosen by name. An unknown row is rejected. A row is also rejected if it needs a
    GPU that the machine lacks, or more memory than the machine has.
    """
    rows = [row("a", "world"), row("b", "world"), row("g", "large", memory_gb=141.0)]
    assert [one.name for one in choose_rows(H200, ["b", "a"], rows)] == ["b", "a"]
    for name, machine in (("g", H200), ("a", CPU), ("x", H200)):
        with pytest.raises(KeyError, match=name):
            choose_rows(machine, [name], rows)


@pytest.mark.parametrize(
    ("measured", "verdict", "ratio"),
    [
        (100.0, "within", 1.0),
        (106.0, "within", 1.06),
        (107.0, "slower", 1.07),
        (90.0, "faster", 0.9),
    ],
)
def test_a_result_is_compared_with_the_median_of_the_record(
    measured: float, verdict: str, ratio: float
) -> None:
    """A result is compared with the median of the recorded results. The limits allow for a
    difference of 6 %, because results differ by that much between GPUs of the same model.
    """
    found = compare_result(row("a", "world"), {"result": {"chunk_interval_ms": measured}}, H200)
    assert (found.verdict, found.ratio, found.recorded) == (verdict, ratio, 100.0)
    assert found.same_hardware


@pytest.mark.parametrize(
    ("gpu", "machine", "same"),
    [
        ("H100", H200, False),
        ("H200", H200, True),
        (None, CPU, True),
        (None, Machine("EPYC", 4), False),
        (None, Machine("Xeon", 2), False),
    ],
)
def test_ratios_of_other_hardware_have_no_verdict(
    gpu: str | None, machine: Machine, same: bool
) -> None:
    """A result from other hardware gets a ratio to the recorded result but no verdict."""
    found = compare_result(row("a", "w", gpu), {"result": {"chunk_interval_ms": 300}}, machine)
    assert found.ratio == 3
    assert found.same_hardware == same
    assert found.verdict == ("slower" if same else "other hardware")


def test_kinds_of_gpus_are_short_names() -> None:
    assert [gpu_kind(name) for name in ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "L40S")] == [
        "H100",
        "H200",
        "L40S",
    ]
