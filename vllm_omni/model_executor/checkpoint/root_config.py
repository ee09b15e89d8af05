# SPDX-License-Identifier: Apache-2.0
"""Writes `config.json` at the root of a checkpoint directory, so that `vllm serve DIR` needs no
flags.

vLLM reads `model_type` from this file. `registration.py` registers this package's model types with
Hugging Face Transformers. Everything else is read from the components in the directory, as with
`--config-format omni`. Most released checkpoints lack this file, so the commands that create a
checkpoint directory add it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT_CONFIG: Final = "config.json"
ROOT_MODEL_TYPE: Final = "omni_pipeline"
"""Value of `model_type` in files written by this package."""


def is_root_config(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` only identifies the checkpoint directory and does not describe a
    network.
    """
    return values.get("model_type") == ROOT_MODEL_TYPE


def write_root_config(folder: Path) -> bool:
    """Add `model_type` to a directory's `config.json`, or create the file.

    A file that already contains `model_type` or is not JSON is left unchanged.

    Returns:
        Whether the file was written.

    Raises:
        OSError: The file cannot be written.
    """
    path = folder / ROOT_CONFIG
    try:
        values = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        return False
    if not folder.is_dir() or "model_type" in values:
        return False
    path.write_text(json.dumps({**values, "model_type": ROOT_MODEL_TYPE}, indent=2) + "\n")
    return True
