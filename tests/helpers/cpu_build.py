# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker must not be imported in a process that tests CUDA.

When it is imported, it replaces `torch.cuda`'s streams and events with placeholders. Later tests in
the same process would then fail, or pass without having waited for the GPU.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

import pytest
import torch

on_cpu = pytest.mark.skipif(
    torch.version.cuda is not None, reason="vLLM's CPU worker needs its CPU build"
)

_REPLACES_STREAMS = "vllm.v1.worker.cpu.shm"


class _Refused(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        if name == _REPLACES_STREAMS:
            raise ImportError(
                f"importing {name} replaces torch.cuda's streams and events: mark the test that "
                "imports vLLM's CPU worker with helpers.cpu_build.on_cpu, and import it inside the "
                "test"
            )


def refuse_cpu_worker() -> None:
    """Make an import of vLLM's CPU worker fail in this process."""
    sys.meta_path.insert(0, _Refused())
