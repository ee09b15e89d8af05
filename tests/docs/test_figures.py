# SPDX-License-Identifier: Apache-2.0
"""Measured figures in README and docs are those of the results they name (`scripts/figures.py`)."""

import json
import re
from pathlib import Path

import pytest
import snippets as docs
from helpers.scripts import load_script

figures = load_script(docs.REPO / "scripts" / "figures.py")
NOT_THERE_YET = docs.REPO / "docs" / "user_guide" / "not_there_yet.md"

TABLE = """## Measured

| GPUs | time | target |
|---|---|---|
| 1 | 2006 ms | 2300 |
| 2 | 1238 ms, 9.7 frames per second | |
"""
SOURCES = """
<!-- figures
one = 2026-11-21_lingbot_world.json#result
two = 2026-11-22_pipeline_parallel_lingbot_world.json#result.rows.ulysses
one.chunk_interval_ms
two.chunk_interval_ms, two.fps
-->
"""


def complaints(page: str) -> list[str]:
    return [wrong.why for wrong in figures.check(page, figures.EVERYWHERE)]


@pytest.mark.parametrize("path", figures.pages(), ids=lambda path: str(path.relative_to(docs.REPO)))
def test_every_measured_figure_is_that_of_its_result(path: Path) -> None:
    """And every table or sentence that says it was measured names its results."""
    assert [f"line {wrong.line}: {wrong.why}" for wrong in figures.check(path.read_text(), figures.EVERYWHERE)] == []


def test_there_are_figures_to_check() -> None:
    """The test above has something to do."""
    sourced = [block for path in figures.pages() for block in figures.blocks(path.read_text()) if block.sources]
    assert len(sourced) > 20
    assert sum(len(unit.spans) for block in sourced for unit in block.units) > 200


def test_a_page_whose_figures_are_right_passes() -> None:
    """Columns of what was asked for (`GPUs`, `target`) are not read. Names may share a line."""
    assert complaints(TABLE + SOURCES) == []
    assert complaints(TABLE + SOURCES.replace("#result\ntwo =", "#result, two =")) == []


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("2006 ms", "1925 ms", "1925 is 2006 by one.chunk_interval_ms"),
        ("9.7 frames", "9.8 frames", "9.8 is 9.7 by two.fps"),
        ("9.7 frames", "9.72 frames", "9.72 is 9.69 by two.fps"),
        ("two.chunk_interval_ms, two.fps", "two.chunk_interval_ms", "1 sources for 2 numbers"),
        ("one.chunk_interval_ms\n", "", "1 lines of sources for 2 rows"),
        ("one.chunk_interval_ms\n", "one.no_such_key\n", "there is no 'no_such_key'"),
        ("one.chunk_interval_ms\n", "one.sessions_are.none\n", "there is no 'sessions_are'"),
        ("one.chunk_interval_ms\n", "one.model_options\n", "is not a number"),
        ("one.chunk_interval_ms\n", "open('x')\n", "cannot be read"),
        ("2026-11-21_lingbot_world.json", "2026-11-21_no_such_run.json", "there is no benchmarks/results/"),
    ],
)
def test_a_wrong_figure_or_source_is_found(old: str, new: str, complaint: str) -> None:
    """With what is right, where that is known."""
    found = complaints((TABLE + SOURCES).replace(old, new))
    assert any(complaint in each for each in found), found


def test_figures_without_a_source_are_found() -> None:
    """Row by row, in tables below a heading of measurements and wherever the text says so."""
    assert len(complaints(TABLE)) == 2
    assert len(complaints("One pass took 12 ms, measured on a quiet machine.\n")) == 1
    assert len(complaints("- A setting of 12 ms.\n- On an H200 a pass takes 12 ms.\n")) == 1
    assert complaints("A ping goes out every 10 s.\n") == []


def test_a_row_cannot_say_that_it_measured_nothing_when_it_did() -> None:
    """`-` is for rows, items and paragraphs of settings."""
    page = "- Pings go out every 10 s.\n- Measured: 12 ms.\n\n<!-- figures\n-\n-\n-->\n"
    assert ["its sources are '-'" in each for each in complaints(page)] == [True]


@pytest.mark.parametrize(
    ("value", "shown", "right"),
    [
        (2005.7, "2006", "2006"),
        (2005.7, "2005.7", "2005.7"),
        (2005.7, "2005", "2006"),
        (0.125, "0.12", "0.12"),
        (0.125, "0.13", "0.13"),
        (118721, "118,465", "118,721"),
        (-0.301, "-0.4", "-0.3"),
    ],
)
def test_a_figure_is_rounded_to_the_places_it_shows(value: float, shown: str, right: str) -> None:
    """Half-way either way."""
    assert figures.right_figure(value, shown) == right


