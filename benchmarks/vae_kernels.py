# SPDX-License-Identifier: Apache-2.0
"""Compare several implementations of the Wan VAE decoder's layers (`vae_candidates.py`) on one GPU.

    python benchmarks/vae_kernels.py --seconds 140 > vae_kernels.json

The weights are random, in bf16, and have the Wan 2.1 decoder's shapes. Frames are 480x832 pixels.
Each candidate is compared with plain arithmetic in fp32 before it is timed. Times are medians in
milliseconds. `vae_decode.py` measures the whole decoder as it runs in the server. On a CPU
(TRITON_INTERPRET=1, `--tiny`), the script checks the candidates at a tiny size, without timing
them.
"""

# T frames, H rows, W columns, P = H W pixels, C input channels, O output channels; activations are
# [T, H, W, C] in memory

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from kernel_timing import milliseconds
from torch.nn import functional
from vae_candidates import causal, conv_pointers, conv_tma, nchw, nhwc, rms_silu, stack

from vllm_omni.model_executor.models.wan.vae.stacked_frames import subpixel

START = time.monotonic()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RESULT: dict[str, Any] = {"errors": {}, "ms": {}, "failed": {}}


# Measuring
# --------------------------------------------------------------------------------------------------


def left() -> float:
    return SECONDS - (time.monotonic() - START)


def measure(name: str, run: Callable[[], Any], flop: float = 0.0, repeats: int = 7) -> None:
    if DEVICE != "cuda":
        return
    ms = milliseconds(run, repeats)
    RESULT["ms"][name] = {
        "ms": round(ms, 3),
        **({"tflops": round(flop / ms / 1e9)} if flop else {}),
    }
    print(
        f"{time.monotonic() - START:6.1f}s {name:60s} {ms:8.3f} ms {flop / ms / 1e9:6.0f} TFLOP/s",
        file=sys.stderr,
        flush=True,
    )


def error(name: str, out: torch.Tensor, reference: torch.Tensor, most: float = 2e-2) -> None:
    value = ((out.float() - reference.float()).norm() / reference.float().norm()).item()
    RESULT["errors"][name] = value
    print(
        f"{time.monotonic() - START:6.1f}s {name:60s} relative error {value:.2e}",
        file=sys.stderr,
        flush=True,
    )
    assert value < most, f"{name}: {value}"


def attempt(name: str, run: Callable[[], Any], needs_s: float = 3.0) -> None:
    if DEVICE == "cuda" and left() < needs_s:
        RESULT["failed"][name] = f"left out: {left():.0f} s left"
        return
    try:
        run()
    except Exception as failure:  # the failure is recorded as the result
        RESULT["failed"][name] = repr(failure)[:600]
        print(
            f"{name} FAILED",
            "".join(traceback.format_exception(failure)[-3:])[:1200],
            file=sys.stderr,
            flush=True,
        )
        if DEVICE == "cuda":
            torch.cuda.synchronize()


CONV_CONFIGS: dict[int, list[tuple[str, tuple[int, ...]]]] = {  # BH, BW, BN, BK, warps, stages
    96: [
        ("tma", (8, 16, 128, 32, 4, 5)),
        ("tma", (16, 16, 128, 32, 8, 4)),
        ("pointers", (8, 16, 128, 32, 4, 4)),
    ],
    192: [("tma", (8, 16, 256, 64, 8, 3)), ("tma", (16, 16, 64, 64, 8, 4))],
    384: [("tma", (8, 16, 128, 64, 8, 4))],
}


