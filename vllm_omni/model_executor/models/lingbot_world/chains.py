# SPDX-License-Identifier: Apache-2.0
"""The one elementwise chain of LingBot-World that other Wan transformers do not have: the camera's injection.

Held by tests/model_executor/models/lingbot_world/test_lingbot_transformer.py.
"""

# x: the residual stream [..., T, D]

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from vllm_omni.model_executor.models.wan.chains import Chains


def after_self_attention(
    x: torch.Tensor,
    update: torch.Tensor,
    gate: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gated attention, inject the camera (factor * x + shift); returns (x, its affine LayerNorm)."""
    x = (x + gate * update.float()).to(x.dtype)
    x = (x * factor + shift).to(x.dtype)
    normed = functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps)
    return x, normed.to(weight.dtype)


@dataclass(frozen=True)
class LingBotChains(Chains):
    """Wan's chains with the camera's injection after self-attention."""

    after_self_attention: Callable[..., tuple[torch.Tensor, torch.Tensor]] = after_self_attention
