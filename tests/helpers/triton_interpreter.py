# SPDX-License-Identifier: Apache-2.0
"""Runs Triton kernels on a CPU in Triton's interpreter.

Triton decides how to compile kernels when it is imported, so the kernels run in another process.
That process is forked from the fork server of `rank_processes.py`, which has already imported the
libraries. It then imports Triton and the kernel modules again.
"""

import os
import platform
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from helpers.rank_processes import run_ranks


def require_triton() -> None:
    """Fail or skip the current test if Triton is not installed.

    On a machine for which Triton is available, the test fails, because skipping it would leave the
    kernels untested. On other machines, the test is skipped.
    """
    if find_spec("triton") is not None:
        return
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        pytest.fail(
            "Triton is missing, so no kernel was tested: run `make setup` or pip install -e "
            "'.[cpu,dev]'"
        )
    pytest.skip("the extra [cpu] has no Triton for this machine")


def interpret(work: Callable[..., None], *arguments: Any, size: int = 1) -> None:
    """Run `work(rank, *arguments)` in `size` processes with interpreted kernels.

    Args:
        work: Function in a module that does not import kernels at import time.

    Raises:
        The exception raised by the first failing rank.
    """
    require_triton()
    run_ranks(_interpreted, (work, arguments), size)


def with_carries(numbers: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return `numbers`, converted from e4m3, as a GPU would have rounded them.

    When it rounds a value just below a power of two, Triton's interpreter loses the carry, so the
    result is half of the `wanted` number. This happens to few numbers.
    """
    lost = (2 * numbers == wanted) & (wanted != 0)
    assert int(lost.sum()) <= 0.1 * lost.numel(), "more numbers than the interpreter halves"
    return torch.where(lost, wanted, numbers)


def _interpreted(rank: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    for name in list(sys.modules):
        # The extension module can be loaded only once per process.
        is_triton = name.partition(".")[0] == "triton" and not name.startswith("triton._C")
        if is_triton or (name.startswith("vllm_omni.") and hasattr(sys.modules[name], "triton")):
            del sys.modules[name]
            package, _, module = name.rpartition(".")
            if package in sys.modules:  # otherwise `from package import module` finds it
                vars(sys.modules[package]).pop(module, None)
    work(rank, *arguments)
