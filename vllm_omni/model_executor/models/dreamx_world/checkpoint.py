# SPDX-License-Identifier: Apache-2.0
"""Locates the components of a DreamX-World-5B checkpoint, and loads its transformer strictly.

The released transformer is one file, `model.safetensors`; its VAE, text encoder and tokenizer are
those of Wan2.2-TI2V-5B and belong in the same directory or in its `assets/`. Conversions have a
folder `transformer`. Sizes, and which blocks have a camera branch, are read from the tensors,
because the release has no config.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from torch import nn

from vllm_omni.model_executor.checkpoint.loading import load_strict, rename
from vllm_omni.model_executor.checkpoint.tensor_files import (
    Shape,
    TensorSource,
    open_tensors,
)
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.dreamx_world.config import DreamXConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import (
    WanComponents,
    chunk_hf_config,
    own_config,
)
from vllm_omni.model_executor.models.wan.transformer import weights as wan
from vllm_omni.model_executor.models.wan.transformer.weights import TRANSFORMER_RULES, Sizes

LAYOUTS = ("original", "diffusers")
"""The supported layouts, by their names for `make-tiny`."""

RULES = TRANSFORMER_RULES
"""Prefixes and diffusers' names -> the original's. The names of the camera branch are not
changed.
"""

_FOLDER: Final = "transformer"
_FILES: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_CLASS: Final = "DreamXWorldARTransformer3DModel"
_MARK = re.compile(r"(.*\.)?blocks\.\d+\.cam_self_attn\.q_proj\.weight\Z")
"""A tensor that exists in no other Wan transformer."""

CAMERA_TENSORS: dict[str, Sizes] = {
    **{
        f"cam_self_attn.{layer}.{kind}": ("C", "D") if kind == "weight" else ("C",)
        for layer in ("q_proj", "k_proj", "v_proj")
        for kind in ("weight", "bias")
    },
    "cam_self_attn.out_proj.weight": ("D", "C"),
    "cam_self_attn.out_proj.bias": ("D",),
    "cam_self_attn.norm_q.weight": ("C",),
    "cam_self_attn.norm_k.weight": ("C",),
}
"""Tensors of the camera branch of a block, with width C."""


@dataclass(frozen=True)
class CheckpointLayout(WanComponents):
    """Components of one checkpoint. `transformer` is a folder of safetensors files or a single such
    file.
    """

    download_name: ClassVar[str] = "dreamx_world"
    vae_release = "2.2"

    kind: Literal["original", "diffusers"]
    """The library whose layout the checkpoint has."""

    def transformer_config(self) -> dict[str, Any]:
        """Return the transformer's `config.json`, overridden by the sizes of its tensors, if there
        are any."""
        folder = self.transformer if self.transformer.is_dir() else self.transformer.parent
        stated = own_config(folder)
        if self.transformer.is_dir() and not any(folder.glob("*.safetensors")):
            return stated
        return overlaid(stated, self.open_transformer().shapes, str(self.transformer))


def find_layout(path: Path) -> CheckpointLayout:
    """Locate the components in `path`.

    Raises:
        ValueError: There is no transformer. The message is one line.
    """
    if (found := _find_transformer(path / _FOLDER)) is not None:
        return CheckpointLayout.of_folder(path, found, kind="diffusers")
    if (found := _find_transformer(path)) is not None:
        return CheckpointLayout.of_folder(path, found, kind="original")
    raise ValueError(
        f"{path} holds no DreamX-World transformer; expected {' or '.join(_FILES)} with tensors "
        f"named blocks.N.cam_self_attn.*, or the folder {_FOLDER}/ with such files"
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` holds a DreamX-World checkpoint. Cheap; never raises."""
    try:
        find_layout(path)
    except (ValueError, OSError):
        return False
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return `chunk_hf_config` of this checkpoint, with `kind`. Needs no weight files.

    Raises ValueError.
    """
    layout = find_layout(path)
    transformer = layout.transformer_config()
    config = DreamXConfig.from_checkpoint(transformer)
    names = "DreamXWorldPipeline", "dreamx_world"
    return chunk_hf_config(*names, layout, transformer, config, RULES, kind=layout.kind)


def overlaid(stated: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> dict[str, Any]:
    """Return a config with the sizes of tensors, under any of their names. Raises ValueError."""
    named = {rename(name, RULES): shape for name, shape in shapes.items()}
    num_heads = stated.get("num_heads", stated.get("num_attention_heads"))
    sizes = wan.stored_sizes(named, where, num_heads)
    posed = sorted(int(name.split(".")[1]) for name in named if _MARK.match(name))
    if not posed:
        raise ValueError(f"{where} has no camera branch; it is no DreamX-World transformer")
    camera_dim = named[f"blocks.{posed[0]}.cam_self_attn.q_proj.weight"][0]
    known = {
        **sizes,
        "out_dim": sizes["in_dim"],
        "attn_compress": sizes["dim"] // camera_dim,
        "cam_self_attn_layers": posed,
    }
    # Keys of the other style state the same sizes.
    others = ("in_channels", "out_channels", "num_attention_heads", "attention_head_dim")
    return {key: value for key, value in stated.items() if key not in others} | known


def transformer_shapes(config: DreamXConfig) -> dict[str, Shape]:
    """Return the shape of every transformer tensor in a checkpoint by name (1125 in the released
    model).
    """
    both = wan.BLOCK_TENSORS | CAMERA_TENSORS
    shapes = wan.network_shapes(config, wan.TRANSFORMER_TENSORS, both, C=config.camera_dim)
    without = [layer for layer in range(config.num_layers) if layer not in config.camera_blocks]
    for layer in without:
        for name in CAMERA_TENSORS:
            del shapes[f"blocks.{layer}.{name}"]
    return shapes


def load_transformer(transformer: nn.Module, source: TensorSource, config: DreamXConfig) -> None:
    """Load the transformer, or this rank's stage and shard of it, strictly. Raises ValueError."""
    load_strict(transformer, source, transformer_shapes(config), RULES, what="transformer")


def adapter_target(transformer: nn.Module, config: DreamXConfig) -> AdapterTarget:
    """Return the transformer as a target of LoRA adapters."""
    # not needed to describe a checkpoint
    from vllm_omni.model_executor.models.wan.transformer.layers import PatchEmbedding

    return AdapterTarget(
        transformer, transformer_shapes(config), RULES, linear_types=(PatchEmbedding,)
    )


def _find_transformer(folder: Path) -> Path | None:
    """Return the transformer in a folder: the folder itself, or a file in it. None: the folder
    contains no transformer.
    """
    if not folder.is_dir():
        return None
    single = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if single is not None:
        return single if _is_transformer(single) else None
    if folder.name == _FOLDER and any(folder.glob("*.safetensors")):
        return folder if _is_transformer(folder) else None
    # Without weights (`--load-format dummy`), a config is sufficient.
    config = own_config(folder)
    is_named = config.get("_class_name") == _CLASS or config.get("cam_method") == "prope"
    return folder if is_named else None


def _is_transformer(weights: Path) -> bool:
    return any(_MARK.match(name) for name in open_tensors(weights).shapes)
