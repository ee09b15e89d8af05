# SPDX-License-Identifier: Apache-2.0
"""Tensor names and shapes of Lance checkpoints, and strict loading.

`model.safetensors` contains the decoder and the latent projections (1021 tensors in the released
model). In the video checkpoint, this file also contains the vision tower (390 more tensors,
`vit_model.*`). `checkpoint.py` locates the files.
"""

import logging
from collections.abc import Mapping
from functools import cache

import torch

from vllm_omni.model_executor.checkpoint.loading import load_strict, shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import Shape, TensorSource
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.lance.config import (
    LATENT_CHANNELS,
    TIMESTEP_FREQUENCIES,
    LanceConfig,
    VisionConfig,
)
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork, LinearWeight
from vllm_omni.model_executor.models.lance.network.vae import LanceWanVAE
from vllm_omni.model_executor.models.lance.network.vision import VisionTower
from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.component_names import VAE_RULES

logger = logging.getLogger("vllm." + __name__)

BUNDLED_VISION = "vit_model."
POSITIONS = "latent_pos_embed.pos_embed"
_COMPARED_VISION_TENSORS = 4

_EXPERT_TENSORS = {
    "self_attn.q_proj{e}.weight": ("Q", "D"),
    "self_attn.q_proj{e}.bias": ("Q",),
    "self_attn.k_proj{e}.weight": ("KV", "D"),
    "self_attn.k_proj{e}.bias": ("KV",),
    "self_attn.v_proj{e}.weight": ("KV", "D"),
    "self_attn.v_proj{e}.bias": ("KV",),
    "self_attn.o_proj{e}.weight": ("D", "Q"),
    "self_attn.q_norm{e}.weight": ("H",),
    "self_attn.k_norm{e}.weight": ("H",),
    "mlp{e}.gate_proj.weight": ("F", "D"),
    "mlp{e}.up_proj.weight": ("F", "D"),
    "mlp{e}.down_proj.weight": ("D", "F"),
    "input_layernorm{e}.weight": ("D",),
    "post_attention_layernorm{e}.weight": ("D",),
}
"""A layer's tensors. Each exists once per expert.

The letters are D width, Q query channels, KV key/value channels, H head dim and F feed-forward
width.
"""

_OTHER_TENSORS = {
    "language_model.model.embed_tokens.weight": ("V", "D"),
    "language_model.model.norm.weight": ("D",),
    "language_model.model.norm_moe_gen.weight": ("D",),
    "language_model.lm_head.weight": ("V", "D"),
    "time_embedder.mlp.0.weight": ("D", "T"),
    "time_embedder.mlp.0.bias": ("D",),
    "time_embedder.mlp.2.weight": ("D", "D"),
    "time_embedder.mlp.2.bias": ("D",),
    "vae2llm.weight": ("D", "C"),
    "vae2llm.bias": ("D",),
    "llm2vae.weight": ("C", "D"),
    "llm2vae.bias": ("C",),
    POSITIONS: ("P", "D"),
}
"""Tensors outside the layers. The letters are V vocabulary size, T timestep features, C latent
channels and P positions (frames x size x size).
"""


def network_shapes(config: LanceConfig) -> dict[str, Shape]:
    """Return the shape of every tensor in a `model.safetensors` except the vision tower's tensors,
    keyed by name. The released model has 1021 such tensors.
    """
    sizes = {
        "D": config.hidden_size,
        "Q": config.num_heads * config.head_dim,
        "KV": config.num_kv_heads * config.head_dim,
        "H": config.head_dim,
        "F": config.intermediate_size,
        "V": config.vocab_size,
        "T": TIMESTEP_FREQUENCIES,
        "C": LATENT_CHANNELS,
        "P": config.max_latent_frames * config.max_latent_size**2,
    }
    tensors = dict(_OTHER_TENSORS)
    for layer in range(config.num_layers):
        for expert in ("", "_moe_gen"):
            for name, shape in _EXPERT_TENSORS.items():
                tensors[f"language_model.model.layers.{layer}.{name.format(e=expert)}"] = shape
    return {name: tuple(sizes[size] for size in shape) for name, shape in tensors.items()}


