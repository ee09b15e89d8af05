# SPDX-License-Identifier: Apache-2.0
"""`DiffusionGPUWorker` under the module path that other integrations name; it is the class for the platform at hand."""

from typing import Any

from vllm_omni import worker


def __getattr__(name: str) -> Any:
    if name != "DiffusionGPUWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return worker.DiffusionGPUWorker
