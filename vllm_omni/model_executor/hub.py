# SPDX-License-Identifier: Apache-2.0
"""The pieces of a family's checkpoint, and the places of its released weights on the Hugging Face hub.

A family that has released weights defines, in `models/<name>/hub.py`, `PIECES` (files to fetch, and their place in the
checkpoint directory), `check_complete(path)` (names, within a second, the files that a directory lacks) and, where
repositories leave files out, `complete(out)`, which writes them. With several releases, `RELEASES` names the others;
their names are the family's aliases in `models/registry.py`. `vllm-omni download` and `vllm serve --omni` use them;
this file names no model.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def _complete_as_fetched(out: Path) -> list[str]:
    return []


@dataclass(frozen=True)
class HubSource:
    """All pieces of one checkpoint, and its last step; `complete` returns the names of the files it wrote.

    licence: of the weights, in one line, if it must be accepted before anything is fetched; None = its card tells.
    """

    pieces: tuple[HubPiece, ...]
    complete: Callable[[Path], list[str]] = _complete_as_fetched
    licence: str | None = None

    @property
    def gigabytes(self) -> float:
        return sum(piece.gigabytes for piece in self.pieces)


def hub_source(family_name: str, release: str | None = None) -> HubSource:
    """Return the source of a family's weights, by the name of one of its releases if it has several.

    Raises ValueError when there are none to fetch.
    """
    module = _hub_module(family_name)
    releases: dict[str, HubSource] = {} if module is None else vars(module).get("RELEASES", {})
    if release in releases:
        return releases[release]
    if module is None or not module.PIECES:
        raise ValueError(
            f"{family_name} has no released weights; `vllm-omni make-tiny {family_name} DIR` writes small random ones"
        )
    return HubSource(module.PIECES, vars(module).get("complete", _complete_as_fetched))


def check_complete(family_name: str, path: Path) -> None:
    """Raise ValueError of one line if a checkpoint directory lacks a piece; cheap, reads no weights."""
    module = _hub_module(family_name)
    if module is not None:
        module.check_complete(path)


def _hub_module(family_name: str) -> Any:
    """The family's `hub` module, or None if it has none."""
    package = f"{_MODELS}.{family_name}"
    try:
        return importlib.import_module(f"{package}.hub")
    except ModuleNotFoundError as error:
        if error.name not in (package, f"{package}.hub"):
            raise
        return None
