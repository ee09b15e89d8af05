# SPDX-License-Identifier: Apache-2.0
"""Folders of golden tensors, whose files are stored compressed."""

import os
import shutil
from pathlib import Path

from vllm_omni.testing.parity.comparison import unpack_golden

_REPO = Path(__file__).parents[2]


def golden_folder(name: str) -> Path:
    """Return the folder `tests/golden/<name>` with its `*.xz` files decompressed.

    The decompressed files are in `build/golden`, which is shared by all processes and runs: one
    folder per version of the stored files.
    """
    source = _REPO / "tests" / "golden" / name
    version = max(path.stat().st_mtime_ns for path in source.iterdir())
    folder = _REPO / "build" / "golden" / f"{name}-{version}"
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        partial.mkdir(parents=True)
        unpack_golden(source, partial)
        try:
            partial.rename(folder)
        except OSError:  # another process was first
            shutil.rmtree(partial)
    return folder
