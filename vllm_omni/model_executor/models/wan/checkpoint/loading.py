# SPDX-License-Identifier: Apache-2.0
"""Load Wan's frozen components strictly, using the rename tables in `component_names.py`."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_omni.model_executor.checkpoint.loading import load_strict, shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import (
    AdaptedSource,
    Shape,
    open_tensors,
    unchanged,
)
from vllm_omni.model_executor.models.wan.checkpoint.component_names import CLIP_RULES, VAE_RULES

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.wan.architecture import VAEConfig
    from vllm_omni.model_executor.models.wan.checkpoint.layout import WanComponents
    from vllm_omni.model_executor.models.wan.images.image_encoder import ImageEncoder
    from vllm_omni.model_executor.models.wan.text_encoder.encoder import AwaitedText, TextEncoder
    from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE

_CLIP_UNUSED = (
    "textual.",
    "visual.head",
    "log_scale",
    "visual_projection.",
    "embeddings.position_ids",
)
"""Name prefixes of tensors that are ignored, because the vision tower does not use them."""


def load_component_weights(
    layout: "WanComponents",
    load_transformer: Callable[[], None],
    vae: "StreamingWanVAE | None" = None,
    text_encoder: "TextEncoder | AwaitedText | None" = None,
    image_encoder: "ImageEncoder | None" = None,
) -> None:
    """Check that all components that this rank needs exist, and load them. Arguments for components
    that this rank does not need are None.
    """
    if image_encoder is not None:
        layout.require("image_encoder")
    if text_encoder is not None:
        layout.require("text_encoder", "tokenizer")
    if vae is not None:
        layout.require("vae")
    layout.require("transformer")
    load_transformer()
    load_components(layout, vae, text_encoder)
    if image_encoder is not None and layout.image_encoder is not None:
        load_image_encoder(image_encoder, layout.image_encoder)


def load_components(
    layout: "WanComponents",
    vae: "StreamingWanVAE | None" = None,
    text_encoder: "TextEncoder | AwaitedText | None" = None,
) -> None:
    """Load this rank's components. Arguments for components that this rank does not need are None.
    For the others, the caller must already have called `layout.require`.
    """
    if vae is not None and layout.vae is not None:
        load_vae(vae, layout.vae)
    if text_encoder is not None and layout.text_encoder is not None:
        text_encoder.load(layout.text_encoder)


def load_vae(vae: "StreamingWanVAE", path: Path) -> None:
    """Load a VAE from Wan's `.pth` file or from a diffusers folder. If `vae` has only an encoder or
    only a decoder, only that half is loaded.
    """
    load_strict(vae, open_tensors(path), _vae_shapes(vae.config), VAE_RULES, what="VAE")
    vae.clear_derived()


@cache
def _vae_shapes(config: "VAEConfig") -> Mapping[str, Shape]:
    """Return the shapes of all encoder and decoder tensors, keyed by name."""
    from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE

    with torch.device("meta"):
        return shapes_of(StreamingWanVAE(config))


def load_image_encoder(encoder: "ImageEncoder", path: Path) -> None:
    """Load the vision tower from Wan's `.pth` file, which contains the whole CLIP model, or from a
    transformers folder.

    Raises:
        ValueError: Tensors are missing, unexpected or misshapen.
    """
    source = open_tensors(path)
    ignored = [
        name
        for name in source.shapes
        if name.startswith(_CLIP_UNUSED) or name.endswith("position_ids")
    ]
    adapted = AdaptedSource(source, _clip_forms)
    load_strict(
        encoder.model, adapted, encoder.shapes(), CLIP_RULES, what="image encoder", ignored=ignored
    )


def _clip_forms(name: str) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the conversions of a stored tensor, keyed by the resulting tensors' names.

    In Wan's file, Q, K and V are stacked in one tensor, and embeddings have leading dimensions of
    size one.
    """
    if name.startswith("visual.") and ".to_qkv." in name:
        parts = enumerate("qkv")
        return {
            name.replace(".to_qkv.", f".to_{kind}."): partial(_third, index=index)
            for index, kind in parts
        }
    if name in ("visual.cls_embedding", "visual.pos_embedding"):
        return {name: lambda x: x.reshape(-1, x.shape[-1]).squeeze(0)}
    return {name: unchanged}


def _third(x: torch.Tensor, index: int) -> torch.Tensor:
    return x.tensor_split(3)[index]
