# SPDX-License-Identifier: Apache-2.0
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Functions shared by the Triton kernels that run one program per token. This module requires
Triton.
"""

from vllm_omni.model_executor.layers.linear.quantized_input import LEAST_SCALE
from vllm_omni.model_executor.layers.quantization.e4m3 import LARGEST
from vllm_omni.model_executor.layers.triton_or_names import tl, triton

_LARGEST, _LEAST_SCALE = tl.constexpr(LARGEST), tl.constexpr(LEAST_SCALE)


@triton.jit
def over_largest(value, token_scale):
    """Store the scale that maps the token's largest magnitude to the e4m3 maximum, and return the
    values divided by the scale.

    The function divides only once per token, because the kernels took nearly twice as long with one
    division per value.
    """
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), axis=0), _LARGEST), _LEAST_SCALE)
    tl.store(token_scale, scale)
    return tl.clamp(
        value * tl.div_rn(1.0, scale), -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL
    )
