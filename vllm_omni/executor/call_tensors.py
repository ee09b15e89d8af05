# SPDX-License-Identifier: Apache-2.0
"""Converts a request's tensors to pipeline arguments.

Images become PIL images; embeddings are moved to the pipeline's device. A tensor has the same name
as the pipeline argument that it becomes, with two exceptions for tensors that endpoints send:
`mask` becomes the `mask_image` argument, and `image_1`, `image_2`, and so on are additional images
for the `image` argument. If a tensor has the wrong dtype or shape or an invalid value, the request
fails with an error that names the tensor. This module contains no model-specific code.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image

from vllm_omni.model_executor.models.diffusers_pipeline.tasks import Parameters
from vllm_omni.outputs import RequestFailed

# N images, T frames, H height, W width, L tokens, D width of an embedding

_MAX_SIDE = 8192
_MAX_TOKENS = 8192
_FURTHER_IMAGE = re.compile(r"image_([1-9]\d?)")
_RENAMED = {"mask": "mask_image"}


def tensor_arguments(
    tensors: Mapping[str, torch.Tensor],
    parameters: Parameters,
    text_widths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Convert a request's tensors.

    Args:
        tensors: Tensors by name.
        parameters: Parameters of the pipeline's `__call__`.
        text_widths: Possible widths of text embeddings. Empty: any width is accepted.
        device: The pipeline's device.
        dtype: Dtype of floating-point arguments.

    Raises:
        RequestFailed: A tensor is invalid. The code is `invalid_request` or `invalid_image`.
    """
    arguments: dict[str, Any] = {}
    imgs: dict[int, Image.Image] = {}
    for name, tensor in tensors.items():
        further = _FURTHER_IMAGE.fullmatch(name)
        argument = "image" if further else _RENAMED.get(name, name)
        if argument not in parameters or not (_is_image(argument) or _is_numeric(argument)):
            raise RequestFailed(
                "invalid_request", f"this pipeline takes no tensor {name!r}; {_known(parameters)}"
            )
        if further:
            imgs[int(further[1])] = _images(name, tensor)[0]
        elif _is_image(argument):
            images = _images(name, tensor)
            arguments[argument] = images if tensor.dim() == 4 else images[0]
        else:
            arguments[argument] = _numbers(argument, tensor, text_widths, device, dtype)
    if imgs:
        if not isinstance(arguments.get("image"), Image.Image):
            raise RequestFailed(
                "invalid_request",
                "image_1 is a further image: send the first one as image [H, W, 3]",
            )
        arguments["image"] = [arguments["image"], *(imgs[number] for number in sorted(imgs))]
    for name in ("prompt_embeds", "negative_prompt_embeds"):
        mask = arguments.get(f"{name}_mask")
        if mask is not None and (name not in arguments or mask.shape != arguments[name].shape[:2]):
            raise RequestFailed(
                "invalid_request", f"{name}_mask must have one entry for each token of {name}"
            )
    return arguments


def _known(parameters: Parameters) -> str:
    names = [name for name in parameters if _is_image(name) or _is_numeric(name)]
    return f"it takes {', '.join(names)}" if names else "it takes no tensors"


def _is_image(argument: str) -> bool:
    return argument in ("image", "video") or (
        argument.endswith("_image") and "ip_adapter" not in argument
    )


def _is_numeric(argument: str) -> bool:
    return argument.endswith(("_embeds", "_mask", "latents")) and "ip_adapter" not in argument


def _images(name: str, tensor: torch.Tensor) -> list[Image.Image]:
    """Convert uint8 [H, W], [H, W, 3] or [N, H, W, 3] to PIL images."""
    shape = tuple(tensor.shape)
    if tensor.dtype != torch.uint8:
        raise RequestFailed(
            "invalid_image", f"{name} must be uint8, got {str(tensor.dtype).removeprefix('torch.')}"
        )
    gray = tensor.dim() == 2
    if not gray and (tensor.dim() not in (3, 4) or shape[-1] != 3):
        raise RequestFailed(
            "invalid_image",
            f"{name} must be [H, W, 3], [N, H, W, 3] or, a mask, [H, W]; got {shape}",
        )
    height, width = shape[:2] if tensor.dim() < 4 else shape[1:3]
    if not (1 <= height <= _MAX_SIDE and 1 <= width <= _MAX_SIDE) or tensor.numel() == 0:
        raise RequestFailed(
            "invalid_image", f"{name} must have 1 to {_MAX_SIDE} pixels a side, got {shape}"
        )
    items = tensor.unsqueeze(0) if tensor.dim() < 4 else tensor
    return [Image.fromarray(item.contiguous().numpy()) for item in items]


def _numbers(
    name: str,
    tensor: torch.Tensor,
    text_widths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Validate embeddings [L, D] or [D], masks [L], or latents, and move them to the device.

    A batch dimension of size 1 is added to embeddings and masks.
    """
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        raise RequestFailed("invalid_request", f"{name} is empty, shape {shape}")
    if name.endswith("_mask"):
        if (
            tensor.dim() != 1
            or tensor.is_floating_point()
            or bool(((tensor != 0) & (tensor != 1)).any())
        ):
            raise RequestFailed(
                "invalid_request", f"{name} must be integers 0 and 1 of shape [tokens], got {shape}"
            )
        return tensor.to(device=device, dtype=torch.int64).unsqueeze(0)
    if not tensor.is_floating_point():
        raise RequestFailed("invalid_request", f"{name} must be floating point, got {tensor.dtype}")
    if not bool(torch.isfinite(tensor).all()):
        raise RequestFailed("invalid_request", f"{name} contains NaN or infinity")
    if name.endswith("latents"):
        return tensor.to(device=device, dtype=dtype)
    pooled = "pooled" in name
    if tensor.dim() != (1 if pooled else 2):
        raise RequestFailed(
            "invalid_request",
            f"{name} must be {'[width]' if pooled else '[tokens, width]'}, got {shape}",
        )
    if not pooled and shape[0] > _MAX_TOKENS:
        raise RequestFailed(
            "invalid_request", f"{name} has {shape[0]} tokens, more than {_MAX_TOKENS}"
        )
    if (
        name in ("prompt_embeds", "negative_prompt_embeds")
        and text_widths
        and shape[-1] not in text_widths
    ):
        raise RequestFailed(
            "invalid_request",
            f"{name} must be {text_widths[0]} wide for this model, got {shape[-1]}",
        )
    return tensor.to(device=device, dtype=dtype).unsqueeze(0)
