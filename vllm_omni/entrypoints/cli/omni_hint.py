# SPDX-License-Identifier: Apache-2.0
"""A hint for `vllm serve my_world` without `--omni`, which fails with a traceback in stock vLLM.

vLLM calls `register()` before it reads the model directory. The hint is printed when the process
exits, because users would overlook a line above the traceback.
"""

import atexit
import functools
import json
import multiprocessing
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

_CHOSEN = ("--omni", "--worker-cls", "--worker_cls", "--config-format", "--config_format")
"""Flags that indicate that the user has already chosen how to serve the directory."""


@functools.cache
def hint_at_exit() -> None:
    """Register the hint to be printed at exit if this process runs `vllm serve` without `--omni`.
    Idempotent.
    """
    if multiprocessing.parent_process() is None and (hint := missing_omni(sys.argv)) is not None:
        atexit.register(print, hint, file=sys.stderr, flush=True)


def missing_omni(argv: Sequence[str]) -> str | None:
    """Return the hint for a command line, or None if `--omni` is not missing."""
    if len(argv) < 3 or Path(argv[0]).name != "vllm" or argv[1] != "serve":
        return None
    if any(argument.startswith(_CHOSEN) for argument in argv) or argv[2].startswith("-"):
        return None
    path = Path(argv[2])
    if not path.is_dir() or _is_stock(path):
        return None
    from vllm_omni.model_executor.models.registry import detect_family

    try:
        family = detect_family(path)
    except (ValueError, OSError):
        return None
    return (
        f"vllm_omni: {path} is a checkpoint of {family.name}; serve it with: vllm serve "
        f"{shlex.join(argv[2:])} --omni"
    )


def _is_stock(path: Path) -> bool:
    """Return whether `config.json` names architectures, none of which this package registers."""
    from vllm_omni.model_executor.models.registry import ARCHITECTURES

    try:
        names = json.loads((path / "config.json").read_text()).get("architectures") or []
    except (OSError, ValueError, AttributeError):
        return False
    return bool(names) and not ARCHITECTURES.keys() & set(names)
