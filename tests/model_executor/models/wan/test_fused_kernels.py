# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels for fused ops are compared with the same ops in plain torch and fp32. On a
CPU, the kernels run in Triton's interpreter.
"""

from dataclasses import fields
from inspect import signature
from typing import Any

import pytest
import torch
from helpers.triton_interpreter import interpret, require_triton, with_carries

from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST
from vllm_omni.model_executor.layers.quantization.fp8_kernels import plain_quantize
from vllm_omni.model_executor.models.wan.transformer import fused_ops

ROWS, TOKENS, WIDTH, HEAD = 2, 5, 48, 8
EPS = 1e-6
Inputs = dict[str, torch.Tensor]


def random_inputs(dtype: torch.dtype, device: str) -> Inputs:
    """Return random inputs. `k` is a slice of a wider tensor, and each request's shift, scale and
    gate are slices of one tensor.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    qkv = random(ROWS, TOKENS, 3 * WIDTH, dtype=dtype)
    shift, scale, gate = random(ROWS, 3, WIDTH).unsqueeze(2).unbind(1)
    squares = random(ROWS, TOKENS, 2).abs() * WIDTH
    return {
        "x": random(ROWS, TOKENS, WIDTH) + 1,
        "update": random(ROWS, TOKENS, WIDTH, dtype=dtype),
        "factor": 1 + random(ROWS, TOKENS, WIDTH, dtype=dtype),
        "offset": random(ROWS, TOKENS, WIDTH, dtype=dtype),
        "weight": random(WIDTH, dtype=dtype),
        "bias": random(WIDTH, dtype=dtype),
        "k": qkv.chunk(3, dim=-1)[1],
        "cos": random(ROWS, TOKENS, HEAD // 2),
        "sin": random(ROWS, TOKENS, HEAD // 2),
        "squares_k": squares.split(1, dim=-1)[1],
    } | {"shift": shift, "scale": scale, "gate": gate}


def calls(i: Inputs, dtype: torch.dtype) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the names and arguments of calls to the ops. The calls have the residual stream in
    fp32 and in `dtype`, and modulation per request and per token.
    """
    per_token = [i[name].expand(i["x"].shape).contiguous() for name in ("shift", "scale", "gate")]
    found: list[tuple[str, tuple[Any, ...]]] = []
    for x in (i["x"], i["x"].to(dtype)):
        for shift, scale, gate in ((i["shift"], i["scale"], i["gate"]), per_token):
            found += [
                ("modulated_norm", (x, shift, scale, EPS, dtype)),
                ("after_self_attention", (x, i["update"], gate, i["weight"], i["bias"], EPS)),
                ("after_cross_attention", (x, i["update"], shift, scale, EPS)),
                ("after_ffn", (x, i["update"], gate, shift, scale, EPS, dtype)),
                ("gated_add", (x, i["update"], gate)),
            ]
        moved = (i["factor"][1], i["offset"][1])  # modulation of one row
        one = (x[1], i["update"][1], i["gate"][1], i["weight"], i["bias"], EPS, moved)
        found.append(("after_self_attention", one))
    found.append(("modulated_norm", (i["x"], i["shift"], i["scale"], EPS, torch.float32)))
    for squares in (None, i["squares_k"]):
        found.append(("rms_scale", (i["k"], squares, i["weight"], WIDTH, EPS)))
        found.append(("rms_rope", (i["k"], squares, i["weight"], i["cos"], i["sin"], WIDTH, EPS)))
    found.append(("rms_scale", (i["k"][0], None, i["weight"], WIDTH, EPS)))
    return found


def exact(name: str, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Return the plain op's results, computed in fp32."""

    def wide(arg: Any) -> Any:
        if isinstance(arg, tuple):
            return tuple(map(wide, arg))
        if isinstance(arg, torch.Tensor):
            return arg.float()
        return torch.float32 if isinstance(arg, torch.dtype) else arg

    result = getattr(fused_ops, name)(*map(wide, args))
    return result if isinstance(result, tuple) else (result,)


def check(kernels: Any, dtype: torch.dtype, device: str) -> int:
    """Check that relative errors are within two rounding errors of the dtype, and that dtypes and
    shapes equal those of the plain op.

    Return the number of calls.
    """
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    made = calls(random_inputs(dtype, device), dtype)
    for name, args in made:
        found, plain = getattr(kernels, name)(*args), getattr(fused_ops, name)(*args)
        if not isinstance(found, tuple):
            found, plain = (found,), (plain,)
        for result, wanted, like in zip(found, exact(name, args), plain, strict=True):
            assert (result.shape, result.dtype) == (
                like.shape,
                like.dtype,
            ) and result.is_contiguous(), name
            error = (result.float() - wanted).norm() / wanted.norm()
            assert error < tolerance, (name, error)
    return len(made)


def check_quantized(kernels: Any, dtype: torch.dtype, device: str) -> int:
    """Check that FP8 results equal those of the plain ops. All scales must be equal, and all values
    except a few on a rounding boundary.
    """
    i = random_inputs(dtype, device)
    i["x"][0, 0] = i["update"][0, 0] = 0  # a token of zeros
    x, update, modulation = i["x"], i["update"], (i["shift"], i["scale"])
    one = (
        x[1],
        update[1],
        i["gate"][1],
        i["weight"],
        i["bias"],
        EPS,
        (i["factor"][1], i["offset"][1]),
        True,
    )
    made: list[tuple[str, tuple[Any, ...]]] = [
        ("modulated_norm", (x, *modulation, EPS, dtype, True)),
        ("after_self_attention", (x, update, i["gate"], i["weight"], i["bias"], EPS, None, True)),
        ("after_self_attention", one),
        ("after_cross_attention", (x, update, *modulation, EPS, True)),
        ("after_ffn", (x, update, i["gate"], *modulation, EPS, dtype, True)),
        ("gelu_to_fp8", (update,)),
    ]
    for name, args in made:
        found, plain = getattr(kernels, name)(*args), getattr(fused_ops, name)(*args)
        if isinstance(found, tuple):
            assert torch.allclose(found[0], plain[0], rtol=1e-2, atol=1e-2), name
            found, plain = found[1], plain[1]
        assert (found.data.dtype, found.orig_dtype, found.orig_shape) == (
            FP8,
            dtype,
            plain.orig_shape,
        ), name
        assert torch.allclose(found.scale, plain.scale, rtol=1e-2), name
        numbers, wanted = found.data.float(), plain.data.float()
        if device == "cpu":
            numbers = with_carries(numbers, wanted)
        assert (numbers - wanted).norm() / wanted.norm() < 2e-2, name
        assert (found.data.float().abs().amax(-1) <= LARGEST).all(), name
    if device == "cuda":  # Triton's interpreter converts NaN to a number
        bad = i["update"].clone()
        bad[1, 2, 3] = torch.nan
        assert kernels.gelu_to_fp8(bad).data.float()[1, 2, 3].isnan(), "NaN stays NaN"
    return len(made)


def check_store(kernels: Any, dtype: torch.dtype, device: str) -> None:
    """Check that stored keys and values exactly equal those of `rms_rope` and `quantize`, and that
    the window's other tokens do not change.
    """
    i = random_inputs(dtype, device)
    k, v, turn = i["k"][1], i["update"][1], (i["cos"][1], i["sin"][1])
    heads = WIDTH // HEAD
    scales = torch.exp2(torch.arange(2.0 * heads, device=device) % 5 - 6).view(2, heads)
    for squares in (None, i["squares_k"][1]):
        keys = kernels.rms_rope(k, squares, i["weight"], *turn, WIDTH, EPS)
        values = v.unflatten(-1, keys.shape[-2:])
        for storage, own in ((dtype, None), (FP8, scales)):
            wanted = torch.zeros(2, TOKENS + 2, heads, HEAD, device=device).to(storage)
            found = wanted.clone()
            if own is None:
                wanted[:, 1:-1] = torch.stack((keys, values))
            else:
                for target, x, scales_N in zip(wanted[:, 1:-1], (keys, values), own, strict=True):
                    target.copy_(plain_quantize(x, scales_N))
            arguments = k, squares, i["weight"], *turn, WIDTH, EPS, v, found[:, 1:-1], own
            kernels.store_keys_values(*arguments)
            numbers, expected = found.float(), wanted.float()
            assert numbers[:, 1:-1].abs().amax() > 1 and not numbers[:, [0, -1]].any()
            if device == "cpu" and kernels is not fused_ops and own is not None:
                numbers = with_carries(numbers, expected)
                assert (numbers - expected).norm() / expected.norm() < 2e-2
            else:
                assert torch.equal(numbers, expected), (storage, squares is None)


@torch.inference_mode()
def interpreted(rank: int) -> None:
    from vllm_omni.model_executor.models.wan.transformer import fused_kernels

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert (
            check(fused_kernels, dtype, "cpu"),
            check_quantized(fused_kernels, dtype, "cpu"),
        ) == (
            28,
            6,
        )
        check_store(fused_kernels, dtype, "cpu")


def test_interpreted_kernels_equal_the_plain_ops() -> None:
    interpret(interpreted)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu_equal_the_plain_ops(dtype: torch.dtype) -> None:
    from vllm_omni.model_executor.models.wan.transformer import fused_kernels

    assert (check(fused_kernels, dtype, "cuda"), check_quantized(fused_kernels, dtype, "cuda")) == (
        28,
        6,
    )
    check_store(fused_kernels, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_plain_op_stores_its_results(dtype: torch.dtype) -> None:
    check_store(fused_ops, dtype, "cpu")


@pytest.mark.parametrize("storage", [torch.bfloat16, FP8])
def test_the_compiled_op_stores_the_same(storage: torch.dtype) -> None:
    """The compiled op stores the same values as the eager op. On a CPU, rounding to e4m3 runs
    outside the compiled code, because torch.compile does not support e4m3 there.
    """
    i = random_inputs(torch.bfloat16, "cpu")
    scales = None if storage is torch.bfloat16 else torch.full((2, WIDTH // HEAD), 0.25)
    stored = []
    for compiled in (False, True):
        stored.append(torch.zeros(2, TOKENS, WIDTH // HEAD, HEAD).to(storage))
        op = fused_ops.FusedOps.build(compiled).store_keys_values
        op(
            i["k"][1],
            None,
            i["weight"],
            i["cos"][1],
            i["sin"][1],
            WIDTH,
            EPS,
            i["update"][1],
            stored[-1],
            scales,
        )
    assert torch.equal(stored[0].float(), stored[1].float()) and stored[0].float().abs().amax() > 1


def test_wan_kernels_have_the_signatures_of_the_plain_ops() -> None:
    """Wan's kernels have the same signatures as the plain ops, because callers use the two
    interchangeably.
    """
    require_triton()
    from vllm_omni.model_executor.models.wan.transformer import fused_kernels

    names = {field.name for field in fields(fused_ops.FusedOps)}
    for kernel in fused_kernels.KERNELS:
        assert kernel.__name__ in names
        assert signature(kernel) == signature(getattr(fused_ops, kernel.__name__))
