# SPDX-License-Identifier: Apache-2.0
"""Check and time the Wan VAE's decode, as it runs in the server (`StreamingWanVAE`), on one GPU.

The benchmark runs the decoder without an engine.

    python benchmarks/vae_decode.py
    python benchmarks/vae_decode.py --release 2.2    # at 704x1280, and the tiny decoder's times

The weights are random and in bf16. Frames are 480x832 pixels. The script first checks that the
fused decoder's error relative to fp32 is at most about 1.2 times the plain decoder's error. It then
checks that the results are bit-identical however a stream is split. It also checks streams that are
decoded together, two bands of rows (on two threads instead of two ranks), and a stream that
continues in the other decoder. Finally, the script measures the median time of decoding 12 frames
with the fused, the plain and the compiled plain decoder. It also times the fused decoder's kernels
and (for Wan 2.1) the fused decoder's operations next to alternatives. The exit status is 1 if a
check fails. On a CPU (`--height 48 --width 80 --base-dim 4`), the script runs the checks with the
kernels' plain versions, without timing them.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import add_output_arguments, save
from kernel_timing import milliseconds
from torch.nn import functional

from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE
from vllm_omni.model_executor.models.wan.vae import stacked_frames
from vllm_omni.model_executor.models.wan.vae.fused_decoder import FusedDecoder, fused_decoder
from vllm_omni.model_executor.models.wan.vae.fused_layers import FusedPasses, convolved_each
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.stacked_frames import FrameLayout, PendingSum
from vllm_omni.model_executor.models.wan.vae.tiny_vae import CHANNELS, TinyVAEDecoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAECache, VAEConfig
from vllm_omni.model_executor.models.wan.vae.winograd import OF_FRAMES, product_dtype
from vllm_omni.model_executor.models.wan.vae_layers import fold_memory, folded

START = time.monotonic()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
BAND_ERROR = 2e-2
"""Largest accepted relative error between two results that were rounded differently."""


def log(text: str) -> None:
    print(f"{time.monotonic() - START:6.1f}s {text}", file=sys.stderr, flush=True)


def relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((value.float() - expected.float()).norm() / expected.float().norm()).item())


def cache_error(cache: VAECache, expected: VAECache) -> float:
    return max(
        relative(own, wanted) for own, wanted in zip(cache.features, expected.features, strict=True)
    )


def fuse(decoder: Any, bands: RowBands | None) -> FusedDecoder | None:
    if DEVICE == "cuda":
        return fused_decoder(decoder, bands)
    return FusedDecoder(
        decoder, bands, FusedPasses(stacked_frames.stack_frames, stacked_frames.add_up)
    )


def config_of(release: str, base_dim: int | None) -> VAEConfig:
    """Return the released network's config, with `base_dim` as its width if it is not None."""
    config = WAN_2_2_VAE if release == "2.2" else VAEConfig()
    if base_dim is None:
        return config
    return replace(config, base_dim=base_dim, decoder_base_dim=None)


def build(
    config: VAEConfig,
    dtype: torch.dtype = DTYPE,
    *,
    fused: bool = False,
    bands: RowBands | None = None,
    **options: Any,
) -> StreamingWanVAE:
    """Return a decoder with random weights that depend only on `config`."""
    with torch.device(DEVICE):
        vae = StreamingWanVAE(
            config,
            encoder=False,
            dtype=dtype,
            bands=bands,
            fuse=fuse if fused else lambda *_: None,
            **options,
        )
    return with_random_weights(vae)