def convolutions(channels: int, frames: int, height: int, width: int) -> None:
    """Compare the candidates for one causal 3x3x3 convolution at one decoder level. Some rows also
    include the norm and SiLU before the convolution, as their names state.
    """
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    name = f"conv {channels}, {frames} frames"
    make = lambda *shape: torch.randn(shape, device=DEVICE).to(dtype)  # noqa: E731
    x = make(frames, height, width, channels)
    past = make(2, height, width, channels)
    w = (torch.randn(channels, channels, 3, 3, 3, device=DEVICE) / (27 * channels) ** 0.5).to(dtype)
    b, gamma = make(channels), make(channels).abs() + 0.5
    w3 = w.contiguous(memory_format=torch.channels_last_3d)
    w2 = w.transpose(1, 2).flatten(1, 2).contiguous(memory_format=torch.channels_last)
    taps = [w[:, :, t].contiguous(memory_format=torch.channels_last) for t in range(3)]
    w_KO = w.permute(2, 3, 4, 1, 0).reshape(27 * channels, channels).contiguous()
    x5, past5 = x.permute(3, 0, 1, 2)[None], past.permute(3, 0, 1, 2)[None]
    flop = 2.0 * 27 * channels * channels * frames * height * width
    crop = slice(0, min(height, 16))  # the fp32 reference needs only a few rows

    normed = rms_silu(x5, gamma)
    joined = torch.cat((past5, normed), dim=2)
    padded = functional.pad(joined, (1, 1, 1, 1, 0, 0)).contiguous(
        memory_format=torch.channels_last_3d
    )
    reference = functional.conv3d(
        functional.pad(joined[..., : crop.stop + 1, :].float(), (1, 1, 1, 0, 0, 0)),
        w.float(),
        b.float(),
    )
    if DEVICE == "cpu":
        reference = functional.conv3d(functional.pad(joined, (1, 1, 1, 1, 0, 0)), w, b)
    rows = reference.shape[3] - (1 if DEVICE == "cuda" else 0)
    reference = reference[0, :, :, :rows].permute(1, 2, 3, 0)
    plain = lambda: causal(rms_silu(x5, gamma), past5, w3, b)  # noqa: E731

    def cudnn_3d():
        error(
            f"{name}/conv3d",
            functional.conv3d(padded, w3, b)[0].permute(1, 2, 3, 0)[:, :rows],
            reference,
        )
        measure(
            f"{name}/conv3d, padded input, no bias",
            lambda: functional.conv3d(padded, w3, None),
            flop,
        )
        measure(f"{name}/norm+silu+cat+pad+conv3d eager", plain, flop)

    ready, _, _ = stack(x, past, gamma=gamma)
    flat, _, _ = stack(x, past, gamma=gamma, slots=1)

    def one_2d():
        out = nhwc(functional.conv2d(nchw(ready), w2, b, padding=1))
        error(f"{name}/2-D of 3C", out[:, :rows], reference)
        measure(
            f"{name}/2-D of 3C, conv alone, no bias",
            lambda: functional.conv2d(nchw(ready), w2, None, padding=1),
            flop,
        )
        measure(
            f"{name}/2-D of 3C, conv alone, bias",
            lambda: functional.conv2d(nchw(ready), w2, b, padding=1),
            flop,
        )

    def three_2d():
        def run():
            out = functional.conv2d(nchw(flat[:-2]), taps[0], b, padding=1)
            out += functional.conv2d(nchw(flat[1:-1]), taps[1], None, padding=1)
            return out.add_(functional.conv2d(nchw(flat[2:]), taps[2], None, padding=1))

        error(f"{name}/three 2-D", nhwc(run())[:, :rows], reference)
        measure(f"{name}/three 2-D accumulated", run, flop)

    def norms():
        for block, warps in ((2048, 4), (4096, 8), (4096, 4), (8192, 8)):
            measure(
                f"{name}/stack 3C block {block} warps {warps}",
                partial(stack, x, past, gamma=gamma, block=block, warps=warps),
            )
        measure(
            f"{name}/stack 3C + bias + residual + sum",
            lambda: stack(x, past, gamma=gamma, bias=b, residual=x, want_sum=True),
        )
        measure(f"{name}/norm into one buffer, 1C", lambda: stack(x, past, gamma=gamma, slots=1))

    attempt(f"{name}/2-D", one_2d)
    attempt(f"{name}/conv3d", cudnn_3d)
    attempt(f"{name}/norms", norms)
    attempt(f"{name}/three 2-D", three_2d)
    tiny = (4, 4, 16, 16, 4, 2)
    for kind, config in (
        CONV_CONFIGS[channels] if DEVICE == "cuda" else [("tma", tiny), ("pointers", tiny)]
    ):
        run = {"tma": conv_tma, "pointers": conv_pointers}[kind]

        def one(run=run, config=config, kind=kind):
            error(f"{name}/triton {kind} {config}", run(flat, w_KO, b, config)[:, :rows], reference)
            measure(f"{name}/triton {kind} {config}", lambda: run(flat, w_KO, b, config), flop)

        attempt(f"{name}/triton {kind} {config}", one, 12)