def test_names_and_settings_in_code_are_no_figures() -> None:
    """What a reader does not take for a measurement either."""
    page = "On an H200, Wan 2.2 and 1.3B at 480x832 with `--steps 30`, [p99](x.md#2) and vLLM 0.32.0 took 12.5 ms.\n"
    [block] = figures.blocks(page)
    [unit] = block.units
    assert [page[begin:end] for begin, end in unit.spans] == ["12.5"]


@pytest.mark.parametrize(
    ("name", "results"),
    [
        ("LingBot World", r"lingbot_world"),
        ("causal Wan", r"streaming_wan|causal_wan"),
        ("Lance", r"lance"),
        ("Wan 2.2", r"wan_?2_?2"),
        ("Qwen2.5-Omni", r"omni_pipeline|qwen2_5_omni"),
        ("Qwen-Image", r"diffusers_executor"),
    ],
)
def test_the_docs_say_which_models_no_gpu_has_run(name: str, results: str) -> None:
    """Those without a result on a GPU are on the page of what is not there yet, and no others as "entirely"."""
    runs = [path for path in figures.RESULTS.glob("*.json") if re.search(results, path.stem)]
    on_gpu = any(json.loads(path.read_text())["hardware"]["gpus"] for path in runs)
    [entirely] = [line for line in NOT_THERE_YET.read_text().splitlines() if "entirely" in line]
    assert (name in entirely) == (not on_gpu)


def test_the_docs_name_the_cards_and_versions_of_the_results() -> None:
    """Of all results on a GPU."""
    page = NOT_THERE_YET.read_text()
    runs = [json.loads(path.read_text()) for path in figures.RESULTS.glob("*.json")]
    on_gpu = [run for run in runs if run["hardware"]["gpus"]]
    assert len(on_gpu) > 10
    cards = {card for run in on_gpu for gpu in run["hardware"]["gpus"] for card in re.findall(r"\b[A-Z]+\d{2,}\b", gpu)}
    versions = {run["versions"]["vllm"] for run in on_gpu if "vllm" in run["versions"]}
    assert [name for name in cards | versions if name not in page] == []


_NOT_YET = re.compile(r"\bn(?:ot|ever|either)\b[^.]*\bmeasured\b|\bCPU only\b|\bno result on a GPU\b", re.I)
_BENCHMARK = re.compile(r"`(benchmarks/\w+\.py[^`]*)`")


def not_measured_yet(page: Path) -> list[str]:
    """Benchmarks, with the options shown, that a page names where it says that something has not run on a GPU."""
    text = page.read_text()
    sentences = [text] if page == NOT_THERE_YET else re.split(r"(?<=\.)\s+|\n\n|\n- ", text)
    said = [" ".join(sentence.split()) for sentence in sentences]
    return [name for sentence in said if _NOT_YET.search(sentence) for name in _BENCHMARK.findall(sentence)]


def test_what_has_been_measured_is_not_said_to_be_missing() -> None:
    """A result on a GPU whose command has the script and the options that the page names."""
    runs = [json.loads(path.read_text()) for path in figures.RESULTS.glob("*.json")]
    commands = [run["command"].split() for run in runs if run["hardware"]["gpus"]]
    claims = [
        (page.name, name)
        for page in [*figures.pages(), figures.REPO / "CHANGELOG.md"]
        for name in not_measured_yet(page)
    ]
    assert [claim for claim in claims if any({*claim[1].split()} <= {*command} for command in commands)] == []


def test_a_gap_that_names_its_benchmark_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Fast (`benchmarks/a.py`). Not\nmeasured on a GPU (`benchmarks/b.py --x`).\n\n`benchmarks/c.py`.\n")
    assert not_measured_yet(page) == ["benchmarks/b.py --x"]


def test_a_wrong_figure_is_put_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`--write` changes the figure and nothing else; figures without a source stay, and are a failure."""
    page = tmp_path / "page.md"
    page.write_text((TABLE + SOURCES).replace("2006 ms", "1925 ms").replace("9.7 frames", "9.8 frames"))
    monkeypatch.setattr(figures, "REPO", tmp_path)
    monkeypatch.setattr(figures, "pages", lambda: [page])
    monkeypatch.setattr("sys.argv", ["figures.py", "--write"])
    assert figures.main() == 0
    assert page.read_text() == TABLE + SOURCES
    page.write_text(TABLE)
    assert figures.main() == 1
    assert page.read_text() == TABLE