def with_random_weights(vae: StreamingWanVAE) -> StreamingWanVAE:
    """Set random weights, rounded to `DTYPE` so that they have the same values in every dtype."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in vae.named_parameters():
        scale = 0.6 / parameter[0].numel() ** 0.5 if parameter.dim() > 1 else 0.3
        values = torch.randn(parameter.shape, generator=generator) * scale + ("gamma" in name)
        parameter.data.copy_(values.to(DTYPE))
    return vae


def stream(config: VAEConfig, latents: int, height: int, width: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    cells = height // config.spatial_factor, width // config.spatial_factor
    return torch.randn(1, config.z_dim, latents, *cells, generator=generator).to(DEVICE)


def decode(
    vae: StreamingWanVAE, latents: torch.Tensor, cuts: list[int]
) -> tuple[torch.Tensor, VAECache]:
    pixels, cache = [], None
    for part in latents.split(cuts, dim=2):
        frames, cache = vae.decode(part, cache)
        pixels.append(frames)
    assert cache is not None
    return torch.cat(pixels, dim=2), cache


class ThreadBands(RowBands):
    """Row bands for ranks that are threads of this process, on one CUDA stream."""

    shared: list[torch.Tensor | None]
    barrier: threading.Barrier

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        self.shared[self.rank] = own
        self.barrier.wait(60)
        every = torch.cat([each for each in self.shared if each is not None])
        self.barrier.wait(60)
        return every


class LonelyBands(RowBands):
    """Row bands for the first of two ranks. Instead of the other rank's rows, this rank uses its
    own rows, so times can be measured without halo exchanges.
    """

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        return own.repeat(self.size, *[1] * (own.dim() - 1))


class Checks:
    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.failed: list[str] = []

    def error(self, name: str, value: float, most: float) -> None:
        self.values[name] = value
        log(f"{name:60s} relative error {value:.2e}, at most {most:.1e}")
        if not value <= most:
            self.failed.append(name)

    def true(self, name: str, value: bool) -> None:
        self.values[name] = value
        log(f"{name:60s} {value}")
        if not value:
            self.failed.append(name)


def check(args: argparse.Namespace, checks: Checks) -> None:
    size = args.height, args.width
    latents = stream(args.config, 3, *size)
    exact, plain, fused = (
        build(args.config, torch.float32),
        build(args.config),
        build(args.config, fused=True),
    )
    expected, expected_cache = decode(exact, latents, [1, 1, 1])
    plain_pixels, plain_cache = decode(plain, latents, [1, 1, 1])
    start = time.monotonic()
    pixels, cache = decode(fused, latents, [1, 1, 1])
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    checks.values["first fused decode, s"] = round(time.monotonic() - start, 2)
    checks.values["standard deviation of pixels"] = float(expected.std())
    error, error_of_cache = (
        relative(plain_pixels, expected),
        cache_error(plain_cache, expected_cache),
    )
    checks.error("plain against fp32", error, 5e-2)
    checks.error("plain against fp32, cache", error_of_cache, 5e-2)
    checks.error("fused against fp32", relative(pixels, expected), 1.2 * error + 1e-5)
    checks.error(
        "fused against fp32, cache", cache_error(cache, expected_cache), 1.2 * error_of_cache + 1e-5
    )
    for name, first, second in (("plain to fused", plain, fused), ("fused to plain", fused, plain)):
        started, left = first.decode(latents[:, :, :2], None)
        saved = VAECache(tuple(feature.cpu().contiguous().to(DEVICE) for feature in left.features))
        rest, _ = second.decode(latents[:, :, 2:], saved)
        checks.error(
            f"snapshot, {name}",
            relative(torch.cat((started, rest), dim=2), expected),
            1.2 * error + 1e-5,
        )
    del exact, expected_cache, plain_cache, plain
    longer = stream(args.config, 7, *size)
    whole, whole_cache = fused.decode(longer, None)
    for cuts in ([1, 3, 3], [1] * 7, [2, 4, 1]):
        pixels, cache = decode(fused, longer, cuts)
        checks.true(
            f"same bits in pieces of {cuts}",
            torch.equal(pixels, whole) and cache.equal(whole_cache),
        )


def check_bands(args: argparse.Namespace, checks: Checks) -> None:
    latents = stream(args.config, 3, args.height, args.width)
    whole, _ = decode(build(args.config, fused=True), latents, [1, 2])
    shared: list[torch.Tensor | None] = [None, None]
    barrier = threading.Barrier(2)
    parts: list[Any] = [None, None]

    def rank(index: int) -> None:
        bands = ThreadBands(index, 2, None)  # type: ignore[arg-type]
        bands.shared, bands.barrier = shared, barrier
        try:
            vae = build(args.config, fused=True, bands=bands)
            parts[index], _ = decode(vae, latents, [1, 2])
        except BaseException as failure:
            parts[index] = failure
            barrier.abort()
            raise

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if not all(isinstance(part, torch.Tensor) for part in parts):
        checks.true(f"two bands of rows: {parts}", False)
        return
    checks.error(
        "two bands of rows against whole frames",
        relative(torch.cat(parts, dim=3), whole),
        BAND_ERROR,
    )


def check_together(args: argparse.Namespace, checks: Checks, times: dict[str, Any]) -> None:
    fused = build(args.config, fused=True)
    sizes = [(3, 128, 160), (4, 192, 320)] if DEVICE == "cuda" else [(3, args.height, args.width)]
    for count, height, width in sizes:
        streams = [stream(args.config, 4, height, width, seed) for seed in range(count)]
        caches = [fused.decode(each[:, :, :1], None)[1] for each in streams]
        rest = [each[:, :, 1:] for each in streams]
        joined = torch.cat(rest)

        def together(joined: torch.Tensor = joined, caches: list[VAECache] = caches) -> Any:
            pixels, cache = fused.decode(joined, VAECache.joined(caches))
            return pixels, cache.of_streams()

        def each_alone(rest: list[torch.Tensor] = rest, caches: list[VAECache] = caches) -> Any:
            return [fused.decode(own, cache) for own, cache in zip(rest, caches, strict=True)]

        pixels, own = together()
        alone = each_alone()
        name = f"{count} streams of {height}x{width} together"
        checks.error(
            name,
            max(relative(a, b) for a, (b, _) in zip(pixels.split(1), alone, strict=True)),
            BAND_ERROR,
        )
        worst = max(cache_error(a, b) for a, (_, b) in zip(own, alone, strict=True))
        checks.error(f"{name}, caches", worst, BAND_ERROR)
        if DEVICE == "cuda":
            times[f"{name}, ms"] = milliseconds(together)
            times[f"{name}: each alone, ms"] = milliseconds(each_alone)


def time_decode(
    name: str,
    vae: StreamingWanVAE | TinyVAEDecoder,
    size: tuple[int, int],
    times: dict[str, Any],
    repeats: int = 7,
) -> Callable[[], Any]:
    """Measure the time of decoding 12 frames after a stream's first latent frame, and the decode's
    peak memory beyond the memory that was allocated before it. Return the function that decodes the
    12 frames.
    """
    latents = stream(vae.config, 4, *size)
    first, rest = latents[:, :, :1], latents[:, :, 1:]
    _, cache = vae.decode(first, None)

    def run() -> Any:
        return vae.decode(rest, cache)

    start = time.monotonic()
    run()
    torch.cuda.synchronize()
    times[f"{name}: first time, s"] = round(time.monotonic() - start, 2)
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - held) / 2**30
    times[f"{name}: peak beside the cache before, GiB"] = round(peak, 2)
    times[f"{name}, ms"] = milliseconds(run, repeats)
    times[f"{name}: a stream's first frame, ms"] = milliseconds(lambda: vae.decode(first, None), 3)
    log(f"{name:60s} {times[f'{name}, ms']} ms")
    return run


def time_all(args: argparse.Namespace, times: dict[str, Any]) -> None:
    size = args.height, args.width
    run = time_decode("12 frames, fused", build(args.config, fused=True), size, times)
    times["kernels of 12 frames, fused, ms"] = kernels(run)
    del run
    band = build(args.config, fused=True, bands=LonelyBands(0, 2, None))  # type: ignore[arg-type]
    time_decode("12 frames, fused, half the rows, no exchange", band, size, times, 5)
    del band
    time_decode("12 frames, plain", build(args.config), size, times, 3)
    with torch.device(DEVICE):
        tiny = TinyVAEDecoder(CHANNELS, args.config, dtype=DTYPE)
    time_decode("12 frames, tiny decoder", tiny, size, times)


def kernels(run: Callable[[], Any]) -> list[list[Any]]:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    ordered = sorted(seen.key_averages(), key=lambda event: -event.self_device_time_total)[:20]
    return [
        [event.key[:110], event.count, round(event.self_device_time_total / 1e3, 3)]
        for event in ordered
    ]


def time_parts(args: argparse.Namespace) -> dict[str, Any]:
    """Time a layer's operations at each size, with the served kernels and with alternatives."""
    from vae_candidates import stack as a_frame_a_program

    from vllm_omni.model_executor.models.wan.vae import stack_kernels

    found: dict[str, Any] = {}
    dim = args.config.base_dim
    served = stack_kernels._BLOCK, stack_kernels._WARPS
    for channels, frames, scale in ((dim, 4, 1), (2 * dim, 4, 2), (4 * dim, 2, 4), (4 * dim, 1, 8)):
        height, width = args.height // scale, args.width // scale

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=DEVICE).to(DTYPE)

        x, past = random(frames, height, width, channels), random(1, 2, height, width, channels)
        residual, bias, gamma = torch.zeros_like(x), random(channels), random(channels)
        name = f"{channels} channels, {frames} frames"
        for block, warps in ((2048, 4), (4096, 4), (4096, 8), (8192, 8)):
            stack_kernels._BLOCK, stack_kernels._WARPS = block, warps
            key = f"{name}: pass, block {block}, {warps} warps"
            found[key] = milliseconds(
                lambda x=x, past=past, gamma=gamma: stack_kernels.stack_frames(
                    PendingSum(x), past, layout=FrameLayout.SIDE_BY_SIDE, gamma=gamma
                )
            )
            found[f"{key}, with sum"] = milliseconds(
                lambda x=x, past=past, gamma=gamma, bias=bias, residual=residual: (
                    stack_kernels.stack_frames(
                        PendingSum(x, bias, residual),
                        past,
                        layout=FrameLayout.SIDE_BY_SIDE,
                        gamma=gamma,
                        want_sum=True,
                    )
                )
            )
        stack_kernels._BLOCK, stack_kernels._WARPS = served
        found[f"{name}: pass, a program a frame"] = milliseconds(
            lambda x=x, past=past, gamma=gamma: a_frame_a_program(x, past[0], gamma=gamma)
        )
        found[f"{name}: pass, a program a frame, with sum"] = milliseconds(
            lambda x=x, past=past, gamma=gamma, bias=bias, residual=residual: a_frame_a_program(
                x, past[0], gamma=gamma, bias=bias, residual=residual, want_sum=True
            )
        )
        weight = random(channels, channels, 3, 3, 3)
        if frames in OF_FRAMES:
            found |= time_combined(name, x, past, residual, gamma, bias, weight)
        wide = random(frames, height, width, 3 * channels).permute(0, 3, 1, 2)
        flat = random(1, frames + 2, height, width, channels).permute(0, 4, 1, 2, 3)
        side_by_side = folded(fold_memory(weight))
        solid = weight.contiguous(memory_format=torch.channels_last_3d)
        found[f"{name}: convolution, side by side"] = milliseconds(
            lambda wide=wide, weight=side_by_side: functional.conv2d(wide, weight, padding=1)
        )
        if channels > dim:
            found[f"{name}: convolution in three dimensions"] = milliseconds(
                lambda flat=flat, weight=solid: functional.conv3d(flat, weight, padding=(0, 1, 1))
            )
        if scale == 1:
            last = random(3, channels, 3, 3, 3)
            direct = folded(fold_memory(last))
            taps = stacked_frames.taps_as_channels(last)
            frames_NCHW = flat[0].transpose(0, 1)
            found["last convolution, side by side"] = milliseconds(
                lambda wide=wide, weight=direct: functional.conv2d(wide, weight, padding=1)
            )
            found["last convolution, taps as channels"] = milliseconds(
                lambda x=frames_NCHW, weight=taps: functional.conv2d(x, weight, padding=1)
            )
            of_taps = functional.conv2d(frames_NCHW, taps, padding=1).permute(0, 2, 3, 1)[None]
            found["sum of taps"] = milliseconds(
                lambda x=of_taps, bias=bias[:3]: stacked_frames.sum_of_taps(x, bias)
            )
    return found


