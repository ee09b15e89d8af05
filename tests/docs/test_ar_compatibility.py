# SPDX-License-Identifier: Apache-2.0
"""The AR compatibility table says what its tests said, and about the tests that exist."""

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from helpers.scripts import load_script

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(REPO / "scripts" / "ar_compatibility.py")


def test_the_table_is_what_the_outcomes_say(script: ModuleType) -> None:
    """After adding or renaming a marked test: `python scripts/ar_compatibility.py` (or
    `--render`).
    """
    assert script.TABLE.read_text() == script.render(script.read())


def test_outcomes_are_of_tests_that_exist(script: ModuleType) -> None:
    """A renamed or deleted test takes its outcome along."""
    assert set(script.read()) <= {mark["test"] for mark in script.marks()}


def test_every_row_the_worker_promises_has_a_test(script: ModuleType) -> None:
    """The list of the issue that asked for the worker."""
    names = " ".join(mark["name"] for mark in script.marks())
    for wanted in (
        "chunked prefill",
        "prefix caching",
        "async scheduling",
        "speculative",
        "grammar",
        "M-RoPE",
    ):
        assert wanted in names, wanted
    for wanted in ("multimodal", "LoRA", "DP padding", "EPLB", "TP 2", "PP 2", "torchrun"):
        assert wanted in names, wanted


def test_a_cell_is_as_strong_as_its_best_proof_and_as_weak_as_its_worst(script: ModuleType) -> None:
    """A failure is never hidden by another test that passed."""
    engine, mocked = ({"how": how, "test": how} for how in ("engine", "mocked"))
    assert script.cell([], {}) == "no test"
    assert script.cell([engine, mocked], {}) == "not run"
    assert script.cell([engine, mocked], {"mocked": "passed"}) == "mocked (engine test not run)"
    assert (
        script.cell([engine, mocked], {"mocked": "passed", "engine": "passed"})
        == "yes, real engine"
    )
    assert script.cell([engine, mocked], {"mocked": "passed", "engine": "failed"}) == "**fails**"


def test_a_run_that_is_cut_short_keeps_what_it_has_seen(script: ModuleType) -> None:
    """A test that passed is kept at once, one of several parameters after the last, a failure in
    any of them.
    """
    retained: dict[str, str] = {}
    outcomes = script.Outcomes(retained.update)
    names = (
        "f.py::one",
        "f.py::two[a]",
        "f.py::two[b]",
        "f.py::three[a]",
        "f.py::three[b]",
        "f.py::skipped",
    )
    outcomes.pytest_collection_finish(
        SimpleNamespace(items=[SimpleNamespace(nodeid=name) for name in names])
    )

    def report(nodeid: str, when: str, outcome: str) -> Any:
        return SimpleNamespace(
            nodeid=nodeid,
            when=when,
            **{word: word == outcome for word in ("passed", "failed", "skipped")},
        )

    def run(nodeid: str, outcome: str = "passed") -> dict[str, str]:
        for when in ("setup", "call", "teardown"):
            outcomes.pytest_runtest_logreport(
                report(nodeid, when, outcome if when == "call" else "passed")
            )
        return dict(retained)

    assert run("f.py::one") == {"f.py::one": "passed"}
    assert "f.py::two" not in run("f.py::two[a]")
    assert run("f.py::two[b]")["f.py::two"] == "passed"
    assert run("f.py::three[a]", "failed")["f.py::three"] == "failed"
    assert run("f.py::three[b]")["f.py::three"] == "failed"
    outcomes.pytest_runtest_logreport(report("f.py::skipped", "setup", "skipped"))
    outcomes.pytest_runtest_logreport(report("f.py::skipped", "teardown", "passed"))
    assert "f.py::skipped" not in retained
