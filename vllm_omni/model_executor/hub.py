# SPDX-License-Identifier: Apache-2.0
"""Where a family's released weights are on the Hugging Face hub; used by `vllm-omni download`.

A family that has released weights defines, in `models/<name>/hub.py`, `PIECES` (what to fetch, and where it goes in the
checkpoint directory) and `complete(out)` (writes what the repositories leave out). This file names no model.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_MODELS = "vllm_omni.model_executor.models"


@dataclass(frozen=True)
class HubPiece:
    """One repository's share of a checkpoint.

    patterns: file names to take, as globs from the repository's root. folder: where they go below the
    checkpoint directory ("" = the directory itself). gigabytes: their size, for the plan and the disk check.
    """

    repo: str
    patterns: tuple[str, ...]
    folder: str
    gigabytes: float


@dataclass(frozen=True)
class HubSource:
    """All pieces of one checkpoint, and what finishes it; `complete` returns the names of the files it wrote."""

    pieces: tuple[HubPiece, ...]
    complete: Callable[[Path], list[str]]

    @property
    def gigabytes(self) -> float:
        return sum(piece.gigabytes for piece in self.pieces)


def hub_source(family_name: str) -> HubSource:
    """Return the source of a family's weights. Raises ValueError when there are none to fetch."""
    name = f"{_MODELS}.{family_name}.hub"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ValueError(
            f"{family_name} has no released weights; `vllm-omni make-tiny {family_name} DIR` writes small random ones"
        ) from error
    return HubSource(module.PIECES, module.complete)
