# SPDX-License-Identifier: Apache-2.0
"""Modify golden recordings, for tests which check that `vllm-omni verify` detects the
modifications.
"""

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
    """Replace the tensors and the metadata of a file with the results of the two functions."""
    with safe_open(path, "pt") as file:
        values = dict(file.metadata() or {})
    save_file(tensors(load_file(path)), path, metadata(values) or None)


def change_tensor(path: Path, name: str, amount: float) -> None:
    """Add `amount` to the first value of a tensor."""

    def changed(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[0] += amount
        return tensors

    rewrite(path, changed)


def change_settings(path: Path, key: str, **settings: Any) -> None:
    """Update the JSON object `key` of the metadata."""
    rewrite(
        path,
        metadata=lambda values: values | {key: json.dumps(json.loads(values[key]) | settings)},
    )
