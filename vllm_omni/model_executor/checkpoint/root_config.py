# SPDX-License-Identifier: Apache-2.0
"""The `config.json` at the root of a checkpoint directory, by which `vllm serve DIR` without
further flags knows it.

vLLM looks for this file and reads its `model_type`; the types of this package are registered with
transformers (`registration.py`), and everything else is read from the directory itself, as by
`--config-format omni`. Released layouts have the file seldom, so the commands that write a
directory add it. Held by tests/model_executor/test_root_config.py.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

ROOT_CONFIG: Final = "config.json"
ROOT_MODEL_TYPE: Final = "omni_pipeline"
"""`model_type` in a file that this package wrote."""


def is_root_config(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` only says that the directory is one of this package's, and
    describes no network.
    """
    return values.get("model_type") == ROOT_MODEL_TYPE


def write_root_config(folder: Path) -> bool:
    """Let plain `vllm serve` find the model: add `model_type` to the directory's `config.json`, or
    write the file.

    Returns whether a file was written. One that states a type, or that is no JSON, is left as it
    is. Raises OSError when it cannot be written.
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
