# SPDX-License-Identifier: Apache-2.0
"""The GPU table in docs/reference/choosing.md equals the output of `vllm-omni plan all`."""

import re
from pathlib import Path

from vllm_omni.planning.models import model_of, size_names
from vllm_omni.planning.report import fits_text

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "choosing.md"
COLUMNS = (
    ", bf16, text encoder on the GPU",
    ", bf16, text encoder on the host",
    ", FP8 weights and K/V, text encoder on the host",
)


def smallest_cards(names: list[str]) -> dict[str, list[str]]:
    """Return the smallest GPU memory size that one session fits in, for each model and column."""
    head, *lines = fits_text([model_of(name) for name in names]).splitlines()
    sizes = re.findall(r"\d+ GB", head)
    counts = {line[:70].strip(): [int(count) for count in line[70:].split()] for line in lines}
    return {
        name: [
            next(size for size, count in zip(sizes, counts[name + column], strict=True) if count)
            for column in COLUMNS
        ]
        for name in names
    }


def test_the_table_of_cards_is_computed() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", PAGE.read_text(), re.M)
    shown = {name: cells.split(" | ") for name, cells in rows}
    assert shown == smallest_cards(list(size_names()))
