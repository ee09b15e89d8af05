# SPDX-License-Identifier: Apache-2.0
"""Checkpoints around the quantized transformers of tests/golden/quantized."""

import shutil
from pathlib import Path

QUANTIZED = Path(__file__).parents[1] / "golden" / "quantized"


def with_transformer(pipeline: Path, transformer: Path, out: Path) -> Path:
    """Copy a Wan 2.2 directory with both experts replaced by one folder."""
    copy = out / "checkpoint"
    shutil.copytree(pipeline, copy)
    for name in ("transformer", "transformer_2"):
        if (copy / name).is_dir():
            shutil.rmtree(copy / name)
            shutil.copytree(transformer, copy / name)
    return copy
