# SPDX-License-Identifier: Apache-2.0
"""Measure the error and time of the Wan family's fused pointwise ops, compiled and in Triton.

    python benchmarks/elementwise_kernels.py               # one GPU, under 60 s
    # the same steps on a CPU: errors of the plain ops only
    python benchmarks/elementwise_kernels.py --tiny

The shapes are those of LingBot World (5120 channels) and causal Wan 1.3B (1536 channels) with 4680
tokens at 480x832, in bf16 with the residual stream in fp32. q is a slice of the fused QKV product.
Times are medians per call, measured with CUDA graphs that contain several calls. Rates count each
input and result once. Errors are relative, |found - fp32| / |fp32|. The exit status is 1 if an
error exceeds `LARGEST_ERROR` or an op could not be timed.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
sys.path.insert(0, str(Path(__file__).parent))
import torch
from common import add_output_arguments, save
from kernel_timing import BF16, CUDA, DEVICE, Results, relative, timed
from torch.nn import functional

import vllm_omni.worker
from vllm_omni.model_executor.models.wan.transformer import fused_ops

assert vllm_omni.worker  # this import prepares torch for the CPU if there is no GPU

LARGEST_ERROR = 5e-3
"""Largest accepted relative error. Rounding normally distributed values to bf16 produces an error
of 1.7e-3, and sums of squares and norms in fp32 add little to it.
"""
WIDTHS = (5120, 1536)
TOKENS, HEAD, EPS = 4680, 128, 1e-6
SWEPT = ("after_self_attention with camera", "after_ffn", "rms_rope")
"""Fused ops that are timed with each number of warps, at the largest width."""
Call = tuple[str, tuple[Any, ...]]


def calls_of(tokens: int, width: int, head: int) -> dict[str, Call]:
    """Return a block's fused ops as label -> (name, arguments). The arguments are those of one rank
    without tensor parallelism.
    """
    torch.manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(1, *shape, device=DEVICE, dtype=torch.float32).to(dtype)

    x, update = random(tokens, width, dtype=torch.float32), random(tokens, width)
    shift, scale, gate = random(3, width, dtype=torch.float32).unsqueeze(2).unbind(1)
    weight, bias = random(width)[0], random(width)[0]
    moved = (1 + random(tokens, width), random(tokens, width))
    q = random(tokens, 3 * width).chunk(3, dim=-1)[0]
    angles = random(tokens, head // 2, dtype=torch.float32)
    return {
        "modulated_norm": ("modulated_norm", (x, shift, scale, EPS, BF16)),
        "after_self_attention": ("after_self_attention", (x, update, gate, weight, bias, EPS)),
        "after_self_attention with camera": (
            "after_self_attention",
            (x, update, gate, weight, bias, EPS, moved),
        ),
        "after_cross_attention": ("after_cross_attention", (x, update, shift, scale, EPS)),
        "after_ffn": ("after_ffn", (x, update, gate, shift, scale, EPS, BF16)),
        "gated_add": ("gated_add", (x, update, gate)),
        "rms_scale": ("rms_scale", (q, None, weight, width, EPS)),
        "rms_rope": ("rms_rope", (q, None, weight, angles.cos(), angles.sin(), width, EPS)),
    }


def flat(value: Any) -> list[torch.Tensor]:
    """Return all tensors in arguments or results as a flat list."""
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in flat(part)]
    return [value] if isinstance(value, torch.Tensor) else []


def wide(value: Any) -> Any:
    """Return the arguments with all tensors converted to fp32."""
    if isinstance(value, tuple):
        return tuple(map(wide, value))
    if isinstance(value, torch.Tensor):
        return value.float()
    return torch.float32 if isinstance(value, torch.dtype) else value


def measured(function: Callable[..., Any], name: str, args: tuple[Any, ...]) -> dict[str, Any]:
    found, exact = flat(function(*args)), flat(getattr(fused_ops, name)(*wide(args)))
    nbytes = sum(tensor.numel() * tensor.itemsize for tensor in [*flat(args), *found])
    errors = [relative(result, wanted) for result, wanted in zip(found, exact, strict=True)]
    del exact, found
    return timed(lambda: function(*args), nbytes=nbytes) | {"error": max(errors)}


def measure(results: Results, tokens: int, width: int, head: int) -> None:
    part, calls = f"[{tokens}, {width}]", calls_of(tokens, width, head)
    if not CUDA:
        for label, (name, args) in calls.items():
            results.attempt(
                part, f"{label}, plain", partial(measured, getattr(fused_ops, name), name, args)
            )
        return
    from vllm_omni.model_executor.models.wan.transformer import fused_kernels

    for label, (name, args) in calls.items():
        results.attempt(
            part, f"{label}, Triton", partial(measured, getattr(fused_kernels, name), name, args)
        )
    for label, (name, args) in calls.items():
        compiled = torch.compile(getattr(fused_ops, name), dynamic=False)
        results.attempt(part, f"{label}, compiled", partial(measured, compiled, name, args))


def other_passes(results: Results, tokens: int, width: int, ffn: int) -> None:
    """Measure how close two operations without kernels in this package, a plain copy and GELU, come
    to the GPU's memory bandwidth.
    """
    part = f"other passes of [{tokens}, {width}]"
    x, hidden = (torch.randn(tokens, size, device=DEVICE).to(BF16) for size in (width, ffn))
    copy, gelu = torch.empty_like(x), partial(functional.gelu, approximate="tanh")
    results.attempt(part, "copy", lambda: timed(lambda: copy.copy_(x), nbytes=4 * x.numel()))
    results.attempt(
        part, f"GELU of {ffn}", lambda: timed(lambda: gelu(hidden), nbytes=4 * hidden.numel())
    )


def warps(results: Results, tokens: int, width: int, head: int) -> None:
    from vllm_omni.model_executor.models.wan.transformer import fused_kernels

    calls, served = calls_of(tokens, width, head), fused_kernels.WARPS
    for count in (8, 16):
        fused_kernels.WARPS = count
        for label in SWEPT:
            name, args = calls[label]
            run = partial(measured, getattr(fused_kernels, name), name, args)
            results.attempt(f"{count} warps instead of {served}", label, run)
    fused_kernels.WARPS = served


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="candidates that would begin later are left out"
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    results = Results(args.seconds, {}, {}, time.monotonic())
    with torch.inference_mode():
        if args.tiny or not CUDA:
            measure(results, 60, 48, 16)
        else:
            other_passes(results, TOKENS, WIDTHS[0], 13824)
            for width in WIDTHS:
                measure(results, TOKENS, width, HEAD)
            warps(results, TOKENS, WIDTHS[0], HEAD)
    wrong = {
        f"{part}/{name}": row["error"]
        for part, rows in results.rows.items()
        for name, row in rows.items()
        if not row.get("error", 0.0) <= LARGEST_ERROR
    }
    seconds = round(time.monotonic() - results.started, 1)
    found = {"seconds": seconds, "rows": results.rows, "failed": results.failed, "wrong": wrong}
    save("elementwise_kernels", found, args)
    lacking = [name for name in results.failed if "Triton" in name]
    return 1 if wrong or lacking else 0


if __name__ == "__main__":
    sys.exit(main())
