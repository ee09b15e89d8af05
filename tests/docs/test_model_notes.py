# SPDX-License-Identifier: Apache-2.0
"""A model folder's README says what each of its files holds."""

import re
from pathlib import Path

import pytest
import snippets as docs

NOTES = sorted((docs.REPO / "vllm_omni" / "model_executor" / "models").glob("*/README.md"))


@pytest.mark.parametrize("notes", NOTES, ids=lambda path: path.parent.name)
def test_the_table_of_files_is_complete(notes: Path) -> None:
    """Every module is in it, and what it names is there."""
    table = [line for line in notes.read_text().splitlines() if re.match(r"\| `\w+(\.py|/)`", line)]
    named = {name for line in table for name in re.findall(r"`(\w+\.py)`", line.split("|")[1])}
    assert named == {path.name for path in notes.parent.glob("*.py")} - {"__init__.py"}


def test_there_are_notes_to_look_at() -> None:
    """The test above has something to do."""
    assert len(NOTES) >= 7
