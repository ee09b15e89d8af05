# SPDX-License-Identifier: Apache-2.0
"""Measure attention over FP8 keys and values, and the passes before and after it.

For each kernel, the error relative to fp32 is measured first, and then the time.

    python benchmarks/attention_kernels.py                 # one GPU, under 100 s
    # the same steps on a CPU, small and untimed
    python benchmarks/attention_kernels.py --tiny

The shapes are those of 480x832 chunks: the windows of LingBot World (18 latent frames) and causal
Wan 1.3B (21 latent frames), cross-attention to 512 text tokens, and the inputs of a LingBot block's
linear layers. Times are medians per call, measured with CUDA graphs that contain several calls, and
exclude the time that the host takes to launch kernels. Errors are relative, |found - fp32| /
|fp32|, and are computed for 256 of the queries. `flat` queries attend to all keys equally, and
`peaked` queries attend to a few keys. Candidates that this vLLM build or this GPU does not support
are listed in `failed`.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
sys.path.insert(0, str(Path(__file__).parent))
import torch
from common import add_output_arguments, save
from kernel_timing import BF16, CUDA, DEVICE, Results, relative, timed
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import vllm_omni.worker
from vllm_omni.model_executor.layers.attention.attention import (
    _cu_seqlens,
    _flash_attention,
    attention,
)
from vllm_omni.model_executor.layers.attention.fp8_attention import fp8_attention
from vllm_omni.model_executor.layers.quantization.e4m3 import FP8, LARGEST
from vllm_omni.model_executor.layers.quantization.fp8_kernels import (
    dequantize,
    plain_dequantize,
    plain_quantize,
    quantize,
)

assert vllm_omni.worker  # this import prepares torch for the CPU if there is no GPU

SAMPLE = 256
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Shape:
    """Shape of one attention call: the numbers of queries (`tokens`), keys and heads, and the
    channels per head (`width`).
    """

    name: str
    tokens: int
    keys: int
    heads: int
    width: int = 128

    @property
    def flop(self) -> float:
        return 4.0 * self.tokens * self.keys * self.heads * self.width


SHAPES = (
    Shape("lingbot self, full window", 4680, 28080, 40),
    Shape("lingbot self, first chunk", 4680, 4680, 40),
    Shape("lingbot self, 2 Ulysses ranks", 4680, 28080, 20),
    Shape("lingbot cross", 4680, 512, 40),
    Shape("causal wan 1.3b self", 4680, 32760, 12),
    Shape("causal wan 1.3b cross", 4680, 512, 12),
)
TINY = (Shape("tiny self", 60, 180, 3, 16), Shape("tiny cross", 60, 16, 3, 16))
WIDTHS = (5120, 13824)


def exactly(found: torch.Tensor, wanted: torch.Tensor) -> dict[str, Any]:
    """Return whether two tensors are bit-identical."""
    return {"bits_equal": bool(torch.equal(found.float(), wanted.float()))}


def exact_attention(q_TNH: torch.Tensor, k_SNH: torch.Tensor, v_SNH: torch.Tensor) -> torch.Tensor:
    """Compute attention in fp32, one head at a time."""
    heads = []
    for q, k, v in zip(q_TNH.unbind(1), k_SNH.unbind(1), v_SNH.unbind(1), strict=True):
        scores = q.float() @ k.float().T * q.shape[-1] ** -0.5
        heads.append(scores.softmax(-1) @ v.float())
    return torch.stack(heads, dim=1)


# FlashAttention 3 with FP8 matrix products. No K/V window uses it, because it is no faster than one
# dequantization pass followed by attention in bf16.


def quantize_queries(q_TNH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries in e4m3, and their scales in fp32. Shape of the scales: [1, N]."""
    scale_1N = torch.exp2(
        torch.ceil(torch.log2(q_TNH.abs().amax(dim=(0, 2)).float() / LARGEST))
    ).unsqueeze(0)
    quantized = torch.empty((1, *q_TNH.shape), dtype=FP8, device=q_TNH.device)
    quantize((q_TNH,), scale_1N, quantized)
    return quantized[0], scale_1N


def flash_fp8_attention(
    q_TNH: torch.Tensor, stored_2SNH: torch.Tensor, scales_3N: Tensors
) -> torch.Tensor:
    """Run FlashAttention 3 in FP8. `scales_3N` contains the scales of the queries, keys and values,
    each in fp32 with shape [1, N].
    """
    flash = _flash_attention(3)
    assert flash is not None
    q_scale, k_scale, v_scale = scales_3N
    return flash(
        q_TNH,
        *stored_2SNH,
        max_seqlen_q=len(q_TNH),
        cu_seqlens_q=_cu_seqlens(len(q_TNH), q_TNH.device),
        max_seqlen_k=stored_2SNH.shape[1],
        cu_seqlens_k=_cu_seqlens(stored_2SNH.shape[1], q_TNH.device),
        q_descale=q_scale,
        k_descale=k_scale,
        v_descale=v_scale,
    )


