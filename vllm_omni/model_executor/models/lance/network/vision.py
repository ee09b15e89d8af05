# SPDX-License-Identifier: Apache-2.0
"""The Qwen2.5-VL vision tower. `to_patches` converts pixels to patches, and the tower converts
patches to embeddings of the decoder's width. The network comes from Hugging Face Transformers.
"""

from typing import Any

import torch
from torch import nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from vllm_omni.model_executor.models.lance.config import VisionConfig
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import Grid

_PATCH, _MERGE, _FRAMES = 14, 2, 2


class VisionTower(nn.Module):
    """The vision tower. The parameter names match the checkpoint (`patch_embed.*`, `blocks.*`,
    `merger.*`).
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        # The released config selects flash_attention_2, which is a separate package. PyTorch's
        # scaled-dot-product attention is used instead, because it needs no additional package.
        values: dict[str, Any] = {**config.to_dict(), "attn_implementation": "sdpa"}
        self.tower = Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**values))
        self.requires_grad_(False)
        self.eval()

    @torch.no_grad()
    def forward(self, patches: torch.Tensor, grid_thw: Grid) -> torch.Tensor:
        """Encode the patches [T * h * w, 1176] of one image or clip to embeddings [T * h * w / 4,
        D].
        """
        weight = self.tower.patch_embed.proj.weight
        grid = torch.tensor([grid_thw], device=weight.device)
        rows: torch.Tensor = self.tower(patches.to(weight.device, weight.dtype), grid).pooler_output
        return rows


def to_patches(video_CTHW: torch.Tensor) -> tuple[torch.Tensor, Grid]:
    """Convert normalised pixels [3, T, H, W] to patches [N, 1176] and their grid (T/2, H/14, W/14).

    H and W must be multiples of 28. If the number of frames is odd, the last frame is repeated, so
    an image becomes two frames. The patches are ordered in groups of 2x2, because the tower merges
    each group into one token. A patch's features are ordered (channel, frame, row, column).
    """
    if video_CTHW.shape[1] % _FRAMES:
        video_CTHW = torch.cat((video_CTHW, video_CTHW[:, -1:]), dim=1)
    channels, frames, height, width = video_CTHW.shape
    grid = (frames // _FRAMES, height // _PATCH, width // _PATCH)
    side = _PATCH * _MERGE
    patches = video_CTHW.view(
        channels, grid[0], _FRAMES, height // side, _MERGE, _PATCH, width // side, _MERGE, _PATCH
    ).permute(1, 3, 6, 4, 7, 0, 2, 5, 8)
    return patches.reshape(grid[0] * grid[1] * grid[2], channels * _FRAMES * _PATCH * _PATCH), grid


def decoder_grid(grid_thw: Grid) -> Grid:
    """Convert a patch grid to the grid of embeddings after the 2x2 merge."""
    return grid_thw[0], grid_thw[1] // _MERGE, grid_thw[2] // _MERGE
