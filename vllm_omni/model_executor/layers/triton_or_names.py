# SPDX-License-Identifier: Apache-2.0
"""`triton` and `tl` for files of kernels: Triton itself, or vLLM's placeholders where it is not installed.

With placeholders such a file can be imported, its kernels cannot be called. vLLM's own `vllm.triton_utils` has
placeholders wherever no GPU is found, also for Triton's interpreter, by which kernels are tested on a CPU.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    from vllm.triton_utils import tl, triton

__all__ = ["tl", "triton"]
