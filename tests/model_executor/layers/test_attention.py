# SPDX-License-Identifier: Apache-2.0
"""Attention of one sequence."""

import pytest
import torch

from vllm_omni.model_executor.layers.attention import attention


def reference(q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("tnh,snh->nts", q_TNH.double(), k_SNH.double()) / q_TNH.shape[-1] ** 0.5
    return torch.einsum("nts,snh->tnh", scores.softmax(-1), v_SNH.double())


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (6, 24), (5, 1)])
def test_every_query_attends_to_every_key(queries: int, keys: int) -> None:
    """fp32 within 1e-5 of the definition evaluated in fp64."""
    torch.manual_seed(0)
    q, k, v = torch.randn(queries, 2, 16), torch.randn(keys, 2, 16), torch.randn(keys, 2, 16)
    torch.testing.assert_close(attention(q, k, v).double(), reference(q, k, v), atol=1e-5, rtol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_cuda_kernel_agrees_within_bf16() -> None:
    """Head size 128 as in the released model; 2e-2 is bf16's rounding of values around one."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 4, 128, dtype=torch.bfloat16, device="cuda") for n in (64, 192, 192))
    torch.testing.assert_close(attention(q, k, v).double(), reference(q, k, v), atol=2e-2, rtol=0)
