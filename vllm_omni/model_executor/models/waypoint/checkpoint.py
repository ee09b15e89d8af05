# SPDX-License-Identifier: Apache-2.0
"""The files of a Waypoint checkpoint, the names its network has been stored under, and strict loading.

The released 1.5 file (393 tensors) and the engine's state dict (361; Waypoint-1: 366, also as released) name the same
weights differently; `NetworkSource` gives either the names of `WaypointTransformer`. Both repeat the six modulation
projections for every block: they are compared and kept once.
Held by tests/model_executor/models/waypoint/test_waypoint_weights.py.
"""

import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import yaml
from torch import nn

from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.model_executor.models.waypoint.transformer import Block, WaypointTransformer
from vllm_omni.model_executor.tensor_files import Shape, TensorSource, confined
from vllm_omni.model_executor.weights import Rules, load_strict, rename, shapes_of

logger = logging.getLogger("vllm." + __name__)

CONFIG_FILE, WEIGHTS_FILE = "config.yaml", "model.safetensors"
TAEHV_FILES: Final = ("taehv1_5.pth", "taehv1_5.safetensors", "vae/diffusion_pytorch_model.safetensors")
_MAX_YAML_BYTES = 1 << 20

RULES: Rules = (
    (r"^transformer\.blocks\.", "blocks."),
    (r"^(denoise_step_emb|ctrl_emb)\.mlp\.", r"\1."),
    (r"^out_norm\.fc\.", "out_norm."),
    (r"\.dit_mlp\.", ".mlp."),
    (r"\.ctrl_mlpfusion\.(mlp\.)?", ".control."),
    (r"\.prompt_cross_attn\.", ".cross."),
    (r"\.attn_cond_head\.bias_in$", ".attn_bias"),
    (r"\.mlp_cond_head\.bias_in$", ".mlp_bias"),
    (r"\.attn_cond_head\.cond_proj\.", ".cond_proj."),
    *((rf"\.mlp_cond_head\.cond_proj\.{i}\.", f".cond_proj.{i + 3}.") for i in range(3)),
    (r"\.cond_head\.cond_proj\.", ".cond_proj."),
)
"""Stored names -> the model's, where a tensor stays one tensor."""
_UNUSED = re.compile(r"\.cond_heads\.|^(ctrl|prompt)_cfg\.null_emb$")
"""Dropped unread: heads of another mode, and embeddings that only training reads."""
_SHARED = re.compile(r"^blocks\.(\d+)\.(cond_proj\.[0-5]\.weight)$")

Change = Callable[[torch.Tensor], torch.Tensor]


class NetworkSource:
    """A stored network under the model's own names, `TensorSource`. Raises ValueError for what cannot be told apart.

    repeated: stored name -> the model's, of projections of blocks after the first.
    """

    def __init__(self, source: TensorSource, config: WaypointConfig) -> None:
        self.source, self.where = source, source.where
        self.repeated: dict[str, str] = {}
        self._parts: dict[str, tuple[str, Change]] = {}
        for name in source.shapes:
            if _UNUSED.search(name):
                continue
            for target, change in self._targets(name, config):
                if target in self._parts:
                    raise ValueError(f"{self.where} holds {target!r} twice, as {self._parts[target][0]!r} and {name!r}")
                self._parts[target] = (name, change)
        self.shapes: Mapping[str, Shape] = {
            target: tuple(change(torch.empty(source.shapes[name], device="meta")).shape)
            for target, (name, change) in self._parts.items()
        }
        self.dtypes = {target: source.dtypes[name] for target, (name, _) in self._parts.items()}

    def _targets(self, name: str, config: WaypointConfig) -> list[tuple[str, Change]]:
        target = rename(name, RULES)
        if shared := _SHARED.match(target):
            if shared[1] == "0":
                return [(shared[2], _same)]
            self.repeated[name] = shared[2]
            return []
        if target.endswith(".cond_head.bias_in"):
            block = target.removesuffix("cond_head.bias_in")
            return [(f"{block}attn_bias", _same), (f"{block}mlp_bias", _same)]
        if target.endswith(".control.fc1.weight"):
            stem = target.removesuffix(".weight")
            return [
                (f"{stem}_x.weight", lambda full: full[:, : config.d_model]),
                (f"{stem}_c.weight", lambda full: full[:, config.d_model :]),
            ]
        if target == "unpatchify.weight":
            return [(target, lambda full: full.permute(1, 2, 3, 0).flatten(0, 2) if full.dim() == 4 else full)]
        if target == "unpatchify.bias":
            cells = math.prod(config.patch)
            return [(target, lambda b: b.repeat_interleave(cells) if len(b) == config.channels else b)]
        return [(target, _same)]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        wanted: dict[str, list[str]] = {}
        for target in names:
            wanted.setdefault(self._parts[target][0], []).append(target)
        for name, tensor in self.source.read(wanted):
            for target in wanted[name]:
                yield target, self._parts[target][1](tensor)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def load_transformer(transformer: WaypointTransformer, stored: TensorSource) -> None:
    """Load the network under either spelling, strictly. Raises ValueError."""
    config = transformer.config
    source = NetworkSource(stored, config)
    load_strict(transformer, source, shapes_of(transformer), what="transformer")
    copies = {(rename(name, RULES)) for name in source.repeated}
    expected = {f"blocks.{n}.cond_proj.{j}.weight" for n in range(1, config.n_layers) for j in range(6)}
    if copies != expected or len(copies) != len(source.repeated):
        odd = sorted(copies ^ expected)[:3]
        raise ValueError(f"transformer: {stored.where} does not repeat the modulation projections per block: {odd}")
    kept = dict(transformer.named_parameters())
    for name, tensor in stored.read(source.repeated):
        held = kept[source.repeated[name]]
        if tensor.shape != held.shape or not torch.equal(tensor.to(held), held):
            raise ValueError(
                f"transformer: {stored.where}: {name} differs from block 0's; these projections are shared by all "
                "blocks of the models known here"
            )
    transformer.forget()
    differing = [
        index
        for index, block in enumerate(transformer.blocks)
        if isinstance(block, Block) and not torch.equal(block.attn_bias, block.mlp_bias)
    ]
    if differing:
        logger.info(
            "%s: %d blocks have different modulation biases for attention and MLP; using %s (the original engine reads "
            "the MLP's for both)",
            *(stored.where, len(differing), "each its own" if transformer.bias_in == "each" else "the MLP's for both"),
        )


def load_autoencoder(module: nn.Module, source: TensorSource, *, what: str) -> None:
    """Load TAEHV or half an image autoencoder, whose parameters have the stored names. Raises ValueError."""
    load_strict(module, source, shapes_of(module), what=what)


def read_config(path: Path) -> dict[str, Any]:
    """Return the mapping in a checkpoint's `config.yaml`, or in its section `model`. Raises ValueError."""
    file = confined(path, CONFIG_FILE)
    if file.stat().st_size > _MAX_YAML_BYTES:
        raise ValueError(f"{file} is larger than {_MAX_YAML_BYTES >> 20} MiB; it is no config file")
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} cannot be read as YAML ({type(error).__name__}); download it again") from error
    if isinstance(values, dict) and isinstance(values.get("model"), dict):
        values = values["model"]
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ValueError(f"{file} must hold a mapping of names, got {type(values).__name__}")
    return values
