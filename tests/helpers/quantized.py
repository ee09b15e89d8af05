# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that contain the quantized transformers from tests/golden/quantized."""

import shutil
from pathlib import Path

from diffusers import WanTransformer3DModel

from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.testing.tiny.quantized import SIZES, draw

QUANTIZED = Path(__file__).parents[1] / "golden" / "quantized"


def write_pipeline(out: Path) -> Path:
    """Write a Wan 2.2 T2V directory in which both experts are the unquantized transformer."""
    get_family("wan2_2").make_tiny(out, 0, "t2v")
    for name in ("transformer", "transformer_2"):
        shutil.rmtree(out / name)
        model = WanTransformer3DModel(**SIZES)
        draw(model)
        model.save_pretrained(out / name)
    return out


def with_transformer(pipeline: Path, transformer: Path, out: Path) -> Path:
    """Copy a Wan 2.2 directory and replace both experts with the `transformer` folder."""
    copy = out / "checkpoint"
    shutil.copytree(pipeline, copy)
    for name in ("transformer", "transformer_2"):
        if (copy / name).is_dir():
            shutil.rmtree(copy / name)
            shutil.copytree(transformer, copy / name)
    return copy
