# SPDX-License-Identifier: Apache-2.0
"""The files of a Waypoint checkpoint, the names of its tensors, and strict loading.

The released Waypoint 1.5 file (393 tensors) uses different tensor names from the original engine's
state dict (361 tensors). Waypoint-1 was released in the form of that state dict (366 tensors).
`network_source` converts both naming schemes to the names of `WaypointTransformer`. Both kinds of
file repeat the six modulation projections for every block. The loader checks that the copies are
equal.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from vllm_omni.model_executor.checkpoint.loading import Rules, load_strict, rename, shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import (
    AdaptedSource,
    Forms,
    Shape,
    TensorSource,
    confined,
    open_tensors,
    read_yaml,
    unchanged,
)
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.models.wan.architecture import UMT5_XXL
from vllm_omni.model_executor.models.wan.checkpoint.layout import (
    StoredShapes,
    checked_text,
    engine_fields,
    stated_text,
)
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.waypoint.transformer import WaypointTransformer

logger = logging.getLogger("vllm." + __name__)

CONFIG_FILE, WEIGHTS_FILE = "config.yaml", "model.safetensors"
TAEHV_FILES: Final = (
    "taehv1_5.pth",
    "taehv1_5.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
)
_TAEHV_WIDTHS: Final = ("encoder.0", "decoder.1", "decoder.8", "decoder.14", "decoder.20")
"""TAEHV convolutions whose numbers of output channels are arguments of `StreamingTAEHV`."""
LAYOUTS = ("v1_5", "v1")
"""Names of the released layouts, which `make-tiny` can write."""
IMAGES_FOLDER, TEXT_FOLDER = "ae", "text_encoder"
AUTOENCODER_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "encoder": (
        "latent_channels",
        "ch_0",
        "ch_max",
        "encoder_blocks_per_stage",
        "channels",
        "skip_logvar",
    ),
    "decoder": ("latent_channels", "ch_0", "ch_max", "decoder_blocks_per_stage", "channels"),
}
"""Keys read from `{half}_conf.yml`, the config of each half of Waypoint-1's autoencoder."""
UMT5_XL: dict[str, Any] = {**UMT5_XXL, "d_model": 2048, "d_ff": 5120, "num_heads": 32}
"""`UMT5Config` values of google/umt5-xl."""

RULES: Rules = (
    (r"^transformer\.blocks\.", "blocks."),
    (r"^(denoise_step_emb|ctrl_emb)\.mlp\.", r"\1."),
    (r"^out_norm\.fc\.", "out_norm."),
    (r"\.dit_mlp\.", ".mlp."),
    (r"\.ctrl_mlpfusion\.(mlp\.)?", ".control."),
    (r"\.prompt_cross_attn\.", ".cross."),
    (r"\.attn_cond_head\.bias_in\Z", ".attn_bias"),
    (r"\.mlp_cond_head\.bias_in\Z", ".mlp_bias"),
    (r"\.attn_cond_head\.cond_proj\.", ".cond_proj."),
    *((rf"\.mlp_cond_head\.cond_proj\.{i}\.", f".cond_proj.{i + 3}.") for i in range(3)),
    (r"\.cond_head\.cond_proj\.", ".cond_proj."),
    (r"\.(attn|cross)\.([qkv])_proj\.", r".\1.\2."),
    (r"^blocks\.0\.cond_proj\.", "cond_proj."),
)
"""Rules for renaming stored tensors that are not split."""
_UNUSED = re.compile(r"\.cond_heads\.|^(ctrl|prompt)_cfg\.null_emb\Z")
"""Stored tensors that are not read: heads for another mode, and embeddings for training."""


