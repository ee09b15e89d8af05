# SPDX-License-Identifier: Apache-2.0
"""Where the pieces of a causal Wan checkpoint are: Self-Forcing, CausVid, StreamDiffusionV2, or diffusers folders.

In the original layouts a training checkpoint lies in a Wan 2.1 T2V directory, whose `config.json`, VAE, text encoder
and tokenizer it uses. Only looks; `weights.py` loads.
Held by tests/model_executor/models/causal_wan/test_causal_wan_weights.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from vllm_omni.model_executor.models.causal_wan.config import CLASSES, CausalWanConfig
from vllm_omni.model_executor.models.wan.checkpoint import (
    WanComponents,
    chunk_hf_config,
    find_components,
    find_tiny_vae,
)
from vllm_omni.model_executor.models.wan.transformer_weights import TRANSFORMER_RULES, stored_sizes
from vllm_omni.model_executor.tensor_files import TensorSource, open_tensors, read_json
from vllm_omni.model_executor.weights import rename

LAYOUTS = ("original", "diffusers", "stream_diffusion_v2")
"""The real layouts this file understands, by the names `make-tiny` takes."""

ORIGINAL_FILES = (
    "checkpoints/self_forcing_dmd.pt",
    "checkpoints/self_forcing_sid.pt",
    "self_forcing_dmd.pt",
    "autoregressive_checkpoint/model.pt",
    "wan_causal_dmd_v2v/model.pt",
    "wan_causal_dmd_v2v_14b/model.pt",
)
"""Self-Forcing (two places), CausVid, StreamDiffusionV2 (two sizes); the first that is there."""

STATE_KEYS = ("generator_ema", "generator", "state_dict")
"""Where a training checkpoint (`.pt`) keeps the network, best first; without any, the file is the network itself."""

_CAUSAL_CLASSES = CLASSES[:2]


@dataclass(frozen=True)
class CheckpointLayout(WanComponents):
    """The pieces of one checkpoint; `transformer` is a training checkpoint or a folder of safetensors."""

    download_name: ClassVar[str] = "causal_wan"

    kind: Literal["original", "diffusers"]

    def transformer_config(self) -> dict[str, Any]:
        """Return the transformer's config as stored, else as read off its weights' shapes."""
        folder = self.transformer if self.kind == "diffusers" else self.root
        if (folder / "config.json").exists():
            return read_json(folder / "config.json")
        return self._config_of_weights()

    def _config_of_weights(self) -> dict[str, Any]:
        shapes = {rename(name, TRANSFORMER_RULES): shape for name, shape in self._shapes().items()}
        return stored_sizes(shapes, str(self.transformer))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(open_transformer(self.transformer).shapes)


def find_layout(path: Path) -> CheckpointLayout:
    """Find the pieces below `path`. Raises ValueError of one line that names the pieces found and looked for."""
    kind: Literal["original", "diffusers"]
    if _is_causal_diffusers(path):
        kind, transformer = "diffusers", path / "transformer"
    elif (original := next((path / name for name in ORIGINAL_FILES if (path / name).is_file()), None)) is not None:
        kind, transformer = "original", original
    else:
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) if path.is_dir() else "no folder"
        raise ValueError(
            f"{path} holds no causal Wan transformer (found {found or 'nothing'}); expected one of "
            f"{', '.join(ORIGINAL_FILES)} or transformer/ with a config.json of class {' or '.join(_CAUSAL_CLASSES)}"
        )
    places = find_components(path)
    return CheckpointLayout(
        root=path,
        kind=kind,
        transformer=transformer,
        vae=places["vae"],
        text_encoder=places["text_encoder"],
        tokenizer=places["tokenizer"],
        tiny_vae=find_tiny_vae(path),
    )


def open_transformer(path: Path) -> TensorSource:
    """Open a folder of safetensors, one weight file, or a training checkpoint, of which the best state is taken."""
    return open_tensors(path, STATE_KEYS)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a causal Wan checkpoint in any layout. Cheap, never raises."""
    try:
        find_layout(path)
    except (ValueError, OSError):
        return False
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return `chunk_hf_config` of this checkpoint, with `kind`. Raises ValueError.

    Needs no weights but in a layout without a `config.json`, and then only their names.
    """
    layout = find_layout(path)
    transformer = layout.transformer_config()
    config = CausalWanConfig.from_checkpoint(transformer)
    return chunk_hf_config("CausalWanPipeline", "causal_wan", layout, transformer, config, kind=layout.kind)


def _is_causal_diffusers(path: Path) -> bool:
    """Whether `transformer/` is a causal Wan: by its own class, or by the pipeline's when it keeps the plain one."""
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
