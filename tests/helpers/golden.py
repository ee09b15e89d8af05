# SPDX-License-Identifier: Apache-2.0
"""Folders of golden tensors, whose files are stored compressed."""

from pathlib import Path

from vllm_omni.testing.parity.comparison import unpack_golden

_REPO = Path(__file__).parents[2]


def golden_folder(name: str) -> Path:
    """Return the folder `tests/golden/<name>` with its `*.xz` files decompressed.

    The decompressed files are in `build/golden`, which is shared by all processes and runs.
    """
    folder = _REPO / "build" / "golden" / name
    unpack_golden(_REPO / "tests" / "golden" / name, folder)
    return folder
