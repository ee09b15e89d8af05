# SPDX-License-Identifier: Apache-2.0
"""Locate the components of a LingBot World checkpoint.

The checkpoint can have the original, v2 or diffusers layout, or all files can be in one folder. If
the transformer has no `config.json`, its dimensions are derived from its weight files' headers.
This module only locates files; `weights.py` loads them. A missing component is an error only when
it is needed (`require`), so an engine with dummy weights can start from config files alone, and a
pipeline stage that does not decode needs no VAE.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.models.lingbot_world.config import (
    CONTROL_CHANNELS,
    LingBotWorldConfig,
    Version,
)
from vllm_omni.model_executor.models.lingbot_world.weights import CAMERA_TENSOR, config_of_tensors
from vllm_omni.model_executor.models.wan.checkpoint.layout import (
    WanComponents,
    chunk_hf_config,
    find_transformer,
    own_config,
)

LAYOUTS = ("original", "diffusers", "v2", "v2_1_3b", "v2_pretrain", "act", "world")
"""Names of the layouts that `make-tiny` can write. `world` is the demo world's layout."""

_FAST_FOLDERS = ("lingbot_world_fast", "Lingbot-World-Fast")
_PRETRAIN_FOLDER = "transformer_causal"
_TRANSFORMER_FOLDERS = (*_FAST_FOLDERS, "transformers", _PRETRAIN_FOLDER, "transformer")
"""Possible names of the transformer's folder: two for the original v1 layout, then one each for
original v2, v2 before distillation, and diffusers.
"""
_SINGLE_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_V1_WIDTH = LingBotWorldConfig.dim
_V2_NAME = "lingbot-world-v2"
"""Text that identifies a v2 model in a directory name; `_` and `-` are equivalent."""

_CLASSES = (
    "WanModelFast",
    "WanModelCausal",
    "CausalLingBotWorldTransformer3DModel",
    "LingBotWorldTransformer3DModel",
)
_NOT_FAST = ("high_noise_model", "low_noise_model")
"""Folders of the base model's two experts, which have the same tensor names but are neither
distilled nor causal.
"""


@dataclass(frozen=True)
class CheckpointLayout(WanComponents):
    """Paths of one checkpoint's components.

    `transformer` is a folder of safetensors files or one safetensors file.
    """

    download_name: ClassVar[str] = "lingbot_world_fast"
    """Name of the v1 release for `vllm-omni download`."""

    kind: Literal["original", "diffusers"]
    """Layout of the checkpoint's files."""
    version: Version
    """Network version, which determines the schedule defaults."""
    mode: Literal["fast", "pretrain"]
    """`fast` for the distilled model, `pretrain` for the model before distillation."""

    def release(self) -> str:
        if self.version == "v1":
            return self.download_name
        return (
            "lingbot_world_v2_14b_diffusers"
            if self.kind == "diffusers"
            else f"lingbot_world_{self._v2_release()}"
        )

    def _v2_release(self) -> str:
        return {"transformers": "v2_14b", _PRETRAIN_FOLDER: "v2_14b_pretrain"}.get(
            self.transformer.name, "v2_1_3b"
        )

    def transformer_config(self) -> dict[str, Any]:
        """Return the transformer's `config.json`. If it lacks some dimensions and there are weight
        files, these dimensions are derived from the tensor shapes.

        Raises:
            ValueError: The number of heads is unknown.
        """
        return _stated_config(self.transformer)


