# SPDX-License-Identifier: Apache-2.0
"""`triton` and `tl` for kernel files: Triton itself, or vLLM's placeholders if it is not installed.

With placeholders, a kernel file can be imported but its kernels cannot be called. Why not
`vllm.triton_utils`: it uses placeholders whenever there is no GPU, which also disables Triton's
interpreter, and the kernel tests run in that interpreter on CPUs.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    from vllm.triton_utils import tl, triton

__all__ = ["tl", "triton"]
