# SPDX-License-Identifier: Apache-2.0
"""The decoder's Triton kernels are compared with its fused ops in plain torch and fp32. On a CPU,
the kernels run in Triton's interpreter.
"""

from dataclasses import fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.quantized_layers import of_rounded_weight
from helpers.triton_interpreter import interpret, require_triton, with_carries
from lance_driver import load_lance, request_of, run

from vllm_omni.model_executor.layers.linear.quantized_input import takes_quantized
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST
from vllm_omni.model_executor.models.lance.network import fused_ops
from vllm_omni.model_executor.models.lance.network.transformer import ExpertLayer
from vllm_omni.testing.tiny.lance import make_tiny

TOKENS, WIDTH, HEAD, HEADS, KV_HEADS = 5, 48, 8, 3, 1
EPS = 1e-6
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TYPES = list(TOLERANCE)


def calls(dtype: torch.dtype, device: str) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the names and arguments of calls to the fused ops.

    Q, K and V are slices of one tensor. Calls without tokens launch no kernel.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, update, weight = random(TOKENS, WIDTH), random(TOKENS, WIDTH), random(WIDTH)
    qkv = random(TOKENS, (HEADS + 2 * KV_HEADS) * HEAD)
    turn = [random(TOKENS, HEAD // 2, dtype=torch.float32) for _ in range(2)]
    queries = qkv.unflatten(-1, (-1, HEAD))[:, :HEADS]
    keys_values = qkv[:, HEADS * HEAD :]
    slots = (random(TOKENS, KV_HEADS, HEAD), random(TOKENS, KV_HEADS, HEAD))
    gate_up = random(TOKENS, 2 * 44)
    return [
        ("rms_norm", (x, weight, EPS)),
        ("add_norm", (x, update, weight, EPS)),
        ("norm_rope", (queries, random(HEAD), *turn, EPS)),
        ("store_key_value", (keys_values, *turn, random(HEAD), *slots, EPS)),
        ("silu_mul", (gate_up,)),
        ("silu_mul", (gate_up[:0],)),
        ("rms_norm", (x[:0], weight, EPS)),
    ]


def results_of(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an op's results, including the tensors that it writes in place."""
    if op.__name__ == "store_key_value":
        *inputs, keys, values, eps = args
        written = keys.clone(), values.clone()
        op(*inputs, *written, eps)
        return written
    result = op(*args)
    return result if isinstance(result, tuple) else (result,)


def check(kernels: Any, dtype: torch.dtype, device: str) -> int:
    made = calls(dtype, device)
    for name, args in made:
        plain_op = getattr(fused_ops, name)
        wide = [arg.float() if isinstance(arg, torch.Tensor) else arg for arg in args]
        found, plain, exact = (
            results_of(getattr(kernels, name), args),
            results_of(plain_op, args),
            results_of(plain_op, tuple(wide)),
        )
        for result, like, wanted in zip(found, plain, exact, strict=True):
            assert (result.shape, result.dtype) == (
                like.shape,
                like.dtype,
            ) and result.is_contiguous(), name
            error = (result.float() - wanted).norm() / wanted.norm().clamp(min=1e-9)
            assert error < TOLERANCE[dtype], (name, error)
    return len(made)


def check_quantized(kernels: Any, dtype: torch.dtype, device: str) -> int:
    """Check that FP8 results equal those of the plain ops. All scales must be equal, and all values
    except a few on a rounding boundary.
    """
    ops = ("rms_norm", "add_norm", "silu_mul")
    made = [(name, args) for name, args in calls(dtype, device) if name in ops and len(args[0])]
    for name, args in made:
        found, plain = (
            results_of(getattr(kernels, name), (*args, True)),
            results_of(getattr(fused_ops, name), (*args, True)),
        )
        assert all(
            torch.allclose(a, b, rtol=1e-2, atol=1e-2)
            for a, b in zip(found[:-1], plain[:-1], strict=True)
        )
        result, wanted = found[-1], plain[-1]
        assert (result.data.dtype, result.orig_dtype, result.orig_shape) == (
            FP8,
            dtype,
            wanted.orig_shape,
        ), name
        assert torch.allclose(result.scale, wanted.scale, rtol=1e-2), name
        numbers, others = result.data.float(), wanted.data.float()
        if device == "cpu":
            numbers = with_carries(numbers, others)
        assert (numbers - others).norm() / others.norm() < 2e-2, name
        assert (result.data.float().abs().amax(-1) == LARGEST).all() or device == "cpu", name
    return len(made)


@torch.inference_mode()
def interpreted(rank: int) -> None:
    from vllm_omni.model_executor.models.lance.network import fused_kernels

    for dtype in TYPES:
        assert (
            check(fused_kernels, dtype, "cpu"),
            check_quantized(fused_kernels, dtype, "cpu"),
        ) == (
            7,
            3,
        )


def test_interpreted_kernels_equal_the_plain_ops() -> None:
    interpret(interpreted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", TYPES)
def test_kernels_on_a_gpu_equal_the_plain_ops(dtype: torch.dtype) -> None:
    from vllm_omni.model_executor.models.lance.network import fused_kernels

    assert (check(fused_kernels, dtype, "cuda"), check_quantized(fused_kernels, dtype, "cuda")) == (
        7,
        3,
    )


def test_kernels_have_the_signatures_of_the_plain_ops() -> None:
    """Kernels have the same signatures as the plain ops, because callers use the two
    interchangeably.
    """
    require_triton()
    from vllm_omni.model_executor.models.lance.network import fused_kernels

    assert {kernel.__name__ for kernel in fused_kernels.KERNELS} == {
        field.name for field in fields(fused_ops.FusedOps)
    }
    for kernel in fused_kernels.KERNELS:
        assert signature(kernel) == signature(getattr(fused_ops, kernel.__name__))


def test_fused_ops_and_layers_quantize_inputs_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused ops quantize inputs exactly as layers do. The test uses an image edit, which has text,
    vision and reference contexts in addition to the generated blocks.
    """
    make_tiny(tmp_path, 0, "image")
    lance = load_lance(tmp_path)
    experts = [module for module in lance.network.modules() if isinstance(module, ExpertLayer)]
    for expert in experts:
        for layer in (expert.qkv, expert.out, expert.gate_up, expert.down):
            of_rounded_weight(layer)
    request = {"output": "latents"}
    assert experts and takes_quantized(experts[0].qkv)
    by_fused_ops = run(lance, request_of("image_edit", **request))[1]["latents"]
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert not takes_quantized(experts[0].qkv)
    by_layers = run(lance, request_of("image_edit", **request))[1]["latents"]
    torch.testing.assert_close(by_fused_ops, by_layers, atol=1e-4, rtol=0)