def network_source(stored: TensorSource, config: WaypointConfig) -> AdaptedSource:
    """Return a view of a stored network that renames its tensors to the names in
    `transformer_shapes`.

    Raises:
        ValueError: The stored names are ambiguous.
    """
    first, cells = config.d_model, math.prod(config.patch)
    changed: dict[str, Forms] = {
        r"\.cond_head\.bias_in\Z": lambda name: {
            name.replace("cond_head.bias_in", f"{half}_bias"): unchanged for half in ("attn", "mlp")
        },
        r"\.control\.fc1\.weight\Z": lambda name: {
            name.replace("fc1", "fc1_x"): lambda both: both[:, :first],
            name.replace("fc1", "fc1_c"): lambda both: both[:, first:],
        },
        r"^unpatchify\.weight\Z": lambda name: {
            name: lambda w: w.permute(1, 2, 3, 0).flatten(0, 2) if w.dim() == 4 else w
        },
        r"^unpatchify\.bias\Z": lambda name: {
            name: lambda b: b.repeat_interleave(cells) if len(b) == config.channels else b
        },
    }

    def forms(stored_name: str) -> Mapping[str, Callable[[torch.Tensor], torch.Tensor]]:
        name = rename(stored_name, RULES)
        if _UNUSED.search(stored_name):
            return {}
        form = next((form for pattern, form in changed.items() if re.search(pattern, name)), None)
        return {name: unchanged} if form is None else form(name)

    return AdaptedSource(stored, forms)


def transformer_shapes(config: WaypointConfig, *, stored: bool = False) -> dict[str, Shape]:
    """Return the shape of every tensor in the network, keyed by the model's names.

    Args:
        config: Architecture of the network.
        stored: Whether to include the copies of the modulation projections that a file contains.
    """
    shapes = _network_shapes(config)
    return (
        shapes | {repeat: shapes[retained] for repeat, retained in _repeats(config).items()}
        if stored
        else shapes.copy()
    )


@cache
def _network_shapes(config: WaypointConfig) -> dict[str, Shape]:
    # Imported here, because code that only describes a checkpoint does not need the network.
    from vllm_omni.model_executor.models.waypoint.transformer import WaypointTransformer

    with torch.device("meta"):
        return {
            name: slot.shape for name, slot in checkpoint_slots(WaypointTransformer(config)).items()
        }


def _repeats(config: WaypointConfig) -> dict[str, str]:
    """Return the names of the modulation projections' copies in later blocks, each mapped to the
    name of its parameter in the model.
    """
    names = [f"cond_proj.{index}.weight" for index in range(6)]
    return {f"blocks.{block}.{name}": name for block in range(1, config.n_layers) for name in names}


def load_transformer(transformer: "WaypointTransformer", stored: TensorSource) -> None:
    """Load the network strictly from either form of the file. Raises ValueError if names, shapes or
    copies do not match.
    """
    config = transformer.config
    source = network_source(stored, config)
    load_strict(transformer, source, transformer_shapes(config, stored=True), what="transformer")
    repeats = _repeats(config)
    for name, tensor in source.read_tensors(repeats):
        held = transformer.get_parameter(repeats[name])
        if not torch.equal(tensor.to(held), held):
            raise ValueError(
                f"transformer: {stored.where}: {name} differs from block 0's; these projections "
                "are shared by all "
                "blocks of the models known here"
            )
    transformer.clear_derived()
    differing = sum(
        not torch.equal(block.attn_bias, block.mlp_bias) for block in transformer.layers
    )
    if differing:
        logger.info(
            "%s: %d blocks have different modulation biases for attention and MLP; each is used "
            "for its own (the "
            "original engine reads the MLP's for both)",
            *(stored.where, differing),
        )


