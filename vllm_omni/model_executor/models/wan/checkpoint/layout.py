# SPDX-License-Identifier: Apache-2.0
"""Locate the frozen components of a Wan checkpoint, under Wan's own file names or in the diffusers
folders.

If a file is missing from the checkpoint's directory, this module looks for it in the `assets/`
subdirectory, which can be a link to a directory that several checkpoints share.

This module only locates files; `loading.py` loads them. A missing component is an error only when
it is needed (`require`), so an engine with dummy weights can start from config files alone, and a
pipeline stage that does not decode needs no VAE. Each model family adds the location of its
transformer.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from vllm_omni.model_executor.checkpoint.loading import Rules, check_shapes, rename
from vllm_omni.model_executor.checkpoint.quantization import quantization_of
from vllm_omni.model_executor.checkpoint.root_config import is_root_config
from vllm_omni.model_executor.checkpoint.tensor_files import (
    Shape,
    TensorSource,
    confined,
    open_tensors,
    read_json,
)
from vllm_omni.model_executor.models.wan.architecture import (
    CLIP_HEAD_DIM,
    CLIP_VIT_H,
    UMT5_XXL,
    WAN_2_2_VAE,
    ChunkTransformerConfig,
    VAEConfig,
    clip_tokens,
)
from vllm_omni.model_executor.models.wan.checkpoint.component_names import (
    CLIP_RULES,
    TEXT_RULES,
    VAE_RULES,
)

Component = Literal["transformer", "vae", "text_encoder", "tokenizer", "image_encoder"]

VAERelease = Literal["2.1", "2.2"]
"""Wan release whose autoencoder a model uses."""

COMPONENT_PLACES: dict[str, tuple[str, ...]] = {
    "text_encoder": (
        "models_t5_umt5-xxl-enc-bf16.pth",
        "models_t5_umt5-xxl-enc-bf16.safetensors",
        "text_encoder",
    ),
    "tokenizer": ("google/umt5-xxl", "tokenizer"),
    "image_encoder": (
        "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth",
        "models_clip_open-clip-xlm-roberta-large-vit-huge-14.safetensors",
        "image_encoder",
    ),
}

ASSETS_FOLDER = "assets"
TINY_VAE_FILES: dict[VAERelease, str] = {"2.1": "taew2_1.pth", "2.2": "taew2_2.pth"}
"""File name of the tiny decoder, keyed by autoencoder release. The suffix can also be
`.safetensors`.
"""
TINY_VAE_FILE = TINY_VAE_FILES["2.1"]


def component_places(release: VAERelease) -> dict[str, tuple[str, ...]]:
    """Return the possible locations of each component, in order of preference."""
    stem = f"Wan{release}_VAE"
    return {"vae": (f"{stem}.pth", f"{stem}.safetensors", "vae"), **COMPONENT_PLACES}


@dataclass(frozen=True)
class WanComponents:
    """Paths of a checkpoint's components. Each model family has a subclass that sets
    `download_name`.
    """

    download_name: ClassVar[str]
    """Release name for `vllm-omni download`."""
    vae_release: ClassVar[VAERelease] = "2.1"
    """Wan release whose autoencoder the family uses."""

    root: Path
    """Folder that contains the components."""
    transformer: Path
    """Transformer: a folder of safetensors files, or one weight file."""
    vae: Path | None
    """VAE: a `.pth` or `.safetensors` file or a folder, or None if it is missing."""
    text_encoder: Path | None
    """Text encoder: a `.pth` or `.safetensors` file or a folder, or None if it is missing."""
    tokenizer: Path | None
    """Folder of the tokenizer, or None if it is missing."""
    image_encoder: Path | None = field(default=None, kw_only=True)
    """Image encoder: a `.pth` or `.safetensors` file or a folder, or None if it is missing."""
    tiny_vae: Path | None = field(default=None, kw_only=True)
    """TAEHV file, or None if it is missing."""

    @classmethod
    def of_folder(cls, root: Path, transformer: Path, **own: Any) -> Self:
        """Locate the components in `root` and return the layout. `own` contains the family's
        additional fields.
        """
        return cls(
            root=root,
            transformer=transformer,
            **find_components(root, cls.vae_release),
            tiny_vae=find_tiny_vae(root, cls.vae_release),
            **own,
        )

    def release(self) -> str:
        """Return this checkpoint's name for `vllm-omni download`."""
        return self.download_name

    def require(self, *components: Component) -> None:
        """Raise ValueError with a one-line message if any of the given components or its weights
        are missing.
        """
        missing = [part for part in components if not self._present(part)]
        if missing:
            places = component_places(self.vae_release)
            buffers = {part: places.get(part, ("*.safetensors",)) for part in missing}
            wanted = "; ".join(f"{part}: {' or '.join(names)}" for part, names in buffers.items())
            raise ValueError(
                f"{self.root} lacks {', '.join(missing)} (looked for {wanted}; also below "
                f"{ASSETS_FOLDER}/, which may "
                "be a link to another checkpoint); complete it with `vllm-omni download "
                f"{self.release()} {self.root}` "
                "or start with --load-format dummy"
            )

    def open_transformer(self) -> TensorSource:
        return open_tensors(self.transformer)

    def check_transformer(self, expected: Mapping[str, Shape], rules: Rules = ()) -> None:
        """Raise ValueError if the transformer's tensors, renamed by `rules`, do not have the
        expected names and shapes.
        """
        found = {
            rename(name, rules): shape for name, shape in self.open_transformer().shapes.items()
        }
        check_shapes(found, expected, str(self.transformer))

    def _present(self, part: Component) -> bool:
        buffers: dict[Component, Path | None] = {
            "transformer": self.transformer,
            "vae": self.vae,
            "text_encoder": self.text_encoder,
            "tokenizer": self.tokenizer,
            "image_encoder": self.image_encoder,
        }
        position = buffers[part]
        if position is None or not position.is_dir():
            return position is not None
        return any(position.glob("tokenizer*.json" if part == "tokenizer" else "*.safetensors"))

    def vae_config(self) -> VAEConfig:
        """Return the VAE's architecture, read from its config or, failing that, derived from the
        tensor shapes in its weight file. Return the released architecture if neither source is
        available.
        """
        if self.vae is not None and (self.vae / "config.json").exists():
            return VAEConfig.from_dict(read_json(self.vae / "config.json"))
        released = WAN_2_2_VAE if self.vae_release == "2.2" else VAEConfig()
        if self.vae is None or self.vae.is_dir():
            return released
        shapes = StoredShapes(self.vae, VAE_RULES)
        base_dim = shapes["encoder.conv_in.weight"][0]
        decoder_base_dim = shapes["decoder.norm_out.gamma"][0]
        return replace(
            released,
            base_dim=base_dim,
            decoder_base_dim=None if decoder_base_dim == base_dim else decoder_base_dim,
            z_dim=shapes["post_quant_conv.weight"][0],
        )

    def text_config(self) -> dict[str, Any]:
        """Return the text encoder's `UMT5Config` values, read from its config or, failing that,
        derived from the tensor shapes in its weight file. Return the released values if neither
        source is available.
        """
        if stated := stated_text(self.text_encoder):
            return stated
        if self.text_encoder is None or self.text_encoder.is_dir():
            return dict(UMT5_XXL)
        attention = "encoder.block.0.layer.0.SelfAttention"
        shapes = StoredShapes(self.text_encoder, TEXT_RULES)
        vocab_size, d_model = shapes["shared.weight"]
        num_heads = shapes[f"{attention}.relative_attention_bias.weight"][1]
        return {
            **UMT5_XXL,
            "vocab_size": vocab_size,
            "d_model": d_model,
            "d_kv": shapes[f"{attention}.q.weight"][0] // num_heads,
            "d_ff": shapes["encoder.block.0.layer.1.DenseReluDense.wo.weight"][1],
            "num_layers": sum(name.endswith(".SelfAttention.q.weight") for name in shapes),
            "num_heads": num_heads,
        }

    def clip_config(self) -> dict[str, Any]:
        """Return the image encoder's `CLIPVisionConfig` values, read from its config or, failing
        that, derived from the tensor shapes in its weight file. Return the released values if
        neither source is available.
        """
        path = self.image_encoder
        if path is not None and (path / "config.json").exists():
            stated = read_json(path / "config.json")
            return {
                key: stated.get("vision_config", stated).get(key, value)
                for key, value in CLIP_VIT_H.items()
            }
        if path is None or path.is_dir():
            return dict(CLIP_VIT_H)
        shapes = StoredShapes(path, CLIP_RULES)
        dim, _, patch, _ = shapes["embeddings.patch_embedding.weight"]
        *_, positions, _ = shapes["embeddings.position_embedding.weight"]
        return {
            **CLIP_VIT_H,
            "hidden_size": dim,
            "intermediate_size": shapes["encoder.layers.0.mlp.fc1.weight"][0],
            "num_hidden_layers": sum(
                fnmatchcase(name, "encoder.layers.*.mlp.fc1.weight") for name in shapes
            ),
            "num_attention_heads": max(1, dim // CLIP_HEAD_DIM),
            "image_size": patch * math.isqrt(positions - 1),
            "patch_size": patch,
        }

    def checked_vae(self, latent_channels: int) -> VAEConfig:
        """Return the architecture of the VAE.

        Raises:
            ValueError: The VAE does not match the transformer. The message is one line.
        """
        vae = self.vae_config()
        if vae.z_dim != latent_channels:
            raise ValueError(
                f"{self.root}: the VAE has {vae.z_dim} latent channels, the transformer "
                f"{latent_channels}"
            )
        return vae

    def checked_text(self, width: int) -> dict[str, Any]:
        return checked_text(self.text_config(), width, self.root)

    def checked_clip(self, rows: int, width: int) -> dict[str, Any]:
        clip = self.clip_config()
        given = clip_tokens(clip), clip["hidden_size"]
        if given != (rows, width):
            raise ValueError(
                f"{self.root}: the image encoder gives {given[0]} rows of {given[1]}, the "
                "transformer takes "
                f"{rows} of {width}; the two belong to different checkpoints"
            )
        return clip


def chunk_hf_config(
    architecture: str,
    name: str,
    layout: WanComponents,
    transformer: dict[str, Any],
    config: ChunkTransformerConfig,
    rules: Rules = (),
    *,
    context: Literal["umt5", "clip"] = "umt5",
    **info: str,
) -> dict[str, Any]:
    """Return the fields of vLLM's config object for a causal Wan model. The values have JSON types.

    In addition to the keys that vLLM reads, the result has a key given by `name`. That key's value
    contains the transformer's config as stored, the architectures of the VAE and the context
    encoder (under the keys that diffusers and transformers use), and the entries in `info`.

    Args:
        architecture: Name of the model class.
        name: Key for the family's own fields.
        layout: The checkpoint's components.
        transformer: The transformer's config as stored.
        config: The transformer's parsed config.
        rules: Rules that rename the stored tensors to their names in this package's transformer.
        context: Encoder that produces the embeddings for cross-attention.
        info: Additional entries under `name`.

    Raises:
        ValueError: The components are not compatible with each other.
    """
    if context == "umt5":
        encoder = layout.checked_text(config.text_dim)
    else:
        encoder = layout.checked_clip(config.text_len, config.text_dim)
    vae = layout.checked_vae(config.out_channels)
    return {
        **engine_fields(
            architecture,
            dim=config.dim,
            heads=config.num_heads,
            layers=config.num_layers,
            context=encoder,
        ),
        "dtype": str(transformer.get("dtype") or transformer.get("torch_dtype") or "bfloat16"),
        **quantization_of({"transformer": layout.transformer}, rules),
        name: {"transformer": transformer, "vae": vae.to_dict(), context: encoder, **info},
    }


def engine_fields(
    architecture: str, *, dim: int, heads: int, layers: int, context: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that vLLM reads from its config object. `context` is the text or image
    encoder's config.
    """
    return {
        "architectures": [architecture],
        "dtype": "bfloat16",
        "hidden_size": dim,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "vocab_size": context.get("vocab_size", 2),
        "max_position_embeddings": 16,
    }


def stated_text(encoder: Path | None) -> dict[str, Any]:
    """Return the `UMT5Config` values from a text encoder's `config.json`, or {} if that file does
    not exist.

    Raises:
        ValueError: The config describes another model.
    """
    if encoder is None or not (encoder / "config.json").exists():
        return {}
    config = read_json(encoder / "config.json")
    if config.get("model_type") != "umt5":
        raise ValueError(
            f"{encoder}/config.json has model_type {config.get('model_type')!r}, not 'umt5'"
        )
    return {
        key: value
        for key, value in config.items()
        if key not in ("dtype", "torch_dtype", "architectures")
    }


def checked_text(text: dict[str, Any], width: int, root: Path) -> dict[str, Any]:
    """Return `text` if its embeddings have the width that the transformer expects. Otherwise, raise
    ValueError with a one-line message.
    """
    if text["d_model"] != width:
        raise ValueError(
            f"{root}: the text encoder gives rows of {text['d_model']}, the transformer takes "
            f"{width}; the two belong to different checkpoints"
        )
    return text


def own_config(folder: Path) -> dict[str, Any]:
    """Return a folder's `config.json`, or {} if it does not exist or does not describe a
    network.
    """
    path = folder / "config.json"
    values = read_json(path) if path.is_file() else {}
    return {} if is_root_config(values) else values


def find_transformer(
    path: Path, names: Sequence[str], found: Callable[[Path], bool], model: str
) -> tuple[Path, Path]:
    """Return the transformer's folder and the components' folder.

    Args:
        path: The components' folder, or the transformer's folder inside it.
        names: Possible names of the transformer's folder in `path`, in order of preference.
        found: Function that returns whether a folder contains a transformer of this model.
        model: Model name in error messages.

    Raises:
        ValueError: `path` does not contain a transformer. The message is one line that states what
            was found and what was expected.
    """
    folder = next((path / name for name in names if found(path / name)), None)
    if folder is not None:
        return folder, path
    if not found(path):
        entries = (
            ", ".join(sorted(entry.name for entry in path.iterdir())[:8])
            if path.is_dir()
            else "no folder"
        )
        raise ValueError(
            f"{path} holds no {model} transformer (found {entries or 'nothing'}); expected one of "
            f"{', '.join(f'{name}/' for name in names)} with config.json or *.safetensors, or "
            "these files themselves"
        )
    return path, path.parent if has_components(path.parent) and not has_components(path) else path


def find_components(root: Path, release: VAERelease = "2.1") -> dict[str, Path | None]:
    """Return the path of each component in `component_places`, in `root` or its `assets/`, or None
    if the component is missing.
    """
    places = component_places(release)
    return {part: _own_or_shared(root, names) for part, names in places.items()}


def find_tiny_vae(root: Path, release: VAERelease = "2.1") -> Path | None:
    file = Path(TINY_VAE_FILES[release])
    return _own_or_shared(root, (file.name, file.with_suffix(".safetensors").name))


def check_tiny_vae(layout: WanComponents, wanted_by: str) -> None:
    """Check that a checkpoint contains the tiny decoder, which the `wanted_by` option requires.

    Raises:
        ValueError: The tiny decoder's file is missing.
    """
    if layout.tiny_vae is None:
        raise ValueError(
            f"{layout.root} lacks {TINY_VAE_FILES[layout.vae_release]}, which {wanted_by} needs "
            "(madebyollin/taehv)"
        )


def has_components(root: Path) -> bool:
    """Return whether `root` contains at least one Wan 2.1 or 2.2 component."""
    return any(
        position is not None
        for release in TINY_VAE_FILES
        for position in find_components(root, release).values()
    )


class StoredShapes(dict[str, Shape]):
    """The shapes of a file's tensors, keyed by the names that `rules` give them. Looking up a
    missing name raises ValueError.
    """

    def __init__(self, path: Path, rules: Rules) -> None:
        super().__init__(
            {rename(name, rules): shape for name, shape in open_tensors(path).shapes.items()}
        )
        self._path = path

    def __missing__(self, wanted: str) -> Shape:
        raise ValueError(
            f"{self._path} holds no tensor for {wanted}; it is not the file its name says, "
            "download it again"
        )


def _own_or_shared(root: Path, names: tuple[str, ...]) -> Path | None:
    return _first_target(root, names) or _first_target(root / ASSETS_FOLDER, names)


def _first_target(root: Path, names: tuple[str, ...]) -> Path | None:
    for name in names:
        position = root / name
        if position.is_dir():
            return position
        if position.is_file():
            return confined(position.parent, position.name)
    return None
