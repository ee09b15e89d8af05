# SPDX-License-Identifier: Apache-2.0
"""Modifies golden recordings. Tests check that `vllm-omni verify` detects the modifications."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def rewrite(
    path: Path,
    tensors: Callable[[Tensors], Tensors] = dict,
    metadata: Callable[[dict[str, str]], dict[str, str]] = dict,
) -> None:
    """Replace a file's tensors and metadata with the results of the two functions."""
    with safe_open(path, "pt") as file:
        values = dict(file.metadata() or {})
    save_file(tensors(load_file(path)), path, metadata(values) or None)


def change_tensor(path: Path, name: str, amount: float) -> None:
    """Add `amount` to a tensor's first value."""

    def changed(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[0] += amount
        return tensors

    rewrite(path, changed)


def change_settings(path: Path, key: str, **settings: Any) -> None:
    """Update the JSON object stored under `key` in the metadata."""
    rewrite(
        path,
        metadata=lambda values: values | {key: json.dumps(json.loads(values[key]) | settings)},
    )