def find_layout(path: Path) -> CheckpointLayout:
    """Locate the components in `path`. If `path` is the transformer's folder, also look next to it.

    Raises:
        ValueError: `path` does not contain a transformer. The message is one line that states what
            was found and what was expected.
    """
    folder, root = find_transformer(path, _TRANSFORMER_FOLDERS, _is_transformer, "LingBot World")
    return CheckpointLayout.of_folder(
        root,
        _weights(folder, root),
        kind="diffusers" if folder.name == "transformer" else "original",
        version=_version(folder, path),
        mode="pretrain" if _is_pretrain(folder, path) else "fast",
    )


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a LingBot World checkpoint in any layout. The check is cheap and
    never raises.
    """
    try:
        find_layout(path)
    except (ValueError, OSError):
        # A damaged checkpoint is also attributed to this family, so that `hf_config` can report
        # what is wrong with it.
        return any((path / name).is_dir() for name in _FAST_FOLDERS)
    return True


def hf_config(path: Path) -> dict[str, Any]:
    """Return the result of `chunk_hf_config` for this checkpoint, including its `kind`, `version`
    and `mode`.

    No weight files are required. An empty `transformer` config stands for the released model's
    architecture.

    Raises:
        ValueError: The transformer is missing, or its config is invalid.
    """
    layout = find_layout(path)
    transformer = layout.transformer_config()
    config = LingBotWorldConfig.from_checkpoint(transformer)
    info: dict[str, Any] = {"kind": layout.kind, "version": layout.version, "mode": layout.mode}
    architecture = (
        "LingBotPretrainPipeline" if layout.mode == "pretrain" else "LingBotWorldPipeline"
    )
    return chunk_hf_config(architecture, "lingbot_world", layout, transformer, config, (), **info)


def _is_pretrain(folder: Path, path: Path) -> bool:
    """Return whether `folder`, a transformer folder under `path`, contains the v2 model before
    distillation.
    """
    named = folder.name == _PRETRAIN_FOLDER or "causal-pretrain" in str(
        path.resolve()
    ).lower().replace("_", "-")
    return named or own_config(folder).get("_class_name") == "WanModelCausal"


def _version(folder: Path, path: Path) -> Version:
    """Return the version of the model in `folder`, a transformer folder under `path`."""
    if folder.name in ("transformers", _PRETRAIN_FOLDER) or _V2_NAME in str(
        path.resolve()
    ).lower().replace("_", "-"):
        return "v2"
    if folder.name in _TRANSFORMER_FOLDERS:
        return "v1"
    # The folder names do not reveal the version. v1 was released with only one width, so any other
    # width means v2.
    values = _stated_config(folder)
    heads, head_dim = values.get("num_attention_heads", 0), values.get("attention_head_dim", 0)
    return "v2" if (values.get("dim") or heads * head_dim or _V1_WIDTH) != _V1_WIDTH else "v1"


def _weights(folder: Path, root: Path) -> Path:
    """Return the folder that contains the transformer's weights. If the transformer is at the root,
    next to the other components, return the path of its only weight file.
    """
    if folder == root and not any(folder.glob("*.safetensors.index.json")):
        return next((folder / name for name in _SINGLE_FILES if (folder / name).is_file()), folder)
    return folder


def _stated_config(transformer: Path) -> dict[str, Any]:
    folder = transformer if transformer.is_dir() else transformer.parent
    values = own_config(folder)
    if "num_layers" in values or not any(folder.glob("*.safetensors")):
        return values
    num_heads = values.get("num_heads", values.get("num_attention_heads"))
    return {
        **config_of_tensors(open_tensors(transformer).shapes, str(transformer), num_heads),
        **values,
    }


def _is_transformer(folder: Path) -> bool:
    """Return whether `folder` contains a LingBot World transformer. If the config identifies a
    model, the config decides. Otherwise, the folder's name and the tensor names decide.
    """
    if not folder.is_dir() or folder.name in _NOT_FAST:
        return False
    config = own_config(folder)
    if config.keys() & {"_class_name", "architectures", "control_type", "model_type"}:
        return (
            config.get("_class_name") in _CLASSES
            or config.get("control_type") in CONTROL_CHANNELS
            or config.get("model_type") in ("lingbot_world_fast", "lingbot_world")
        )
    if not any(folder.glob("*.safetensors")):
        return False
    return folder.name in _FAST_FOLDERS or CAMERA_TENSOR in open_tensors(folder).shapes
