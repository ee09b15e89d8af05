# SPDX-License-Identifier: Apache-2.0
"""Hugging Face repository that `vllm-omni download wan2_2` downloads: TI2V 5B, which runs on a
single GPU and supports both text-to-video and image-to-video.

The A14B directories have the same layout; download them with `hf download`. The download sizes in
this module are estimated from the tensor shapes. The model cards state the licences of the weights.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent

PIECES = (
    HubComponent(
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        (
            "model_index.json",
            "scheduler/*",
            "tokenizer/*",
            "text_encoder/*",
            "transformer/*",
            "vae/*",
        ),
        "",
        34.0,
    ),
)


def check_complete(path: Path) -> None:
    """Raise ValueError unless all components exist and the transformers' tensors have the right
    names and shapes.

    Only file names and headers are read. The tensors of the other components are checked when these
    components are loaded.
    """
    from vllm_omni.model_executor.checkpoint.loading import check_shapes, rename
    from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
    from vllm_omni.model_executor.models.wan.transformer.weights import (
        TRANSFORMER_RULES,
        transformer_shapes,
    )
    from vllm_omni.model_executor.models.wan2_2.checkpoint import find_layout
    from vllm_omni.model_executor.models.wan2_2.config import Wan22Config

    layout = find_layout(path)
    layout.info()
    layout.require("transformer", "vae", "text_encoder", "tokenizer")
    expected = transformer_shapes(Wan22Config.from_checkpoint(layout.transformer_config()))
    for folder in (layout.transformer, layout.transformer_2):
        if folder is not None:
            found = {
                rename(name, TRANSFORMER_RULES): shape
                for name, shape in open_tensors(folder).shapes.items()
            }
            check_shapes(found, expected, str(folder))
