# SPDX-License-Identifier: Apache-2.0
"""Writes the checkpoint of `NullWorldPipeline`, which contains four parameters."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def make_tiny(out: Path, seed: int, layout: str) -> None:
    """Write a checkpoint into the empty or new directory `out`. The only supported layout is
    "original".
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps({"model_type": "null_world", "num_layers": 4}))
    gain = 0.5 + torch.rand(4, generator=torch.Generator().manual_seed(seed))
    save_file({"gain": gain}, out / "model.safetensors")