def upsampling(channels: int, frames: int, height: int, width: int) -> None:
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    x = torch.randn(frames, height, width, channels, device=DEVICE).to(dtype)
    w = (torch.randn(channels // 2, channels, 3, 3, device=DEVICE) / (9 * channels) ** 0.5).to(
        dtype
    )
    w_last, w_sub = (v.contiguous(memory_format=torch.channels_last) for v in (w, subpixel(w)))
    nearest = lambda: functional.interpolate(nchw(x), scale_factor=2, mode="nearest-exact")  # noqa: E731
    plain = lambda: functional.conv2d(nearest(), w_last, padding=1)  # noqa: E731
    cells = lambda: functional.conv2d(nchw(x), w_sub, padding=1)  # noqa: E731
    past = torch.zeros(2, 2 * height, 2 * width, channels // 2, device=DEVICE, dtype=dtype)
    name = f"upsample {channels}"

    def run():
        reference = functional.conv2d(nearest()[:1].float(), w.float(), padding=1)
        error(
            f"{name}/2x2",
            nchw(stack(nhwc(cells()), past, want_sum=True, shuffled=True)[2])[:1],
            reference,
        )
        flop = 2.0 * 9 * channels * channels // 2 * frames * 4 * height * width
        measure(f"{name}/nearest alone", nearest)
        measure(f"{name}/nearest + 3x3", plain, flop)
        measure(f"{name}/one 2x2 of 4 O", cells, flop)
        ready = nhwc(cells())
        gamma = torch.ones(channels // 2, device=DEVICE, dtype=dtype)
        more = {"gamma": gamma, "want_sum": True, "shuffled": True}
        measure(f"{name}/stack 3C of 2x2 cells + sum", lambda: stack(ready, past, **more))

    attempt(name, run)


def main() -> None:
    global SECONDS
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--seconds", type=float, default=140.0, help="candidates that would end later are left out"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    SECONDS = options.seconds
    torch.manual_seed(0)
    RESULT["torch"], RESULT["triton"] = torch.__version__, triton.__version__
    if DEVICE == "cuda":
        RESULT["device"] = torch.cuda.get_device_name()
        RESULT["cudnn"] = torch.backends.cudnn.version()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    with torch.no_grad():
        if options.tiny:
            convolutions(16, 2, 6, 7)
            upsampling(16, 2, 3, 5)
        else:
            upsampling(192, 4, 240, 416)
            upsampling(384, 4, 120, 208)
            torch.backends.cudnn.benchmark = True
            for channels, frames, height, width in (
                (96, 4, 480, 832),
                (192, 4, 240, 416),
                (384, 2, 120, 208),
            ):
                attempt(
                    f"convolutions {channels}",
                    partial(convolutions, channels, frames, height, width),
                )
            attempt("convolutions 384, one frame", lambda: convolutions(384, 1, 60, 104), 55)
    RESULT["seconds"] = round(time.monotonic() - START, 1)
    print(json.dumps(RESULT, indent=1))


SECONDS = 140.0
if __name__ == "__main__":
    main()
