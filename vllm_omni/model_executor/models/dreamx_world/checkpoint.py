# SPDX-License-Identifier: Apache-2.0
"""Locate the components of a DreamX-World-5B checkpoint, and load its transformer strictly.

The released transformer is one file, `model.safetensors`. The VAE, text encoder and tokenizer come
from Wan2.2-TI2V-5B and belong in the same directory or in its `assets/`. Converted checkpoints
contain a `transformer` folder. The network's dimensions and the blocks that have a camera branch
are derived from the tensors, because the release has no config.
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
"""Names of the layouts that `make-tiny` can write."""

RULES = TRANSFORMER_RULES
"""Rules that strip prefixes and map diffusers names to the original code's parameter names. The
camera branch's names do not change.
"""

_FOLDER: Final = "transformer"
_FILES: Final = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_CLASS: Final = "DreamXWorldARTransformer3DModel"
_MARK = re.compile(r"(.*\.)?blocks\.\d+\.cam_self_attn\.q_proj\.weight\Z")
"""Pattern for the name of a tensor that no other Wan transformer has."""

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
"""Tensors of a block's camera branch, which has width C."""


@dataclass(frozen=True)
class CheckpointLayout(WanComponents):
    """The components of one checkpoint. `transformer` is a folder of safetensors files or one
    safetensors file.
    """

    download_name: ClassVar[str] = "dreamx_world"
    vae_release = "2.2"

    kind: Literal["original", "diffusers"]
    """Whether the checkpoint uses the original repository's layout or the diffusers layout."""

    def transformer_config(self) -> dict[str, Any]:
        """Return the transformer's `config.json`. If there are weight files, the dimensions derived
        from the stored tensors replace those in the config.
        """
        folder = self.transformer if self.transformer.is_dir() else self.transformer.parent
        stated = own_config(folder)
        if self.transformer.is_dir() and not any(folder.glob("*.safetensors")):
            return stated
        return overlaid(stated, self.open_transformer().shapes, str(self.transformer))


def find_layout(path: Path) -> CheckpointLayout:
    """Locate the components in `path`.

    Raises:
        ValueError: The directory does not contain a transformer of this model. The message is one
            line.
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
    """Return whether `path` contains a DreamX-World checkpoint. The check is cheap and never
    raises.
    """
    try:
        find_layout(path)
    except (ValueError, OSError):
        return False
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return the result of `chunk_hf_config` for this checkpoint, including its `kind`. No weight
    files are required.

    Raises ValueError if the checkpoint is not usable.
    """
    layout = find_layout(path)
    transformer = layout.transformer_config()
    config = DreamXConfig.from_checkpoint(transformer)
    names = "DreamXWorldPipeline", "dreamx_world"
    return chunk_hf_config(*names, layout, transformer, config, RULES, kind=layout.kind)


def overlaid(stated: Mapping[str, Any], shapes: Mapping[str, Shape], where: str) -> dict[str, Any]:
    """Return the `stated` config, with its dimensions replaced by those derived from the stored
    tensors.

    The tensor names may follow any layout. Raises ValueError if the tensors belong to another
    network.
    """
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
    # The other naming style's keys specify the same dimensions.
    others = ("in_channels", "out_channels", "num_attention_heads", "attention_head_dim")
    return {key: value for key, value in stated.items() if key not in others} | known


def transformer_shapes(config: DreamXConfig) -> dict[str, Shape]:
    """Return the shape of every transformer tensor in a checkpoint, keyed by name. The released
    model has 1125 tensors.
    """
    both = wan.BLOCK_TENSORS | CAMERA_TENSORS
    shapes = wan.network_shapes(config, wan.TRANSFORMER_TENSORS, both, C=config.camera_dim)
    without = [layer for layer in range(config.num_layers) if layer not in config.camera_blocks]
    for layer in without:
        for name in CAMERA_TENSORS:
            del shapes[f"blocks.{layer}.{name}"]
    return shapes


def load_transformer(transformer: nn.Module, source: TensorSource, config: DreamXConfig) -> None:
    """Load this rank's stage and shard of the transformer. Raises ValueError if tensor names or
    shapes do not match.
    """
    load_strict(transformer, source, transformer_shapes(config), RULES, what="transformer")


def adapter_target(transformer: nn.Module, config: DreamXConfig) -> AdapterTarget:
    """Return the transformer as an `AdapterTarget` for LoRA adapters."""
    # Imported here, because code that only describes a checkpoint does not need this class.
    from vllm_omni.model_executor.models.wan.transformer.layers import PatchEmbedding

    return AdapterTarget(
        transformer, transformer_shapes(config), RULES, linear_types=(PatchEmbedding,)
    )


def _find_transformer(folder: Path) -> Path | None:
    """Return the path of the transformer in a folder: the folder itself, or a file in it. Return
    None if the folder does not contain a transformer.
    """
    if not folder.is_dir():
        return None
    single = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if single is not None:
        return single if _is_transformer(single) else None
    if folder.name == _FOLDER and any(folder.glob("*.safetensors")):
        return folder if _is_transformer(folder) else None
    # Without weights (`--load-format dummy`), only a config is required.
    config = own_config(folder)
    is_named = config.get("_class_name") == _CLASS or config.get("cam_method") == "prope"
    return folder if is_named else None


def _is_transformer(weights: Path) -> bool:
    return any(_MARK.match(name) for name in open_tensors(weights).shapes)
