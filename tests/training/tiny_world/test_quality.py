# SPDX-License-Identifier: Apache-2.0
"""The quality page: what was run is not run again, and nothing is published of half a
comparison.
"""

import argparse
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from training.tiny_world import quality, score

RESULT = {
    "chunks": 5,
    "size": [96, 160],
    "device": "cpu",
    "psnr": [20.0, 18.0, 17.0, 16.0, 15.04],
    "sharpness": [1.0, 0.9, 0.8, 0.7, 0.612],
    "style": [1.0] * 5,
    "turn": {"ratio": 1.01, "wrong_sign": 2},
    "step": {"ratio": 0.98},
    "switch": {"share": [0.5, 0.75]},
    "loop": {"psnr": 25.0},
    "level": {"largest": 0.08},
}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """What was scored, each answered with `RESULT`."""
    commands: list[argparse.Namespace] = []

    def run(options: argparse.Namespace, truth: object) -> dict[str, object]:
        options.truth = truth
        commands.append(options)
        return RESULT

    monkeypatch.setattr(score, "make_truth", lambda _: object())
    monkeypatch.setattr(score, "own_stdout", lambda: sys.stdout)
    monkeypatch.setattr(score, "run", run)
    return commands


def _main(monkeypatch: pytest.MonkeyPatch, folder: Path, *more: str) -> None:
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "weights").write_text("1")
    arguments = [
        "--model",
        str(folder / "model"),
        "--out",
        str(folder / "out"),
        "--chunks",
        "5",
        *more,
    ]
    monkeypatch.setattr(sys, "argv", ["quality", *arguments])
    quality.main()


def test_a_page_is_written_of_all_variants(
    runs: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run a variant, a row each, and a plot that is well-formed and has two lines a variant."""
    _main(monkeypatch, tmp_path, "--page", str(tmp_path / "quality.md"))
    assert len(runs) == len(quality.VARIANTS)
    assert len({id(run.truth) for run in runs}) == 1, "what walks should look like is rendered once"
    text = (tmp_path / "quality.md").read_text()
    line = "20.0 / 1.00 | 15.0 / 0.61 | 1.010 (2) | 0.980 | 100%, 75% | 25.0 | 0.08 |"
    assert text.count(line) == len(quality.VARIANTS)
    plot = ElementTree.parse(tmp_path / "quality.svg").getroot()
    lines = [
        path for path in plot.iter("{http://www.w3.org/2000/svg}path") if "L" in path.get("d", "")
    ]
    assert len(lines) == 2 * len(quality.VARIANTS)
    assert len({path.get("stroke") for path in lines}) == len(quality.VARIANTS)


def test_what_was_run_is_not_run_again(
    runs: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the arguments or the weights are others; on how many engines does not matter."""
    _main(monkeypatch, tmp_path, "--only", "as shipped")
    _main(monkeypatch, tmp_path, "--only", "as shipped", "1 step", "--engines", "4")
    assert len(runs) == 2
    _main(monkeypatch, tmp_path, "--only", "as shipped", "--walks", "6")
    assert len(runs) == 3
    monkeypatch.setattr(quality, "digest_of", lambda _: "other")
    _main(monkeypatch, tmp_path, "--only", "as shipped", "--walks", "6")
    assert len(runs) == 4


def test_a_row_from_another_device_says_so(
    runs: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _main(monkeypatch, tmp_path)
    path = tmp_path / "out" / "1_step.json"
    saved = json.loads(path.read_text())
    saved["result"]["device"] = "other"
    path.write_text(json.dumps(saved))
    _main(monkeypatch, tmp_path, "--page", str(tmp_path / "quality.md"))
    text = (tmp_path / "quality.md").read_text()
    assert "| 1 step (on other) |" in text
    assert text.count("(on ") == 1


def test_what_is_worse_is_named_with_both_values() -> None:
    """In its own direction: a turn that is too small or too large, a level that is larger, a
    PSNR that is smaller.
    """
    worse = RESULT | {
        "psnr": [18.5, 19.0, 17.0, 16.0, 14.5],
        "turn": {"ratio": 0.85, "wrong_sign": 0},
        "switch": {"share": [0.5, 0.5]},
        "level": {"largest": 0.2},
    }
    assert quality.losses(worse, RESULT) == [
        "PSNR at chunk 1 18.50 for 20.00",
        "turn 0.85 for 1.01",
        "style after a switch 0.50 for 0.75",
        "level 0.20 for 0.08",
    ]
    assert quality.losses(RESULT, worse) == quality.losses(RESULT, RESULT) == []


def test_the_page_names_what_costs_and_what_does_not(
    runs: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _main(monkeypatch, tmp_path)
    path = tmp_path / "out" / "window_9.json"
    saved = json.loads(path.read_text())
    saved["result"]["loop"] = {"psnr": 20.0}
    path.write_text(json.dumps(saved))
    _main(monkeypatch, tmp_path, "--page", str(tmp_path / "quality.md"))
    text = (tmp_path / "quality.md").read_text()
    assert "\n- window 9: return 20.00 for 25.00\n" in text
    assert "No worse in any column: exact decoder, 2 steps, 1 step, window 12, no sink," in text


def test_the_digest_is_of_the_weights(tmp_path: Path) -> None:
    """Whatever is said of them in the files beside."""
    weights = tmp_path / "a.safetensors"
    weights.write_text("1")
    before = quality.digest_of(tmp_path)
    (tmp_path / "world.json").write_text("{}")
    assert quality.digest_of(tmp_path) == before
    weights.write_text("2")
    assert quality.digest_of(tmp_path) != before


def test_half_a_comparison_is_not_published(
    runs: list[argparse.Namespace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="no result yet of: exact decoder"):
        _main(monkeypatch, tmp_path, "--only", "as shipped", "--page", str(tmp_path / "quality.md"))
    assert not (tmp_path / "quality.md").exists()


@pytest.mark.parametrize("name", quality.VARIANTS)
def test_the_scorer_takes_every_variants_arguments(name: str) -> None:
    arguments = argparse.Namespace(
        model=Path("model"), seed=1, walks=2, chunks=3, engines=1, gpu_memory_utilization=0.6
    )
    args = score.make_parser().parse_args(quality.command(arguments, name))
    assert (args.walks, args.chunks, args.json) == (2, 3, True)
