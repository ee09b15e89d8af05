# SPDX-License-Identifier: Apache-2.0
"""Provides `ARGPUWorker` at the module path that other integrations import.

The name resolves to the worker class for the current platform.
"""

from typing import Any

from vllm_omni import worker


def __getattr__(name: str) -> Any:
    if name != "ARGPUWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return worker.ARGPUWorker