@cache
def vision_shapes(config: VisionConfig) -> Mapping[str, Shape]:
    """Return the shape of every vision tower tensor, keyed by its name without the prefix. The
    released tower has 390 tensors.
    """
    with torch.device("meta"):
        return shapes_of(VisionTower(config).tower)


@cache
def vae_shapes(config: VAEConfig) -> Mapping[str, Shape]:
    """Return the shape of every autoencoder tensor, keyed by its diffusers name. The released
    autoencoder has 196 tensors.
    """
    with torch.device("meta"):
        return shapes_of(LanceWanVAE(config).vae)


def bundles_vision(source: TensorSource) -> bool:
    return any(name.startswith(BUNDLED_VISION) for name in source.shapes)


def load_network(network: LanceNetwork, source: TensorSource, config: LanceConfig) -> None:
    """Load this rank's heads and columns of the decoder. If the file also contains a vision tower,
    this function only validates the names and shapes of the tower's tensors.
    """
    expected = network_shapes(config)
    if bundles_vision(source):
        expected |= {
            f"{BUNDLED_VISION}{name}": shape for name, shape in vision_shapes(config.vision).items()
        }
    load_strict(network, source, expected, what="Lance decoder")


def adapter_target(network: LanceNetwork, config: LanceConfig) -> AdapterTarget:
    """Return the decoder and the latent projections together as one LoRA adapter target."""
    return AdapterTarget(
        network,
        network_shapes(config),
        rules=((r"^(?=model\.layers\.)", "language_model."),),
        fixed=("language_model.lm_head", "language_model.model.embed_tokens", POSITIONS),
        linear_types=(LinearWeight,),
    )


def load_vision(
    vision: VisionTower,
    config: VisionConfig,
    separate: TensorSource | None,
    bundled: TensorSource | None,
) -> None:
    """Load the vision tower from its own file or, if it has none, from the decoder's file.

    If both files contain the tower, this function compares a few tensors. It logs a warning if they
    differ: the tower was frozen during training, so both copies should be equal.

    Raises:
        ValueError: Neither file contains the tower.
    """
    if bundled is not None and not bundles_vision(bundled):
        bundled = None
    if bundled is not None and separate is None:
        others = [name for name in bundled.shapes if not name.startswith(BUNDLED_VISION)]
        rules = ((rf"^{BUNDLED_VISION.replace('.', '[.]')}", ""),)
        load_strict(
            vision.tower, bundled, vision_shapes(config), rules, what="vision tower", ignored=others
        )
        return
    if separate is None:
        raise ValueError(
            "the checkpoint has no vision tower: neither Qwen2.5-VL-ViT/ nor vit_model.* tensors"
        )
    load_strict(vision.tower, separate, vision_shapes(config), what="vision tower")
    if bundled is not None:
        _warn_if_different(vision, bundled)


def _warn_if_different(vision: VisionTower, bundled: TensorSource) -> None:
    slots = checkpoint_slots(vision.tower)
    names = sorted(slots)[:: max(1, len(slots) // _COMPARED_VISION_TENSORS)]
    for stored, tensor in bundled.read_tensors([f"{BUNDLED_VISION}{name}" for name in names]):
        ours = slots[stored.removeprefix(BUNDLED_VISION)].target
        if not torch.allclose(ours.float().cpu(), tensor.to(ours.dtype).float(), atol=1e-6):
            logger.warning(
                "%s: %s differs from the separate vision tower, which is used",
                bundled.where,
                stored,
            )
            return


def load_vae(vae: LanceWanVAE, source: TensorSource) -> None:
    """Load the autoencoder from Wan 2.2's `.pth` file."""
    load_strict(vae.vae, source, vae_shapes(vae.config), VAE_RULES, what="VAE")
    vae.vae.clear_derived()
