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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import yaml
from torch import nn

from vllm_omni.model_executor.layers.parallel import checkpoint_slots
from vllm_omni.model_executor.models.wan.components import UMT5_XXL
from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.model_executor.tensor_files import Shape, TensorSource, confined, open_tensors, read_json
from vllm_omni.model_executor.weights import Rules, load_strict, rename, shapes_of

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.waypoint.transformer import WaypointTransformer

logger = logging.getLogger("vllm." + __name__)

CONFIG_FILE, WEIGHTS_FILE = "config.yaml", "model.safetensors"
TAEHV_FILES: Final = ("taehv1_5.pth", "taehv1_5.safetensors", "vae/diffusion_pytorch_model.safetensors")
LAYOUTS = ("v1_5", "v1")
"""The released layouts, by the names `make-tiny` takes."""
IMAGES_FOLDER, TEXT_FOLDER = "ae", "text_encoder"
_HALVES = ("encoder.safetensors", "decoder.safetensors")
_IMAGE_SIZES = {"latent_channels": "latent_channels", "ch_0": "first", "ch_max": "largest", "channels": "channels"}
"""Keys of `encoder_conf.yml` and `decoder_conf.yml` -> arguments of `ImageEncoder` and `ImageDecoder`."""
UMT5_XL: dict[str, Any] = {**UMT5_XXL, "d_model": 2048, "d_ff": 5120, "num_heads": 32}
"""google/umt5-xl."""
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
    (r"\.(attn|cross)\.([qkv])_proj\.", r".\1.\2."),
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


def transformer_shapes(config: WaypointConfig) -> dict[str, Shape]:
    """Return name -> shape of every tensor of the network, by the model's names."""
    from vllm_omni.model_executor.models.waypoint.transformer import WaypointTransformer  # not to describe a checkpoint

    with torch.device("meta"):
        return {name: slot.shape for name, slot in checkpoint_slots(WaypointTransformer(config)).items()}


def load_transformer(transformer: "WaypointTransformer", stored: TensorSource) -> None:
    """Load the network under either spelling, strictly. Raises ValueError."""
    config = transformer.config
    source = NetworkSource(stored, config)
    load_strict(transformer, source, transformer_shapes(config), what="transformer")
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
        index for index, block in enumerate(transformer.layers) if not torch.equal(block.attn_bias, block.mlp_bias)
    ]
    if differing:
        logger.info(
            "%s: %d blocks have different modulation biases for attention and MLP; using %s (the original engine reads "
            "the MLP's for both)",
            *(stored.where, len(differing), "each its own" if transformer.bias_in == "each" else "the MLP's for both"),
        )