def time_combined(
    name: str,
    x: torch.Tensor,
    past: torch.Tensor,
    residual: torch.Tensor,
    gamma: torch.Tensor,
    bias: torch.Tensor,
    weight: torch.Tensor,
) -> dict[str, float]:
    """Time the convolutions over combined frames, and the passes before and after these
    convolutions.
    """
    from vllm_omni.model_executor.models.wan.vae import stack_kernels

    found: dict[str, float] = {}
    served = stack_kernels._COMBINED_BLOCK, stack_kernels._WARPS
    products = torch.randn(len(x) + 2, 1, *x.shape[1:], device=DEVICE).to(product_dtype(DTYPE))
    after = PendingSum(products, bias, products=True)
    for block, warps in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        stack_kernels._COMBINED_BLOCK, stack_kernels._WARPS = block, warps
        key = f"{name}: combined pass, block {block}, {warps} warps"
        pass_over = partial(
            stack_kernels.stack_frames, past=past, gamma=gamma, layout=FrameLayout.COMBINED
        )
        found[key] = milliseconds(partial(pass_over, after))
        found[f"{key}, with sum"] = milliseconds(
            partial(pass_over, PendingSum(products, bias, residual, products=True), want_sum=True)
        )
    stack_kernels._COMBINED_BLOCK, stack_kernels._WARPS = served
    combined, weights = products, OF_FRAMES[len(x)].transformed(weight)
    found[f"{name}: convolutions of combined frames"] = milliseconds(
        lambda: convolved_each(combined, weights, (1, 1))
    )
    return found


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--release", choices=("2.1", "2.2"), default="2.1", help="of Wan's VAE")
    parser.add_argument("--height", type=int, help="default: 480, with release 2.2: 704")
    parser.add_argument("--width", type=int, help="default: 832, with release 2.2: 1280")
    parser.add_argument("--base-dim", type=int, help="default: the released widths")


