# SPDX-License-Identifier: Apache-2.0
"""Worlds shipped with the package. These worlds were trained with `training/` and are ordinary
checkpoints.
"""

from pathlib import Path

_REMEDY = "install vllm-worlds again, or in a clone run `git checkout -- vllm_omni/worlds`"


def village_checkpoint() -> Path:
    """Verify the files of the village, a small LingBot World, and return its checkpoint directory.

    Raises:
        ValueError: A file is missing or damaged. The message is one line and names the file.
    """
    from vllm_omni.worlds.manifest import MANIFEST, check_files

    folder = Path(__file__).parent / "village"
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder / MANIFEST} is missing; {_REMEDY}")
    check_files(folder, _REMEDY)
    return folder
