# SPDX-License-Identifier: Apache-2.0
"""The tables of measured results are those that the result files give."""

import json
from pathlib import Path

import pytest
import snippets as docs
from helpers.scripts import load_script

results_page = load_script(docs.REPO / "scripts" / "results_page.py")


def test_the_committed_tables_are_generated_from_the_results() -> None:
    """docs/reference/results.md and README's table. `make results` writes them."""
    rows = results_page.load_rows()
    assert results_page.PAGE.read_text() == results_page.page_text(rows)
    assert results_page.readme_table(rows) in results_page.README.read_text()


def test_a_result_without_a_record_is_refused(tmp_path: Path) -> None:
    """A measurement that no page shows does not stay in the tree."""
    (tmp_path / "run.json").write_text(
        json.dumps({"date": "2026-01-01", "command": "python run.py"})
    )
    with pytest.raises(results_page.ResultError, match=r"run\.json"):
        results_page.load_rows(tmp_path)
