# SPDX-License-Identifier: Apache-2.0
"""Locate the components of a Matrix-Game 2.0 checkpoint, and load its transformer strictly, using a
table of tensor names.

The original repository contains three transformers, each in its own folder, next to one VAE and one
CLIP. A served directory contains one transformer: it is the repository with only one of its
transformer folders, or a transformer folder with the other components inside or next to it.
Converted checkpoints use the diffusers folders. Tensor names can have a `model.` prefix. If there
are weight files, the variant and the network's dimensions are derived from the tensors, because the
released configs are outdated.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from vllm_omni.model_executor.checkpoint.loading import Rules, load_strict, rename
from vllm_omni.model_executor.checkpoint.tensor_files import (
    Shape,
    TensorSource,
    open_tensors,
    read_json,
)
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig
from vllm_omni.model_executor.models.wan.architecture import clip_tokens
from vllm_omni.model_executor.models.wan.checkpoint.layout import (
    WanComponents,
    chunk_hf_config,
    find_transformer,
)
from vllm_omni.model_executor.models.wan.transformer import weights as wan
from vllm_omni.model_executor.models.wan.transformer.weights import TRANSFORMER_RULES, Sizes
from vllm_omni.model_executor.models.wan.vae.latents import VAE_TEMPORAL

logger = logging.getLogger("vllm." + __name__)

FOLDERS = {
    "base_distilled_model": "universal",
    "gta_distilled_model": "gta_drive",
    "templerun_distilled_model": "templerun",
}
"""Variants of the streaming models, keyed by folder in the original repository."""
_PLACES = (*FOLDERS, "transformer")
LAYOUTS = (
    "original",
    "original_gta",
    "original_templerun",
    "diffusers",
    "diffusers_gta",
    "diffusers_templerun",
)
"""Names of the layouts that `make-tiny` can write."""

_CLASSES = ("MatrixGameWanModel", "CausalMatrixGameWanModel")
_MARK = re.compile(r"^(model\.)?blocks\.\d+\.action_model\.keyboard_embed\.0\.weight\Z")
"""Pattern for the name of a tensor that no other Wan transformer has."""

RULES: Rules = (*TRANSFORMER_RULES, *wan.IMAGE_RULES)
"""Rules that strip prefixes and map diffusers names to the original code's parameter names. Names
that already have this form are left unchanged.
"""

OUTSIDE_TENSORS: dict[str, Sizes] = {
    **{
        name: shape
        for name, shape in wan.TRANSFORMER_TENSORS.items()
        if not name.startswith("text_embedding.")
    },
    **wan.IMAGE_TENSORS,
}
_UNUSED = (
    "key_attn_q_norm.weight",
    "key_attn_k_norm.weight",
    "img_attn_q_norm.weight",
    "img_attn_k_norm.weight",
)
"""Gains of the action modules' norms. The original code loads these gains but never applies
them."""


@dataclass(frozen=True)
class CheckpointLayout(WanComponents):
    """The components of one checkpoint. `transformer` is a folder of safetensors files."""

    download_name: ClassVar[str] = "matrix_game"

    kind: Literal["original", "diffusers"]
    """Whether the checkpoint uses the original repository's layout or the diffusers layout."""

    def release(self) -> str:
        variant = FOLDERS.get(self.transformer.name, "universal")
        return self.download_name if variant == "universal" else f"{self.download_name}_{variant}"

    def transformer_config(self) -> dict[str, Any]:
        """Return the transformer's `config.json`. If there are weight files, the dimensions derived
        from the stored tensors replace those in the config.
        """
        path = self.transformer / "config.json"
        stated = read_json(path) if path.exists() else {}
        if not any(self.transformer.glob("*.safetensors")):
            return stated
        return overlaid(stated, self.open_transformer().shapes, str(self.transformer))


