# SPDX-License-Identifier: Apache-2.0
"""The AR compatibility table matches the recorded test outcomes, and each outcome belongs to an
existing test.
"""

from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script(REPO / "scripts" / "ar_compatibility.py")


def test_the_table_is_what_the_outcomes_say(script: ModuleType) -> None:
    """The AR compatibility table is up to date.

    After adding or renaming a marked test, run `python scripts/ar_compatibility.py` (or
    `--render`).
    """
    assert script.TABLE.read_text() == script.render(script.read())


def test_every_outcome_belongs_to_an_existing_test(script: ModuleType) -> None:
    """Every recorded outcome belongs to an existing test, so an outcome must be deleted when its
    test is renamed or deleted.
    """
    assert set(script.read()) <= {mark["test"] for mark in script.marks()}


def test_every_row_the_worker_promises_has_a_test(script: ModuleType) -> None:
    """Every feature that the AR worker promises has a test. The features come from the issue that
    requested the worker.
    """
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