# -- the other pieces --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointLayout:
    """The places of a checkpoint's pieces; None = not there. taehv: of 1.5. images: a folder with the two halves of
    Waypoint-1's autoencoder. text_encoder: a folder of transformers' umt5 with its tokenizer.
    """

    root: Path
    taehv: Path | None
    images: Path | None
    text_encoder: Path | None

    def config(self) -> dict[str, Any]:
        return read_config(self.root)

    def require(self, config: WaypointConfig) -> None:
        """Raise ValueError of one line unless the pieces that `config` needs are there with their weights."""
        needed: dict[str, bool] = {WEIGHTS_FILE: (self.root / WEIGHTS_FILE).is_file()}
        if config.temporal_compression > 1:
            needed[f"the autoencoder ({' or '.join(TAEHV_FILES)})"] = self.taehv is not None
        else:
            needed[f"the autoencoder ({' and '.join(f'{IMAGES_FOLDER}/{name}' for name in _HALVES)})"] = (
                self.images is not None and all((self.images / name).is_file() for name in _HALVES)
            )
        if config.prompted:
            needed[f"{TEXT_FOLDER}/*.safetensors"] = self.text_encoder is not None and any(
                self.text_encoder.glob("*.safetensors")
            )
        missing = [piece for piece, there in needed.items() if not there]
        if missing:
            release = "waypoint" if config.temporal_compression > 1 else "waypoint_1_small"
            raise ValueError(
                f"{self.root} lacks {', '.join(missing)}; complete it with `vllm-omni download {release} {self.root}` "
                "or start with --load-format dummy"
            )

    def codec_sizes(self) -> dict[str, Any]:
        """Return the autoencoder's arguments that differ from the released ones, JSON types only: as its files say."""
        if self.taehv is not None:
            shapes = open_tensors(self.taehv).shapes
            try:
                decoder = [shapes[f"decoder.{index}.weight"] for index in (1, 8, 14, 20)]
                return {"encoder_width": shapes["encoder.0.weight"][0], "decoder_widths": [s[0] for s in decoder]}
            except (KeyError, IndexError) as error:
                raise ValueError(f"{self.taehv} is no TAEHV of Waypoint 1.5; download it again") from error
        if self.images is None:
            return {}
        halves = {}
        for half in ("encoder", "decoder"):
            name = f"{half}_conf.yml"
            if (self.images / name).is_file():
                read = read_config(self.images, name)
                halves[half] = {ours: read[theirs] for theirs, ours in _IMAGE_SIZES.items() if theirs in read}
                halves[half] |= (
                    {"blocks": read[f"{half}_blocks_per_stage"]} if f"{half}_blocks_per_stage" in read else {}
                )
        if "encoder" in halves:
            halves["encoder"]["log_variance"] = not read_config(self.images, "encoder_conf.yml").get(
                "skip_logvar", False
            )
        return halves

    def text_config(self) -> dict[str, Any]:
        """Return `UMT5Config` values from the encoder's config, else the released ones."""
        if self.text_encoder is None or not (self.text_encoder / "config.json").is_file():
            return dict(UMT5_XL)
        config = read_json(self.text_encoder / "config.json")
        return {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype", "architectures")}

    def open_network(self) -> TensorSource:
        return open_tensors(self.root / WEIGHTS_FILE)

    def load_codec(self, codec: nn.Module) -> None:
        """Fill the autoencoder. Raises ValueError."""
        if self.taehv is not None:
            load_autoencoder(codec, open_tensors(self.taehv), what="TAEHV")
        elif self.images is not None:
            for name, half in codec.named_children():
                source = open_tensors(self.images / f"{name}.safetensors")
                load_autoencoder(half, source, what=f"image {name}")


def find_layout(path: Path) -> CheckpointLayout:
    """Find the pieces below `path`. Raises ValueError of one line if its config is none of Waypoint's."""
    if not is_checkpoint(path):
        raise ValueError(f"{path} holds no {CONFIG_FILE} of a Waypoint model with the key `model_type`")
    files = [path / name for name in TAEHV_FILES if (path / name).is_file()]
    folders = [path / name if (path / name).is_dir() else None for name in (IMAGES_FOLDER, TEXT_FOLDER)]
    return CheckpointLayout(path, confined(files[0].parent, files[0].name) if files else None, *folders)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` holds a Waypoint model's `config.yaml`. Cheap, never raises."""
    try:
        config = read_config(path) if (path / CONFIG_FILE).is_file() else {}
    except (ValueError, OSError):
        return False
    return str(config.get("model_type", "")).startswith("waypoint") or {"n_buttons", "global_pinned_dilation"} <= set(
        config
    )


def hf_config(path: Path) -> dict[str, Any]:
    """Return the fields of vLLM's config object, JSON types only; needs no weight files. Raises ValueError."""
    layout = find_layout(path)
    values = layout.config()
    config = WaypointConfig.from_checkpoint(values)
    text = layout.text_config() if config.prompted else {}
    if text and text["d_model"] != config.prompt_embedding_dim:
        raise ValueError(
            f"{path}: the text encoder gives rows of {text['d_model']}, the transformer takes "
            f"{config.prompt_embedding_dim}"
        )
    return {
        "architectures": ["WaypointPipeline"],
        "dtype": "bfloat16",
        "hidden_size": config.d_model,
        "num_attention_heads": config.n_heads,
        "num_hidden_layers": config.n_layers,
        "vocab_size": text.get("vocab_size", 2),
        "max_position_embeddings": 16,
        "waypoint": {"transformer": values, "codec": layout.codec_sizes(), "umt5": text},
    }


def load_autoencoder(module: nn.Module, source: TensorSource, *, what: str) -> None:
    """Load TAEHV or half an image autoencoder, whose parameters have the stored names. Raises ValueError."""
    load_strict(module, source, shapes_of(module), what=what)


def read_config(path: Path, name: str = CONFIG_FILE) -> dict[str, Any]:
    """Return the mapping in a YAML file of the folder `path`, or in its section `model`. Raises ValueError."""
    file = confined(path, name)
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
