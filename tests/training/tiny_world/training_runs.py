# SPDX-License-Identifier: Apache-2.0
"""Runs of the tiny world's trainings on synthetic clips, with a network of two layers."""

import json
from pathlib import Path

from training.tiny_world import train_world
from training.tiny_world.transformer import Sizes
from training.tiny_world.world_data import write_synthetic_data

SIZES = Sizes(dim=48, layers=2, heads=2, ffn=64, grid=(4, 6), window=9)


def arguments(data: Path) -> list[str]:
    """Arguments that all phases share, for clips in `data`."""
    sizes = "--dim 48 --layers 2 --heads 2 --ffn 64 --grid 4 6 --window 9"
    files = ["--data", str(data), "--prompts", str(data / "prompts.pt")]
    return [*files, *f"{sizes} --batch 4 --log-steps 1 --seed 3".split()]


def taught(folder: Path) -> list[str]:
    """Train one step of the first phase. Return the arguments of a phase that resumes from it."""
    write_synthetic_data(folder / "data", SIZES, ranks=1, clips=6, frames=12)
    (folder / "data" / "clips-held.pt").unlink()
    given = arguments(folder / "data")
    train_world.main([*given, "--max-steps", "1", "--out", str(folder / "teacher")])
    return [*given, "--resume", str(folder / "teacher")]


def curve(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]
