# SPDX-License-Identifier: Apache-2.0
"""`ARGPUWorker` under the module path that other integrations name; it is the class for the platform at hand."""

from typing import Any

from vllm_omni import worker


def __getattr__(name: str) -> Any:
    if name != "ARGPUWorker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return worker.ARGPUWorker
