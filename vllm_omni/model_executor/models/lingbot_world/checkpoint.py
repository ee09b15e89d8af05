# SPDX-License-Identifier: Apache-2.0
"""Where the pieces of a LingBot World checkpoint are: the original folders, the v2 folder, the diffusers folders.

Only looks; `weights.py` loads. A piece that is missing is not an error until it is needed (`require`), so that an
engine with dummy weights starts from configs alone, and a stage that decodes nothing needs no VAE.
Held by tests/model_executor/models/lingbot_world/test_checkpoint.py.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.wan.checkpoint import (
    WanComponents,
    chunk_hf_config,
    find_components,
    find_tiny_vae,
    has_components,
)
from vllm_omni.model_executor.tensor_files import open_tensors, read_json

LAYOUTS = ("original", "diffusers", "v2")
"""The real layouts this file understands, by the names `make-tiny` takes."""

_FAST_FOLDERS = ("lingbot_world_fast", "Lingbot-World-Fast")
_TRANSFORMER_FOLDERS = (*_FAST_FOLDERS, "transformers", "transformer")
"""Original v1 under both names in use, original v2, diffusers."""

_CLASSES = ("WanModelFast", "CausalLingBotWorldTransformer3DModel", "LingBotWorldTransformer3DModel")
_NOT_FAST = ("high_noise_model", "low_noise_model")
"""The base model's experts: same keys, but not distilled and not causal."""


@dataclass(frozen=True)
class CheckpointLayout(WanComponents):
    """The pieces of one checkpoint; `transformer` is a folder of safetensors.

    kind: whose layout it is. version: the network generation (schedule defaults).
    """

    download_name: ClassVar[str] = "lingbot_world_fast"

    kind: Literal["original", "diffusers"]
    version: Literal["v1", "v2"]

    def transformer_config(self) -> dict[str, Any]:
        """Return the transformer's `config.json`; empty = the checkpoint has none, it is the released model."""
        path = self.transformer / "config.json"
        return read_json(path) if path.exists() else {}


def find_layout(path: Path) -> CheckpointLayout:
    """Find the pieces below (or, when `path` is the transformer's own folder, beside) `path`.

    Raises ValueError of one line that says what was found and what is looked for.
    """
    folder = next((path / name for name in _TRANSFORMER_FOLDERS if _is_transformer(path / name)), None)
    if folder is not None:
        root = path
    elif _is_transformer(path):
        folder, root = path, (path.parent if has_components(path.parent) else path)
    else:
        found = ", ".join(sorted(entry.name for entry in path.iterdir())[:8]) if path.is_dir() else "no folder"
        raise ValueError(
            f"{path} holds no LingBot World transformer (found {found or 'nothing'}); expected one of "
            f"{', '.join(f'{name}/' for name in _TRANSFORMER_FOLDERS)} with config.json or *.safetensors"
        )
    places = find_components(root)
    is_v2 = folder.name == "transformers" or "lingbot-world-v2" in str(path.resolve()).lower()
    return CheckpointLayout(
        root=root,
        kind="diffusers" if folder.name == "transformer" else "original",
        version="v2" if is_v2 else "v1",
        transformer=folder,
        vae=places["vae"],
        text_encoder=places["text_encoder"],
        tokenizer=places["tokenizer"],
        tiny_vae=find_tiny_vae(root),
    )


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a LingBot World checkpoint in any layout. Cheap, never raises."""
    try:
        find_layout(path)
    except (ValueError, OSError):
        return any((path / name).is_dir() for name in _FAST_FOLDERS)  # ours but damaged: let `hf_config` say how
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return `chunk_hf_config` of this checkpoint, with `kind` and `version`; needs no weight files. Raises ValueError.

    An empty `transformer` is the released model's.
    """
    layout = find_layout(path)
    transformer = layout.transformer_config()
    config = LingBotWorldConfig.from_checkpoint(transformer)
    facts = {"kind": layout.kind, "version": layout.version}
    return chunk_hf_config("LingBotWorldPipeline", "lingbot_world", layout, transformer, config, **facts)


def _is_transformer(folder: Path) -> bool:
    """Whether `folder` is a LingBot World transformer, by its config, else by its name and weight names."""
    if not folder.is_dir() or folder.name in _NOT_FAST:
        return False
    if (folder / "config.json").exists():
        config = read_json(folder / "config.json")
        return (
            config.get("_class_name") in _CLASSES
            or config.get("control_type") == "cam"
            or config.get("model_type") in ("lingbot_world_fast", "lingbot_world")
        )
    if not any(folder.glob("*.safetensors")):
        return False
    return folder.name in _FAST_FOLDERS or "patch_embedding_wancamctrl.weight" in open_tensors(folder).shapes
