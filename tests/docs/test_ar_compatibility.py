# SPDX-License-Identifier: Apache-2.0
"""The AR compatibility table says what its tests said, and about the tests that exist."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = REPO / "scripts" / "ar_compatibility.py"
    spec = importlib.util.spec_from_file_location("ar_compatibility_script", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_what_the_outcomes_say(script: ModuleType) -> None:
    """After adding or renaming a marked test: `python scripts/ar_compatibility.py` (or `--render`)."""
    assert script.TABLE.read_text() == script.render(script.read())


def test_outcomes_are_of_tests_that_exist(script: ModuleType) -> None:
    """A renamed or deleted test takes its outcome along."""
    assert set(script.read()) <= {mark["test"] for mark in script.marks()}


def test_every_row_the_worker_promises_has_a_test(script: ModuleType) -> None:
    """The list of the issue that asked for the worker."""
    names = " ".join(mark["name"] for mark in script.marks())
    for wanted in ("chunked prefill", "prefix caching", "async scheduling", "speculative", "grammar", "M-RoPE"):
        assert wanted in names, wanted
    for wanted in ("multimodal", "LoRA", "DP padding", "EPLB", "TP 2", "PP 2", "torchrun"):
        assert wanted in names, wanted


def test_a_cell_is_as_strong_as_its_best_proof_and_as_weak_as_its_worst(script: ModuleType) -> None:
    """A failure is never hidden by another test that passed."""
    engine, mocked = ({"how": how, "test": how} for how in ("engine", "mocked"))
    assert script.cell([], {}) == "no test"
    assert script.cell([engine, mocked], {}) == "not run"
    assert script.cell([engine, mocked], {"mocked": "passed"}) == "mocked (engine test not run)"
    assert script.cell([engine, mocked], {"mocked": "passed", "engine": "passed"}) == "yes, real engine"
    assert script.cell([engine, mocked], {"mocked": "passed", "engine": "failed"}) == "**fails**"
