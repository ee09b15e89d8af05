# SPDX-License-Identifier: Apache-2.0
"""Download the released streaming models of Matrix-Game 2.0, each with the original repository's
VAE and CLIP.

Download sizes come from public file lists. The model card states the MIT licence. It is not known
whether the base model's licence adds terms, so read both model cards.
"""

from pathlib import Path

from vllm_omni.model_executor.checkpoint.hub import HubComponent, HubSource

_REPO = "Skywork/Matrix-Game-2.0"
_COMPONENTS = HubComponent(
    _REPO, ("Wan2.1_VAE.pth", "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"), "", 5.3
)


def _components(folder: str, gigabytes: float) -> tuple[HubComponent, ...]:
    return (HubComponent(_REPO, (f"{folder}/*",), "", gigabytes), _COMPONENTS)


PIECES = _components("base_distilled_model", 6.5)
"""Files of the universal model."""


RELEASES = {
    "matrix_game_gta_drive": HubSource(_components("gta_distilled_model", 6.5)),
    "matrix_game_templerun": HubSource(_components("templerun_distilled_model", 6.0)),
}


def check_complete(path: Path) -> None:
    """Raise ValueError if a component is missing or if the transformer's tensors have wrong names
    or shapes.

    The check reads only file names and headers. The tensors of the other components are checked
    when they are loaded.
    """
    from vllm_omni.model_executor.models.matrix_game.checkpoint import (
        RULES,
        find_layout,
        transformer_shapes,
    )
    from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig

    layout = find_layout(path)
    layout.require("transformer", "vae", "image_encoder")
    config = MatrixGameConfig.from_checkpoint(layout.transformer_config())
    layout.check_transformer(transformer_shapes(config), RULES)