def find_layout(path: Path) -> CheckpointLayout:
    """Locate the components in `path`, or next to it if `path` is the transformer's folder.

    Raises:
        ValueError: The directory contains no transformer of this model, or several. The message is
            one line.
    """
    found = [name for name in _PLACES if _is_transformer(path / name)]
    if len(found) > 1:
        raise ValueError(
            f"{path} holds several transformers ({', '.join(found)}); pass the folder of the one "
            "to serve"
        )
    folder, root = find_transformer(path, _PLACES, _is_transformer, "Matrix-Game 2.0")
    return CheckpointLayout.of_folder(
        root, folder, kind="diffusers" if folder.name == "transformer" else "original"
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` contains Matrix-Game 2.0 transformers in any layout.

    The check is cheap and never raises.
    """
    try:
        return any(_is_transformer(folder) for folder in (path, *(path / name for name in _PLACES)))
    except (ValueError, OSError):
        # A damaged checkpoint still belongs to this family. `hf_config` reports what is wrong with
        # it.
        return any((path / name).is_dir() for name in FOLDERS)


def hf_config(path: Path) -> dict[str, Any]:
    """Return the result of `chunk_hf_config` for this checkpoint, including its `kind`. No weight
    files are required.

    Raises ValueError if the checkpoint is not usable.
    """
    layout = find_layout(path)
    transformer = layout.transformer_config()
    transformer.setdefault("context_tokens", clip_tokens(layout.clip_config()))
    config = MatrixGameConfig.from_checkpoint(transformer)
    names = "MatrixGamePipeline", "matrix_game"
    return chunk_hf_config(
        *names, layout, transformer, config, RULES, context="clip", kind=layout.kind
    )


def overlaid(stated: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> dict[str, Any]:
    """Return the `stated` config, with its dimensions replaced by those derived from the stored
    tensors.

    The tensor names may follow any layout. Raises ValueError if the tensors belong to another
    network.
    """
    named = {rename(name, RULES): shape for name, shape in shapes.items()}
    num_heads = stated.get("num_heads", stated.get("num_attention_heads"))
    sizes = wan.stored_sizes(named, where, num_heads, context="img_emb.proj.3.weight")
    acting = sorted({int(name.split(".")[1]) for name in named if ".action_model." in name})
    action = dict(stated.get("action_config", {}))
    try:
        module = f"blocks.{acting[0]}.action_model."
        embed, keys = named[f"{module}keyboard_embed.0.weight"]
        keyboard, rows = named[f"{module}keyboard_attn_kv.weight"]
        spans = rows // embed
        action |= {
            "blocks": acting,
            "keyboard_dim_in": keys,
            "hidden_size": embed,
            "keyboard_hidden_dim": keyboard // 2,
            "windows_size": spans // VAE_TEMPORAL,
            "enable_mouse": f"{module}mouse_mlp.0.weight" in named,
        }
        if action["enable_mouse"]:
            mouse, inputs = named[f"{module}mouse_mlp.0.weight"]
            action |= {"mouse_dim_in": (inputs - sizes["dim"]) // spans, "mouse_hidden_dim": mouse}
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(
            f"{where} holds no Matrix-Game 2.0 transformer; download it again"
        ) from error
    return {**stated, **sizes, "action_config": action}


def transformer_shapes(config: MatrixGameConfig) -> dict[str, Shape]:
    """Return the shape of every transformer tensor in a checkpoint, keyed by name. The universal
    model has 1114 tensors and the Temple Run model has 964.
    """
    shapes = wan.network_shapes(config, OUTSIDE_TENSORS, wan.BLOCK_TENSORS)
    for layer in config.action_blocks:
        shapes |= {
            f"blocks.{layer}.action_model.{name}": shape
            for name, shape in _action_shapes(config).items()
        }
    return shapes


def _action_shapes(config: MatrixGameConfig) -> dict[str, Shape]:
    dim, embed, keys, mouse = (
        config.dim,
        config.keyboard_embed,
        config.keyboard_width,
        config.mouse_width,
    )
    shapes: dict[str, Shape] = {
        "keyboard_embed.0.weight": (embed, config.keyboard_dim),
        "keyboard_embed.2.weight": (embed, embed),
        **dict.fromkeys(("keyboard_embed.0.bias", "keyboard_embed.2.bias"), (embed,)),
        "mouse_attn_q.weight": (keys, dim),
        "keyboard_attn_kv.weight": (2 * keys, config.action_frames * embed),
        "proj_keyboard.weight": (dim, keys),
        **dict.fromkeys(_UNUSED[:2], (keys // config.action_heads,)),
    }
    if config.mouse_dim == 0:
        return shapes
    vectors = ("mouse_mlp.0.bias", "mouse_mlp.2.bias", "mouse_mlp.3.weight", "mouse_mlp.3.bias")
    return shapes | {
        "mouse_mlp.0.weight": (mouse, dim + config.action_frames * config.mouse_dim),
        "mouse_mlp.2.weight": (mouse, mouse),
        **dict.fromkeys(vectors, (mouse,)),
        "t_qkv.weight": (3 * mouse, mouse),
        "proj_mouse.weight": (dim, mouse),
        **dict.fromkeys(_UNUSED[2:], (mouse // config.action_heads,)),
    }


def load_transformer(
    transformer: nn.Module, source: TensorSource, config: MatrixGameConfig
) -> None:
    """Load this rank's stage and shard of the transformer. Raises ValueError if tensor names or
    shapes do not match.
    """
    load_strict(transformer, source, transformer_shapes(config), RULES, what="transformer")
    unused = [name for name in source.shapes if name.endswith(_UNUSED)]
    trained = [
        name
        for name, gain in source.read_tensors(unused)
        if not torch.equal(gain, torch.ones_like(gain))
    ]
    if trained:
        logger.warning(
            "%s: %d gains of action attention are not 1 (%s, ...). Neither the original nor this "
            "model applies them; other implementations do and would generate other frames",
            *(source.where, len(trained), trained[0]),
        )


def adapter_target(transformer: nn.Module, config: MatrixGameConfig) -> AdapterTarget:
    """Return the transformer as an `AdapterTarget` for LoRA adapters, without the gains that are
    never applied.
    """
    # Imported here, because code that only describes a checkpoint does not need this class.
    from vllm_omni.model_executor.models.wan.transformer.layers import PatchEmbedding

    unused = tuple(f"*.{name}" for name in _UNUSED)
    return AdapterTarget(
        transformer, transformer_shapes(config), RULES, unused, linear_types=(PatchEmbedding,)
    )


def _is_transformer(folder: Path) -> bool:
    """Return whether a folder contains a streaming Matrix-Game transformer, according to its tensor
    names.

    If there are no weights (`--load-format dummy`), the config and the folder's name decide.
    """
    if not (folder.is_dir() and folder.name != "base_model"):
        return False
    if any(folder.glob("*.safetensors")):
        return any(_MARK.match(name) for name in open_tensors(folder).shapes)
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    return "action_config" in config and (
        folder.name in FOLDERS or config.get("_class_name") in (*_CLASSES, "CausalWanModel")
    )
