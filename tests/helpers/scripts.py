# SPDX-License-Identifier: Apache-2.0
"""Imports scripts so that tests can call their functions."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_script(path: Path) -> ModuleType:
    """Return the script as a new module with a `__name__` other than `__main__`."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # `dataclass` looks up a class's module in `sys.modules`
    spec.loader.exec_module(module)
    return module
