# SPDX-License-Identifier: Apache-2.0
"""Tests of the decoder's compiled and plain fused ops, and of its position table. Other tests
compare the computed values with recorded tensors.
"""

from typing import Any

import pytest
import torch

from vllm_omni.model_executor.models.lance.network.fused_ops import FusedOps
from vllm_omni.model_executor.models.lance.network.transformer import LancePositionEmbedding3D


@pytest.mark.nightly
def test_compiled_ops_equal_plain_ones_for_any_number_of_tokens() -> None:
    """After its first call, a compiled op runs for any number of tokens without recompilation. It
    agrees with the plain op within 1e-5 in fp32.
    """
    plain, compiled = FusedOps(), FusedOps.build(compiled=True)
    torch.manual_seed(0)
    weight, q = torch.rand(32), torch.rand(16)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 40, 129):
            x, update = torch.randn(tokens, 32), torch.randn(tokens, 32)
            rotation = torch.randn(tokens, 8), torch.randn(tokens, 8)
            qkv = torch.randn(tokens, 8 * 16)
            cases: list[tuple[str, tuple[Any, ...]]] = [
                ("rms_norm", (x, weight, 1e-6)),
                ("add_norm", (x, update, weight, 1e-6)),
                ("norm_rope", (qkv.unflatten(-1, (8, 16))[:, :4], q, *rotation, 1e-6)),
                ("silu_mul", (qkv,)),
            ]
            for name, arguments in cases:
                torch.testing.assert_close(
                    getattr(compiled, name)(*arguments),
                    getattr(plain, name)(*arguments),
                    atol=1e-5,
                    rtol=0,
                )
            written = []
            for ops in (compiled, plain):
                slots = [torch.zeros(tokens + 3, 2, 16)[3:] for _ in "kv"]
                ops.store_key_value(qkv[:, 64:], *rotation, q, *slots, 1e-6)
                written.append(torch.cat(slots))
            assert bool((written[0] != 0).all())
            torch.testing.assert_close(*written, atol=1e-5, rtol=0)


def test_a_grid_outside_the_position_table_is_refused() -> None:
    table = LancePositionEmbedding3D(64, frames=2, size=4)
    with pytest.raises(ValueError, match="outside the table of 2 frames of 4x4"):
        table.rows(1, 5, 4)


def test_stored_and_computed_positions_agree() -> None:
    """The position table stored in the released checkpoints equals the table that this package
    computes.
    """
    computed = LancePositionEmbedding3D(64, frames=3, size=4)
    stored = LancePositionEmbedding3D(64, frames=3, size=4, stored=True)
    assert stored.pos_embed is not None
    stored.pos_embed.data.copy_(computed.rows(3, 4, 4))
    assert torch.equal(stored.rows(2, 3, 4), computed.rows(2, 3, 4))
