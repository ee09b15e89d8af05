# SPDX-License-Identifier: Apache-2.0
"""Results computed by diffusers itself, and definitions that the executor tests share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_omni.executor.pipeline_host import PipelineHost

CPU = torch.device("cpu")
MakeHost = Callable[..., PipelineHost]
"""Type of the `make_host` fixture in conftest.py. Tests call it as `make_host(layout, **options)`.
"""


def direct(
    path: Path, seed: int, prompt: str | None = "a red fox", **arguments: Any
) -> torch.Tensor:
    """Return the images or video frames that diffusers itself generates. Shape: [N, H, W, 3],
    uint8.
    """
    import diffusers

    pipeline = diffusers.DiffusionPipeline.from_pretrained(path)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(seed)
    output = pipeline(prompt=prompt, generator=generator, output_type="pil", **arguments)
    images = output.frames[0] if "frames" in output else output.images
    return torch.from_numpy(np.stack([np.array(image) for image in images]))
