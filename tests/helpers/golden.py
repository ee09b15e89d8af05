# SPDX-License-Identifier: Apache-2.0
"""Access to folders of golden tensors, some of which are stored as compressed files."""

import os
import shutil
from pathlib import Path

import pytest

from vllm_omni.testing.parity.comparison import unpack_golden

_REPO = Path(__file__).parents[2]


def shared_golden(name: str) -> Path:
    """Return the `name` folder of the complete recordings. The repository contains only some of the
    recordings.

    The complete recordings are in `$OMNI_GOLDEN` or, if this variable is not set, in
    `shared/golden` in one of the repository's parent folders. If they do not exist, the test is
    skipped.
    """
    places = [parent / "shared" / "golden" for parent in _REPO.parents]
    if set_to := os.environ.get("OMNI_GOLDEN"):
        places = [Path(set_to)]
    for place in places:
        if (place / name).is_dir():
            return place / name
    pytest.skip(f"the complete recordings of {name} are not here (OMNI_GOLDEN)")


def golden_folder(name: str) -> Path:
    """Return the `tests/golden/<name>` folder with its `*.xz` files decompressed.

    The decompressed files are stored in `build/golden`, in one folder per version of the compressed
    files. All processes and test runs share these folders.
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
        except OSError:  # another process has created the folder first
            shutil.rmtree(partial)
    return folder
