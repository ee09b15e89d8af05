# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face repositories of Lance, and a check that a downloaded checkpoint is complete."""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent

_REPO = "bytedance-research/Lance"

PIECES = (
    HubComponent(_REPO, ("Lance_3B/*",), "", 12.4),
    HubComponent(_REPO, ("Lance_3B_Video/*",), "", 14.2),
    HubComponent(_REPO, ("Qwen2.5-VL-ViT/*", "Wan2.2_VAE.pth", "config.json"), "", 4.2),
)


def check_complete(path: Path) -> None:
    """Raise ValueError if a component is missing or if the decoder's tensors have wrong names or
    shapes.
    """
    from vllm_omni.model_executor.checkpoint.loading import check_shapes
    from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
    from vllm_omni.model_executor.models.lance.checkpoint import (
        find_layout,
        hf_config,
        lance_config,
    )
    from vllm_omni.model_executor.models.lance.weights import (
        BUNDLED_VISION,
        bundles_vision,
        network_shapes,
    )

    layout = find_layout(path)
    layout.require()
    assert layout.weights is not None
    source = open_tensors(layout.weights)
    if layout.vision_weights is None and not bundles_vision(source):
        raise ValueError(
            f"{layout.root} lacks Qwen2.5-VL-ViT/vit.safetensors; run `vllm-omni download "
            "lance` again"
        )
    found = {
        name: shape for name, shape in source.shapes.items() if not name.startswith(BUNDLED_VISION)
    }
    check_shapes(found, network_shapes(lance_config(hf_config(path)["lance"])), str(layout.weights))
