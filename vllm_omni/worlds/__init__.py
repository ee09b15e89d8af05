# SPDX-License-Identifier: Apache-2.0
"""Worlds that come with the package, trained by `training/`: checkpoint directories like any other.

Held by tests/worlds/test_shipped_world.py.
"""

from pathlib import Path

_REMEDY = "install vllm-omni again, or in a clone run `git checkout -- vllm_omni/worlds`"


def village_checkpoint() -> Path:
    """Return the directory of the village, a small LingBot World; its files are compared with their manifest first.

    Raises ValueError in one line that names a file which is missing or damaged.
    """
    from vllm_omni.worlds.manifest import MANIFEST, check_files

    folder = Path(__file__).parent / "village"
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder / MANIFEST} is missing; {_REMEDY}")
    check_files(folder, _REMEDY)
    return folder
