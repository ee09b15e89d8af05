# SPDX-License-Identifier: Apache-2.0
"""Writes a training run's state to files that are small enough to copy back from a GPU host."""

import io
from pathlib import Path
from typing import Any

import torch

_PART_BYTES = 15_500_000
"""Maximum size of a state file, in bytes. Files copied back from a GPU host can be at most 16 MiB.
"""


def write_parts(state: Any, folder: Path, name: str = "state") -> list[Path]:
    """Write `state` to files `NAME-K.bin` of at most 15.5 MB, replacing older files."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for number, start in enumerate(range(0, len(data), _PART_BYTES)):
        path = folder / f"{name}-{number}.bin"
        path.write_bytes(data[start : start + _PART_BYTES])
        parts.append(path)
    for path in folder.glob(f"{name}-*.bin"):
        if path not in parts:
            path.unlink()
    return parts


def read_parts(folder: Path, name: str = "state") -> Any:
    """Read the state that `write_parts` wrote. Raises ValueError if there are no files."""
    parts = sorted(folder.glob(f"{name}-*.bin"), key=lambda path: int(path.stem.rsplit("-", 1)[1]))
    if not parts:
        raise ValueError(f"{folder} has no {name}-*.bin to go on from")
    data = b"".join(path.read_bytes() for path in parts)
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