# -- other components ------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointLayout:
    """Paths of a checkpoint's components. The path of a missing component is None."""

    root: Path
    """The checkpoint directory."""
    taehv: Path | None
    """Autoencoder of Waypoint 1.5."""
    text_encoder: Path | None
    """Folder of the umt5 text encoder (transformers) and its tokenizer."""

    def config(self) -> dict[str, Any]:
        return read_config(self.root)

    def require(self, config: WaypointConfig) -> None:
        """Raise a one-line ValueError unless all components that `config` requires exist."""
        streams = config.temporal_compression > 1
        images = [(f"{IMAGES_FOLDER}/{half}.safetensors",) for half in AUTOENCODER_KEYS]
        components = [(WEIGHTS_FILE,), *([TAEHV_FILES] if streams else images)]
        components += [(f"{TEXT_FOLDER}/*.safetensors",)] if config.prompted else []
        missing = [
            " or ".join(positions)
            for positions in components
            if not any(any(self.root.glob(position)) for position in positions)
        ]
        if missing:
            raise ValueError(
                f"{self.root} lacks {', '.join(missing)}; complete it with `vllm-omni download "
                f"{'waypoint' if streams else 'waypoint_1_small'} {self.root}` or start with "
                "--load-format dummy"
            )

    def codec_sizes(self) -> dict[str, Any]:
        """Return the autoencoder arguments specified by the autoencoder's files, as JSON types.

        Raises:
            ValueError: A file is invalid.
        """
        if self.taehv is not None:
            shapes = StoredShapes(self.taehv, ())
            encoder, *decoder = (shapes[f"{name}.weight"][0] for name in _TAEHV_WIDTHS)
            return {"encoder_width": encoder, "decoder_widths": decoder}
        folder, sizes = self.root / IMAGES_FOLDER, {}
        for half, keys in AUTOENCODER_KEYS.items():
            if (folder / f"{half}_conf.yml").is_file():
                stored = read_config(folder, f"{half}_conf.yml")
                sizes[half] = {key: stored[key] for key in keys if key in stored}
        return sizes

    def text_config(self, width: int) -> dict[str, Any]:
        """Return the `UMT5Config` values from the text encoder's config, or the released values if
        the text encoder has no config.

        Args:
            width: Width of the text embeddings.
        """
        return checked_text(stated_text(self.text_encoder) or dict(UMT5_XL), width, self.root)

    def open_network(self) -> TensorSource:
        return open_tensors(self.root / WEIGHTS_FILE)

    def load_codec(self, codec: nn.Module) -> None:
        """Load the autoencoder. Raises ValueError if its tensors do not match."""
        if self.taehv is not None:
            load_autoencoder(codec, open_tensors(self.taehv), what="TAEHV")
            return
        for name, half in codec.named_children():
            source = open_tensors(self.root / IMAGES_FOLDER / f"{name}.safetensors")
            load_autoencoder(half, source, what=f"image {name}")


def find_layout(path: Path) -> CheckpointLayout:
    """Locate the checkpoint components in `path`.

    Raises:
        ValueError: The directory contains no Waypoint model config. The message is one line.
    """
    if not is_checkpoint(path):
        raise ValueError(
            f"{path} holds no {CONFIG_FILE} of a Waypoint model with the key `model_type`"
        )
    taehv = next((path / name for name in TAEHV_FILES if (path / name).is_file()), None)
    text = path / TEXT_FOLDER
    return CheckpointLayout(
        path,
        None if taehv is None else confined(taehv.parent, taehv.name),
        text if text.is_dir() else None,
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` contains the `config.yaml` of a Waypoint model. The check is cheap and
    never raises.
    """
    try:
        config = read_config(path) if (path / CONFIG_FILE).is_file() else {}
    except (ValueError, OSError):
        return False
    return str(config.get("model_type", "")).startswith("waypoint") or {
        "n_buttons",
        "global_pinned_dilation",
    } <= set(config)


def hf_config(path: Path) -> dict[str, Any]:
    """Return the fields of vLLM's config object, as JSON types. Weight files are not needed.

    Raises ValueError if the checkpoint is not usable.
    """
    layout = find_layout(path)
    values = layout.config()
    config = WaypointConfig.from_checkpoint(values)
    text = layout.text_config(config.prompt_embedding_dim or 0) if config.prompted else {}
    sizes = {"dim": config.d_model, "heads": config.n_heads, "layers": config.n_layers}
    return {
        **engine_fields("WaypointPipeline", **sizes, context=text),
        "waypoint": {"transformer": values, "codec": layout.codec_sizes(), "umt5": text},
    }


def load_autoencoder(module: nn.Module, source: TensorSource, *, what: str) -> None:
    """Load TAEHV, the image encoder or the image decoder. The parameter names of these modules are
    the stored tensor names.

    Raises:
        ValueError: Tensor names or shapes do not match.
    """
    load_strict(module, source, shapes_of(module), what=what)


def read_config(path: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Return the mapping in a YAML file in the folder `path`, or the file's `model` section if it
    has one.

    Raises:
        ValueError: The file is invalid.
    """
    values = read_yaml(confined(path, name))
    section = values.get("model")
    return section if isinstance(section, dict) else values
