# SPDX-License-Identifier: Apache-2.0
"""Read the config, the voices, individual tensors and individual tensor rows from a Qwen2.5-Omni
checkpoint directory.

Tensors are not cached. Three engines and the process that connects them read the same 22 GB
checkpoint, and the connecting process needs only some rows of two embedding tables.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

MODEL_TYPE = "qwen2_5_omni"
THINKER_EMBEDDINGS = "thinker.model.embed_tokens.weight"
TALKER_EMBEDDINGS = "talker.model.embed_tokens.weight"
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SPEAKERS = "spk_dict.pt"


@dataclass(frozen=True)
class SpeakerVoice:
    """A voice: one entry of `spk_dict.pt`."""

    cond: torch.Tensor
    """Speaker embedding, fp32 [1, D]."""
    ref_mel: torch.Tensor
    """Mel spectrogram of the reference audio, fp32 [1, T, mel]."""
    bos_token: int
    """Token whose text embedding marks the start of speech in the talker's prompt."""


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory contains a Qwen2.5-Omni checkpoint. The check is cheap and never
    raises.
    """
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == MODEL_TYPE


def read_config(path: Path) -> dict[str, Any]:
    """Return the contents of `config.json`. Raises a one-line ValueError if the checkpoint does not
    support speech output.
    """
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    missing = [
        key for key in ("thinker_config", "talker_config", "token2wav_config") if key not in config
    ]
    if missing or not config.get("enable_audio_output", True):
        raise ValueError(
            f"{path} holds no speaking Qwen2.5-Omni: config.json lacks "
            f"{', '.join(missing) or 'audio output'}"
        )
    if not (path / _SPEAKERS).is_file():
        raise ValueError(f"{path} lacks {_SPEAKERS}, the voices")
    return config


def missing_files(path: Path) -> list[str]:
    """Return the names of missing weight files. The index lists the required files; without an
    index, one file is required.
    """
    index = path / _INDEX
    named = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.is_file()
        else [_SINGLE]
    )
    return [name for name in named if not (path / name).is_file()]


def stored_dtype(config: dict[str, Any]) -> str:
    """Return the dtype of the stored weights, for example `bfloat16`."""
    return str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix(
        "torch."
    )


def load_voices(path: Path) -> dict[str, SpeakerVoice]:
    """Read `spk_dict.pt` without executing pickled code."""
    stored = torch.load(path / _SPEAKERS, weights_only=True, map_location="cpu")
    return {
        name: SpeakerVoice(entry["cond"].float(), entry["ref_mel"].float(), int(entry["bos_token"]))
        for name, entry in stored.items()
    }


class CheckpointTensors:
    """The tensors in a directory's safetensors files, memory-mapped and read on access."""

    def __init__(self, path: Path) -> None:
        if (path / _INDEX).is_file():
            weight_map = json.loads((path / _INDEX).read_text())["weight_map"]
            self._files = {name: path / file for name, file in weight_map.items()}
        else:
            with safe_open(path / _SINGLE, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), path / _SINGLE)

    def below(self, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every tensor whose name starts with `prefix`, under its name without the prefix."""
        names_of: dict[Path, list[str]] = {}
        for name, file_path in self._files.items():
            if name.startswith(prefix):
                names_of.setdefault(file_path, []).append(name)
        for file_path, names in names_of.items():
            with safe_open(file_path, framework="pt") as file:
                for name in names:
                    yield name.removeprefix(prefix), file.get_tensor(name)

    def rows(self, name: str, indices: Sequence[int]) -> torch.Tensor:
        """Return the given rows of the matrix `name`, `[len(indices), width]`, in their stored
        dtype. Raises ValueError if that tensor does not exist.
        """
        if name not in self._files:
            raise ValueError(f"the checkpoint holds no tensor {name!r}")
        with safe_open(self._files[name], framework="pt") as file:
            matrix = file.get_slice(name)
            read = {index: matrix[index : index + 1] for index in sorted(set(indices))}
            width = matrix.get_shape()[1]
        return torch.cat([read[index] for index in indices]) if indices else torch.empty(0, width)
