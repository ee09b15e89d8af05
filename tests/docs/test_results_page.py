# SPDX-License-Identifier: Apache-2.0
"""The committed tables of results and scores match the generated ones."""

import json
from pathlib import Path

import pytest
import snippets as docs
from helpers.scripts import load_script

from training.tiny_world import quality

results_page = load_script(docs.REPO / "scripts" / "results_page.py")


def test_the_committed_tables_are_generated_from_the_results() -> None:
    """The tables of results in docs/reference/results.md and the README, and baselines.json, are up
    to date. `make results` writes them.
    """
    rows = results_page.load_rows()
    assert results_page.PAGE.read_text() == results_page.page_text(rows)
    assert results_page.readme_table(rows) in results_page.README.read_text()
    assert results_page.BASELINES.read_text() == results_page.baselines_text(rows)


def test_the_committed_quality_page_is_generated_from_the_scores() -> None:
    """The quality page is up to date. `python -m training.tiny_world.quality` writes
    docs/reference/quality.md.
    """
    assert quality.PAGE.read_text() == quality.page_text()


def test_a_result_without_a_record_is_refused(tmp_path: Path) -> None:
    """A result file that no page shows is refused, so unused result files do not stay in the
    repository.
    """
    (tmp_path / "run.json").write_text(
        json.dumps({"date": "2026-01-01", "command": "python run.py"})
    )
    with pytest.raises(results_page.ResultError, match=r"run\.json"):
        results_page.load_rows(tmp_path)
