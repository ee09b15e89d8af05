# SPDX-License-Identifier: Apache-2.0
"""`triton` and `tl` for kernel files: Triton itself, or vLLM's placeholders if Triton is missing.

With the placeholders, a kernel file can be imported, but its kernels cannot be called.
`vllm.triton_utils` is not used, because it installs placeholders whenever there is no GPU. These
placeholders also disable Triton's interpreter, in which the kernel tests run on CPUs.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING or find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:
    from vllm.triton_utils import tl, triton

__all__ = ["tl", "triton"]
