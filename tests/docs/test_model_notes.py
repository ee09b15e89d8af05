# SPDX-License-Identifier: Apache-2.0
"""The README of a model folder describes each file in the folder.

The README of a golden-tensor folder states where the tensors come from.
"""

import re
from pathlib import Path

import pytest
import snippets as docs

NOTES = sorted((docs.REPO / "vllm_omni" / "model_executor" / "models").glob("*/README.md"))


@pytest.mark.parametrize("notes", NOTES, ids=lambda path: path.parent.name)
def test_the_table_of_files_is_complete(notes: Path) -> None:
    """The table of files in a model's README lists every module, and every listed file exists."""
    table = [
        line for line in notes.read_text().splitlines() if re.match(r"\| `[\w/]+(\.py|/)`", line)
    ]
    named = {name for line in table for name in re.findall(r"`([\w/]+\.py)`", line.split("|")[1])}
    assert named == {
        path.relative_to(notes.parent).as_posix()
        for path in notes.parent.rglob("*.py")
        if path.name != "__init__.py"
    }


GOLDEN = sorted(path for path in (docs.REPO / "tests" / "golden").iterdir() if path.is_dir())


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.name)
def test_recorded_tensors_state_their_origin(folder: Path) -> None:
    """The README of a golden-tensor folder states the source repository, its commit, the sizes, the
    seed and any changes to the source.

    If any of this information is unknown, the README says so.
    """
    _, heading, section = (folder / "README.md").read_text().partition("\n## Recorded from\n")
    assert heading
    rows = dict(re.findall(r"^\| (\w+) \| (.+) \|$", section, re.M))
    assert list(rows) == ["source", "commit", "sizes", "seed", "changes"]


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda path: path.name)
def test_recorded_tensors_cite_files_that_exist(folder: Path) -> None:
    """Links and paths in a golden-tensor README point to existing files, relative to the README's
    folder or to the repository.
    """
    page = folder / "README.md"
    paths = re.findall(
        r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|md))`",
        page.read_text().partition("\n## Recorded from\n")[0],
    )
    missing = [
        name for name in paths if not any((root / name).exists() for root in (docs.REPO, folder))
    ]
    assert missing + [link for link in docs.links(page) if not (folder / link).exists()] == []
