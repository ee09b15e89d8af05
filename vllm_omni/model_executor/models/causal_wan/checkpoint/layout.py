# SPDX-License-Identifier: Apache-2.0
"""Locate the components of a causal Wan checkpoint: a published release, any other training
checkpoint, or the diffusers folders.

In the original layouts, a training checkpoint is placed in a Wan 2.1 T2V directory and uses that
directory's `config.json`, VAE, text encoder and tokenizer. `releases.py` lists the published
training checkpoints. This module only locates files; `weights.py` loads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from vllm_omni.model_executor.checkpoint.loading import rename
from vllm_omni.model_executor.checkpoint.merged_lora import MergedSource
from vllm_omni.model_executor.checkpoint.root_config import is_root_config
from vllm_omni.model_executor.checkpoint.tensor_files import (
    TensorSource,
    open_tensors,
    read_json,
    unknown_state,
)
from vllm_omni.model_executor.models.causal_wan.checkpoint.releases import (
    LORA_KEYS,
    OTHER,
    RELEASES,
    STATE_KEYS,
    PublishedNetwork,
    find_release,
    find_unnamed,
)
from vllm_omni.model_executor.models.causal_wan.config import (
    CLASSES,
    CausalWanConfig,
    with_settings,
)
from vllm_omni.model_executor.models.wan.checkpoint.layout import (
    WanComponents,
    chunk_hf_config,
    has_components,
)
from vllm_omni.model_executor.models.wan.transformer.weights import TRANSFORMER_RULES, stored_sizes

LAYOUTS = ("original", "diffusers", "stream_diffusion_v2")
"""Names of the layouts that `make-tiny` can write. `releases.py` lists the releases that use the
`original` layout.
"""

_CAUSAL_CLASSES = CLASSES[:2]


@dataclass(frozen=True)
class CheckpointLayout(WanComponents):
    """The components of one checkpoint.

    `transformer` is the path of a training checkpoint or of a folder of safetensors files.
    """

    download_name: ClassVar[str] = "causal_wan"
    """Family name for `vllm-omni download`."""

    kind: Literal["original", "diffusers"]
    """Layout of the checkpoint's files."""
    origin: PublishedNetwork
    """The release that the checkpoint belongs to."""
    lora: Path | None
    """LoRA to merge into the transformer at load time. None: the release has no LoRA."""

    def release(self) -> str:
        return self.origin.download_name

    def transformer_config(self) -> dict[str, Any]:
        """Return the transformer's stored config, or a config derived from its weight shapes.

        The release's settings fill in missing keys.
        """
        folder = self.transformer if self.kind == "diffusers" else self.root
        stored = read_json(folder / "config.json") if (folder / "config.json").exists() else None
        if stored is None or is_root_config(stored):
            stored = self._config_of_weights()
        return with_settings(stored, self.origin.transformer)

    def _config_of_weights(self) -> dict[str, Any]:
        found = open_transformer(self.transformer, self.origin.state_keys).shapes
        shapes = {rename(name, TRANSFORMER_RULES): shape for name, shape in found.items()}
        return stored_sizes(shapes, str(self.transformer))

    def open_transformer(self) -> TensorSource:
        """Open the network and merge its LoRA, if it has one. Raises a one-line ValueError on
        failure.
        """
        network = open_transformer(self.transformer, self.origin.state_keys)
        if self.origin.loras and self.lora is None:
            positions = " or ".join(self.origin.loras)
            raise ValueError(
                f"{self.root} has {self.transformer.name} without its LoRA ({positions}), a part "
                f"of {self.release()}; "
                f"complete it with `vllm-omni download {self.release()} {self.root}`"
            )
        if self.lora is None:
            return network
        return MergedSource.of_base(network, open_tensors(self.lora, LORA_KEYS), TRANSFORMER_RULES)


def find_layout(path: Path) -> CheckpointLayout:
    """Locate the components in `path`.

    If `path` contains no causal Wan transformer, this function raises a one-line ValueError that
    states what it found and what it expected.
    """
    kind: Literal["original", "diffusers"] = "original"
    origin, lora = OTHER, None
    if _is_causal_diffusers(path):
        kind, transformer = "diffusers", path / "transformer"
    elif (found := find_release(path)) is not None:
        origin, transformer = found
        lora = origin.find_lora(path)
    elif (unnamed := find_unnamed(path)) is not None and (
        has_components(path) or why_not(path) is None
    ):
        transformer = unnamed
    else:
        entries = (
            ", ".join(sorted(entry.name for entry in path.iterdir())[:8])
            if path.is_dir()
            else "no folder"
        )
        files = ", ".join(name for release in RELEASES for name in release.files)
        raise ValueError(
            f"{path} holds no causal Wan transformer (found {entries or 'nothing'}); expected one "
            f"of {files}, a single "
            "other .pt beside Wan's VAE and text encoder, or transformer/ with a config.json "
            "of class "
            f"{' or '.join(_CAUSAL_CLASSES)}"
        )
    return CheckpointLayout.of_folder(path, transformer, kind=kind, origin=origin, lora=lora)


def open_transformer(path: Path, state_keys: Sequence[str] = STATE_KEYS) -> TensorSource:
    """Open a folder of safetensors files, one weight file, or the preferred state in a training
    checkpoint.

    Raises:
        ValueError: The file contains no Wan network. The message is one line that lists the known
            wrapper keys and the first keys found.
    """
    source = open_tensors(path, state_keys)
    if not any(
        rename(name, TRANSFORMER_RULES) == "patch_embedding.weight" for name in source.shapes
    ):
        raise unknown_state(path, source.shapes, state_keys)
    return source


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a causal Wan checkpoint in any layout. The check is cheap and never
    raises.
    """
    try:
        find_layout(path)
    except (ValueError, OSError):
        return False
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return the result of `chunk_hf_config` for this checkpoint, including its `kind` and
    `release`. Raises ValueError if the checkpoint is invalid.

    Weight files are read only in a layout without a `config.json`, and then only for the names and
    shapes of their tensors.
    """
    layout = find_layout(path)
    transformer = layout.transformer_config()
    config = CausalWanConfig.from_checkpoint(transformer)
    info: dict[str, Any] = {"kind": layout.kind, "release": layout.release()}
    return chunk_hf_config(
        "CausalWanPipeline", "causal_wan", layout, transformer, config, TRANSFORMER_RULES, **info
    )


def why_not(path: Path) -> str | None:
    """Return why a directory's only training checkpoint does not contain a Wan network. Return None
    if the checkpoint does contain a Wan network, or if the directory does not have exactly one
    training checkpoint.

    If the directory has no other components, only the checkpoint's tensors show whether the network
    is a Wan network.
    """
    try:
        if (unnamed := find_unnamed(path)) is not None:
            open_transformer(unnamed)
    except (ValueError, OSError) as error:
        return str(error)
    return None


def _is_causal_diffusers(path: Path) -> bool:
    """Return whether `transformer/` holds a causal Wan network, according to its class name. If
    that name is generic, the pipeline's class name decides.
    """
    if not (path / "transformer" / "config.json").is_file():
        return False
    name = read_json(path / "transformer" / "config.json").get("_class_name")
    if name in _CAUSAL_CLASSES:
        return True
    index = path / "model_index.json"
    if name not in CLASSES or not index.is_file():
        return False
    pipeline = str(read_json(index).get("_class_name"))
    return "Causal" in pipeline and "Wan" in pipeline
