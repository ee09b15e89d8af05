# SPDX-License-Identifier: Apache-2.0
"""Encode a start image for cross-attention, using the CLIP vision tower of Wan 2.1's image-to-video
models (ViT-H/14).

The embeddings are the hidden states of all tokens before the tower's last layer, without the final
norm, so the last layer is never built. The weights have either Wan's own names, in a file that also
contains the text tower, or transformers' names.
"""

# S tokens, E width

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional
from transformers import CLIPVisionConfig, CLIPVisionModel

from vllm_omni.model_executor.checkpoint.loading import shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import Shape

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


class ImageEncoder(nn.Module):
    """The vision tower without its last layer. Its parameters are uninitialised until
    `load_image_encoder` loads them.

    Args:
        config: `CLIPVisionConfig` values for the whole tower.
        device: Device of the weights: torch's current default device (`model`), or host memory
            (`cpu`). With `cpu`, results are copied to the caller's device.
        dtype: Dtype of the weights.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        device: Literal["model", "cpu"] = "model",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        target = torch.device("cpu") if device == "cpu" else torch.get_default_device()
        self.whole = dict(config)
        layers = int(config["num_hidden_layers"]) - 1
        with torch.device("meta"):
            model = CLIPVisionModel(CLIPVisionConfig(**{**config, "num_hidden_layers": layers}))
        self.model = model.to(dtype).to_empty(device=target).eval().requires_grad_(False)  # type: ignore[arg-type]
        positions = self.model.embeddings.position_ids
        positions.copy_(torch.arange(positions.shape[1]).unsqueeze(0))

    def shapes(self) -> dict[str, Shape]:
        """Return the shape of every tensor in the whole tower, including the last layer, keyed by
        name.
        """
        with torch.device("meta"):
            return shapes_of(CLIPVisionModel(CLIPVisionConfig(**self.whole)))

    @torch.no_grad()
    def encode(
        self, pixels_1CHW: torch.Tensor, device: torch.device | str | None = None
    ) -> torch.Tensor:
        """Return the hidden states [S, E] of an image [1, 3, H, W] in [-1, 1].

        The hidden states have the tower's dtype and are on `device` (default: the tower's device).
        """
        weight = self.model.embeddings.class_embedding
        pixels = clip_pixels(
            pixels_1CHW.to(weight.device, torch.float32), self.model.config.image_size
        )
        states_1SE = self.model(pixel_values=pixels.to(weight.dtype)).last_hidden_state
        return states_1SE[0].to(weight.device if device is None else device)


def clip_pixels(pixels_1CHW: torch.Tensor, side: int) -> torch.Tensor:
    """Convert pixels in [-1, 1] to the tower's input. The image is stretched to a square by bicubic
    interpolation without antialiasing.
    """
    square = functional.interpolate(
        pixels_1CHW, size=(side, side), mode="bicubic", align_corners=False
    )
    mean, std = (square.new_tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))
    return (square * 0.5 + 0.5 - mean) / std