# Attention
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Queries, keys and values of one shape. `kv` contains the keys and values before quantization,
    in bf16. Its shape is [2, S, N, H].
    """

    q: torch.Tensor
    kv: torch.Tensor
    stored: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, shape: Shape, sharpness: float) -> "Case":
        torch.manual_seed(0)
        q = sharpness * torch.randn(shape.tokens, shape.heads, shape.width, device=DEVICE)
        kv = torch.randn(2, shape.keys, shape.heads, shape.width, device=DEVICE, dtype=BF16)
        largest_2N = kv.abs().amax(dim=(1, 3)).float()
        # An FP8 K/V window computes its scales in the same way.
        scales = torch.exp2(torch.ceil(torch.log2(largest_2N * (16 / 448))))
        stored = torch.empty(kv.shape, dtype=FP8, device=DEVICE)
        quantize((kv[0], kv[1]), scales, stored)
        return cls(q.to(BF16), kv, stored, scales)

    def fp8(self) -> torch.Tensor:
        return self.fp8_alone()()

    def fp8_alone(self) -> Callable[[], torch.Tensor]:
        quantized, q_scale = quantize_queries(self.q)
        return lambda: flash_fp8_attention(
            quantized, self.stored, (q_scale, self.scales[:1], self.scales[1:])
        )

    def widened(self) -> torch.Tensor:
        return attention(self.q, *dequantize(self.stored, self.scales, BF16))

    def plain(self) -> torch.Tensor:
        return attention(self.q, *plain_dequantize(self.stored, self.scales, BF16))

    def folded(self) -> torch.Tensor:
        k_scale, v_scale = self.scales.to(BF16).unsqueeze(-1)
        return attention(self.q * k_scale, *self.stored.to(BF16)) * v_scale

    def flash_4(self) -> torch.Tensor:
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        keys = self.kv.shape[1]
        out: torch.Tensor = flash_attn_varlen_func(
            self.q,
            *self.kv,
            max_seqlen_q=len(self.q),
            cu_seqlens_q=_cu_seqlens(len(self.q), self.q.device),
            max_seqlen_k=keys,
            cu_seqlens_k=_cu_seqlens(keys, self.q.device),
            fa_version=4,
        )
        return out

    def flashinfer(self) -> torch.Tensor:
        import flashinfer

        out: torch.Tensor = flashinfer.single_prefill_with_kv_cache(self.q, *self.kv)
        return out

    def torch_own(self) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (self.q, *self.kv))
        return functional.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1)

    def torch_cudnn(self) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return self.torch_own()

    def cudnn_fp8(self) -> torch.Tensor:
        out = fp8_attention(self.q, self.stored, self.scales)
        if out is None:
            raise RuntimeError("not offered for these sizes or this device")
        return out


Candidates = dict[str, Callable[[Case], torch.Tensor]]
OURS: Candidates = {
    "bf16 (FlashAttention 3 on Hopper)": lambda case: attention(case.q, *case.kv),
    "fp8 stored, plain widening + bf16": Case.plain,
    "fp8 stored, one-pass widening + bf16": Case.widened,
    "fp8 stored, scales folded + bf16": Case.folded,
    "fp8, queries rounded + product": Case.fp8,
    "fp8, cuDNN's product": Case.cudnn_fp8,
}
OTHERS: Candidates = {
    "bf16, torch's own": Case.torch_own,
    "bf16, torch's cuDNN": Case.torch_cudnn,
    "bf16, FlashAttention 4": Case.flash_4,
    "bf16, FlashInfer": Case.flashinfer,
}
"""Attention implementations from torch and other packages, for comparison. Some of these
implementations are compiled on their first call.
"""


def attentions(results: Results, shape: Shape, candidates: Candidates) -> None:
    flat, peaked = Case.of(shape, 1.0), Case.of(shape, 4.0)
    rows = torch.arange(0, shape.tokens, max(1, shape.tokens // SAMPLE), device=DEVICE)
    exact = [exact_attention(case.q[rows], *case.kv) for case in (flat, peaked)]

    def measured(run: Callable[[Case], torch.Tensor]) -> dict[str, Any]:
        errors = [
            relative(run(case)[rows], wanted)
            for case, wanted in zip((flat, peaked), exact, strict=True)
        ]
        named = dict(zip(("error_flat", "error_peaked"), errors, strict=True))
        return timed(lambda: run(flat), flop=shape.flop) | named

    for name, run in candidates.items():
        results.attempt(shape.name, name, partial(measured, run))
    if candidates is OURS:
        results.attempt(
            shape.name, "folded = widened", lambda: exactly(flat.folded(), flat.widened())
        )
    if candidates is OURS and CUDA:
        results.attempt(
            shape.name, "fp8, product alone", lambda: timed(flat.fp8_alone(), flop=shape.flop)
        )


# Passes over keys, values and queries
# -----------------------------------------------------------------------------


def passes(results: Results, shape: Shape) -> None:
    part, case = f"passes of {shape.name}", Case.of(shape, 1.0)
    numbers = case.stored.numel()
    plain = plain_dequantize(case.stored, case.scales, BF16)
    retained = torch.arange(shape.keys, device=DEVICE).roll(shape.keys // 3)

    def widened(run: Callable[[], torch.Tensor], wanted: torch.Tensor) -> dict[str, Any]:
        return exactly(run(), wanted) | timed(run, nbytes=3 * numbers)

    one_pass = torch.compile(plain_dequantize, dynamic=False) if CUDA else plain_dequantize
    candidates: dict[str, Callable[[], torch.Tensor]] = {
        "widen, plain": lambda: plain_dequantize(case.stored, case.scales, BF16),
        "widen, Triton": lambda: dequantize(case.stored, case.scales, BF16),
        "widen, compiled": lambda: one_pass(case.stored, case.scales, BF16),
        "convert alone": lambda: case.stored.to(BF16).mul_(1) if not CUDA else case.stored.to(BF16),
    }
    for name, run in candidates.items():
        results.attempt(part, name, partial(widened, run, plain))
    for name, gather in (("plain", plain_dequantize), ("Triton", dequantize)):
        run = partial(gather, case.stored, case.scales, BF16, retained)
        results.attempt(
            part, f"widen chosen tokens, {name}", partial(widened, run, plain[:, retained])
        )
    if CUDA:
        from vllm_omni.model_executor.layers.quantization import fp8_triton

        for rows in (16, 64, 128):
            run = partial(fp8_triton.dequantize, case.stored, case.scales, BF16, None, rows)
            results.attempt(part, f"widen, Triton, {rows} rows", partial(widened, run, plain))

    qkv = torch.randn(shape.tokens, 3, shape.heads, shape.width, device=DEVICE).to(BF16)
    _, k, v = qkv.unbind(1)
    target = case.stored[:, : shape.tokens]
    wanted = torch.stack(
        [plain_quantize(x, scale) for x, scale in zip((k, v), case.scales, strict=True)]
    )

    def stored(run: Callable[[], None]) -> dict[str, Any]:
        run()
        return exactly(target, wanted) | timed(run, nbytes=6 * k.numel())

    def plain_store() -> None:
        for x, scale, position in zip((k, v), case.scales, target, strict=True):
            position.copy_(plain_quantize(x, scale))

    results.attempt(part, "store k and v, plain", lambda: stored(plain_store))
    results.attempt(
        part, "store k and v, Triton", lambda: stored(lambda: quantize((k, v), case.scales, target))
    )

    def queries() -> dict[str, Any]:
        quantized, scale = quantize_queries(case.q)
        error = relative(quantized.float() * scale[0][:, None], case.q)
        return timed(lambda: quantize_queries(case.q), nbytes=5 * case.q.numel()) | {"error": error}

    results.attempt(part, "round queries", queries)


# Inputs of linear layers
# ------------------------------------------------------------------------------------------


def activations(results: Results, tokens: int, width: int) -> None:
    """Compare two implementations of quantization with one scale per token: vLLM's CUDA kernel, and
    the implementation that vLLM uses without `+quant_fp8`.
    """
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = torch.randn(tokens, width, device=DEVICE).to(BF16)

    def measured(custom_op: str) -> dict[str, Any]:
        compilation = CompilationConfig(custom_ops=["none", custom_op])
        with set_current_vllm_config(VllmConfig(compilation_config=compilation)):
            quantize = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN)
            quantized, scale = quantize(x)
            error = relative(quantized.float() * scale, x)
            return timed(lambda: quantize(x), nbytes=3 * x.numel()) | {"error": error}

    part = f"activations [{tokens}, {width}]"
    results.attempt(part, "vLLM's CUDA kernel", lambda: measured("+quant_fp8"))
    results.attempt(part, "vLLM's native version, compiled", lambda: measured("-quant_fp8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument(
        "--seconds", type=float, default=85.0, help="candidates that would begin later are left out"
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    results = Results(args.seconds, {}, {}, time.monotonic())
    shapes, widths = (TINY, (32,)) if args.tiny else (SHAPES, WIDTHS)
    with torch.inference_mode():
        passes(results, shapes[0])
        for width in widths:
            activations(results, shapes[0].tokens, width)
        for shape in shapes:
            attentions(results, shape, OURS)
        for shape in (shapes[0], shapes[-1]):
            attentions(results, shape, OTHERS)
    seconds = round(time.monotonic() - results.started, 1)
    save(
        "attention_kernels",
        {"seconds": seconds, "rows": results.rows, "failed": results.failed},
        args,
    )


if __name__ == "__main__":
    main()
