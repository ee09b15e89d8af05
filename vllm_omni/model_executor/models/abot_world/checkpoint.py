# SPDX-License-Identifier: Apache-2.0
"""Locate the components of an ABot-World-0 checkpoint, and load its transformer strictly, using a
table of tensor names.

The original repository contains all components in one folder. Converted checkpoints use the
diffusers folders. The action adapter's six tensors distinguish this transformer from the Wan 2.2
TI2V-5B transformer.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import torch
from torch import nn

from vllm_omni.model_executor.checkpoint.loading import load_strict, rename
from vllm_omni.model_executor.checkpoint.tensor_files import (
    AdaptedSource,
    Shape,
    TensorSource,
    open_tensors,
    unchanged,
)
from vllm_omni.model_executor.layers.lora.target import AdapterTarget
from vllm_omni.model_executor.models.abot_world.config import KEY_PLANES, SPACE, AbotWorldConfig
from vllm_omni.model_executor.models.wan.checkpoint.layout import (
    WanComponents,
    chunk_hf_config,
    find_transformer,
    own_config,
)
from vllm_omni.model_executor.models.wan.transformer import weights as wan

LAYOUTS: Final = ("original", "diffusers")
"""Names of the layouts that `make-tiny` can write."""
TRANSFORMER_FILE: Final = "diffusion_pytorch_model.safetensors"
RULES = wan.TRANSFORMER_RULES
"""Rules that strip prefixes and map diffusers names to the original code's parameter names. Names
that already have this form are left unchanged.
"""
_ADAPTER = "act_control_adapter."
_KEYS = f"{_ADAPTER}conv.weight"
_KEY_CONFIG = "act_control_in_dim"
_RESIDUAL = f"{_ADAPTER}residual_blocks.0."
OUTSIDE_TENSORS: dict[str, wan.Sizes] = {
    **wan.TRANSFORMER_TENSORS,
    _KEYS: ("D", "A", 2, 2),
    f"{_ADAPTER}conv.bias": ("D",),
    **{f"{_RESIDUAL}{name}.weight": ("D", "D", 3, 3) for name in ("conv1", "conv2")},
    **{f"{_RESIDUAL}{name}.bias": ("D",) for name in ("conv1", "conv2")},
}


@dataclass(frozen=True)
class CheckpointLayout(WanComponents):
    """The components of one checkpoint. `transformer` is a folder of safetensors files or one
    safetensors file.
    """

    download_name: ClassVar[str] = "abot_world"
    vae_release: ClassVar[Literal["2.1", "2.2"]] = "2.2"

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
        return with_tensor_sizes(stated, self.open_transformer().shapes, str(self.transformer))


def find_layout(path: Path) -> CheckpointLayout:
    """Locate the components in `path`, or next to it if `path` is the transformer's folder.

    Raises:
        ValueError: The directory does not contain a transformer of this model. The message is one
            line.
    """
    folder, root = find_transformer(path, ("transformer",), _is_transformer, "ABot-World-0")
    kind: Literal["original", "diffusers"] = (
        "diffusers" if folder.name == "transformer" else "original"
    )
    single = folder / TRANSFORMER_FILE
    weights = single if folder == root and single.is_file() else folder
    return CheckpointLayout.of_folder(root, weights, kind=kind)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` contains an ABot-World-0 transformer. The check is cheap and never
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
    config = AbotWorldConfig.from_checkpoint(transformer)
    names = "AbotWorldPipeline", "abot_world"
    return chunk_hf_config(*names, layout, transformer, config, RULES, kind=layout.kind)


def with_tensor_sizes(
    stated: Mapping[str, Any], shapes: Mapping[str, Shape], where: str
) -> dict[str, Any]:
    """Return the `stated` config, with its dimensions replaced by those derived from the stored
    tensors.

    The tensor names may follow any layout. Raises ValueError if the tensors belong to another
    network.
    """
    named = {rename(name, RULES): shape for name, shape in shapes.items()}
    num_heads = stated.get("num_heads", stated.get("num_attention_heads"))
    sizes = wan.stored_sizes(named, where, num_heads)
    try:
        planes = len(SPACE.buttons) * KEY_PLANES
        reduction = math.isqrt(named[_KEYS][1] // planes)
        out_dim = named["head.head.weight"][0] // 4
    except (KeyError, IndexError) as error:
        raise ValueError(f"{where} holds no ABot-World-0 transformer; download it again") from error
    own = {"out_dim": out_dim, "downscale_factor_control_adapter": reduction}
    return {**stated, **sizes, **own}


def transformer_shapes(config: AbotWorldConfig) -> dict[str, Shape]:
    """Return the shape of every transformer tensor in a checkpoint, keyed by name. The released
    model has 831 tensors.
    """
    inputs = len(SPACE.buttons) * KEY_PLANES * config.key_reduction**2
    return wan.network_shapes(config, OUTSIDE_TENSORS, wan.BLOCK_TENSORS, A=inputs)


def load_transformer(transformer: nn.Module, source: TensorSource, config: AbotWorldConfig) -> None:
    """Load this rank's stage and shard of the transformer. Raises ValueError if tensor names or
    shapes do not match.
    """
    shapes = transformer_shapes(config)
    folded = {**shapes, _KEYS: (config.dim, len(SPACE.buttons))}
    inputs = shapes[_KEYS]
    adapted = AdaptedSource(source, partial(_forms, inputs=inputs))
    load_strict(transformer, adapted, folded, RULES, what="transformer")


def _forms(name: str, inputs: Shape) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
    return {name: partial(fold_keys, inputs=inputs) if rename(name, RULES) == _KEYS else unchanged}


def fold_keys(weight: torch.Tensor, inputs: Shape) -> torch.Tensor:
    """Return the fp32 matrix [D, keys] that is equivalent to a convolution if all pixels of an
    input are equal. The matrix is the sum of the convolution's weights over a key's copies, the
    pixels of a block, and the kernel.

    Args:
        weight: Convolution weight, [D, keys * copies * pixels, 2, 2].
        inputs: Expected shape of the weight. A weight with a different shape is returned unchanged.
    """
    if tuple(weight.shape) != inputs:
        return weight
    return weight.float().unflatten(1, (len(SPACE.buttons), -1)).sum((2, 3, 4))


def adapter_target(transformer: nn.Module, config: AbotWorldConfig) -> AdapterTarget:
    """Return the transformer without its action adapter as an `AdapterTarget` for LoRA adapters."""
    # Imported here, because code that only describes a checkpoint does not need this class.
    from vllm_omni.model_executor.models.wan.transformer.layers import PatchEmbedding

    return AdapterTarget(
        transformer,
        transformer_shapes(config),
        RULES,
        (f"{_ADAPTER}*",),
        linear_types=(PatchEmbedding,),
    )


def _is_transformer(folder: Path) -> bool:
    """Return whether a folder contains the transformer, according to the tensor names. If there are
    no weights (`--load-format dummy`), the config decides.
    """
    if not folder.is_dir():
        return False
    single = folder / TRANSFORMER_FILE
    if single.is_file() or any(folder.glob("*.safetensors")):
        shapes = open_tensors(single if single.is_file() else folder).shapes
        return any(rename(name, RULES) == _KEYS for name in shapes)
    return _KEY_CONFIG in own_config(folder)