def parse_network(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments, apply the release's defaults, and add `config`."""
    args = parser.parse_args()
    height, width = (704, 1280) if args.release == "2.2" else (480, 832)
    args.height, args.width = args.height or height, args.width or width
    args.config = config_of(args.release, args.base_dim)
    return args


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_network_arguments(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        default=85.0,
        help="the compiled decoder is left out if too few remain",
    )
    parser.add_argument("--compile-seconds", type=float, default=40.0)
    add_output_arguments(parser)
    args = parse_network(parser)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    checks, times, parts = Checks(), dict[str, Any](), dict[str, Any]()
    with torch.inference_mode():
        check(args, checks)
        check_bands(args, checks)
        if args.release == "2.1":  # streams of Wan 2.2 are decoded one at a time
            check_together(args, checks, times)
        if DEVICE == "cuda":
            time_all(args, times)
            parts = time_parts(args) if args.release == "2.1" else {}
            log("parts timed")
            if args.seconds - (time.monotonic() - START) > args.compile_seconds:
                compiled = build(args.config, compiled=True)
                time_decode(
                    "12 frames, plain compiled", compiled, (args.height, args.width), times, 5
                )
    result = {"checks": checks.values, "failed": checks.failed, "times": times, "parts_ms": parts}
    result["seconds"] = round(time.monotonic() - START, 1)
    save(f"vae_decode_{args.release}", {"result": result}, args)
    sys.exit(1 if checks.failed else 0)


if __name__ == "__main__":
    main()
