# SPDX-License-Identifier: Apache-2.0
"""Functions that all drivers share: parsing arguments, generating random weights, timing chunks,
and writing the measurements.

A driver runs with the Python path of one peer, so this module must not import this project.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

DTYPE = torch.bfloat16
TEXT_SHAPE = (1, 512, 4096)
"""Shape of umT5's output. The drivers replace the text encoder with random embeddings of this
shape.
"""
PROMPT = "a coast road in the evening"
CAMERA_ACTIONS = [["w"], ["w", "j"], ["w"]]
"""Keys for a chunk's three latent frames: forward, with a left turn in the second frame."""


def parse_arguments(*variants: str) -> argparse.Namespace:
    """Parse the arguments that `python -m benchmarks.peers run` passes to a driver."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=variants, default=variants[0])
    parser.add_argument("--result", type=Path, required=True, help="file for the measurements")
    parser.add_argument("--tiny", action="store_true", help="a narrow model on the CPU")
    args = parser.parse_args()
    args.height, args.width = (32, 48) if args.tiny else (480, 832)
    args.device = torch.device("cpu" if args.tiny else "cuda:0")
    args.chunks, args.steady_from = (3, 1) if args.tiny else (14, 8)
    args.sink, args.window = 9, 18
    return args


def fill_with_random_weights(
    module: torch.nn.Module, device: torch.device, dtype: torch.dtype | None = None
) -> int:
    """Materialise the parameters that are on the meta device, fill all parameters and return their
    number.

    Weights are drawn from a normal distribution with a standard deviation of 0.02. Norm weights are
    1 and biases are 0, which keeps the values in a deep network finite.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    parameters = 0
    with torch.no_grad():
        for owner in module.modules():
            for name, old in owner._parameters.items():
                if old is None:
                    continue
                new = old
                if old.is_meta:
                    data = torch.empty(old.shape, dtype=dtype or old.dtype, device=device)
                    new = torch.nn.Parameter(data, requires_grad=False)
                    owner._parameters[name] = new
                parameters += new.numel()
                if name == "gamma" or (name == "weight" and new.ndim == 1):
                    new.fill_(1.0)
                elif name == "bias":
                    new.zero_()
                elif new.is_floating_point():
                    new.normal_(0.0, 0.02, generator=generator)
    return parameters


def random_text(device: torch.device, width: int = TEXT_SHAPE[-1]) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(1)
    shape = (*TEXT_SHAPE[:-1], width)
    return (torch.randn(shape, device=device, generator=generator) * 0.1).to(DTYPE)


def to_host_uint8(frames_CTHW: torch.Tensor) -> Any:
    """Convert frames in [0, 1] to uint8 on the device, and copy them to the host as [T, H, W,
    C].
    """
    frames = (frames_CTHW * 255).clamp(0, 255).to(torch.uint8)
    return frames.permute(1, 2, 3, 0).contiguous().cpu().numpy()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_chunks(args: argparse.Namespace, run_chunk: Callable[[int], Any]) -> list[float]:
    """Return each chunk's time in milliseconds. `run_chunk` returns the chunk's uint8 frames."""
    times_ms = []
    for index in range(args.chunks):
        synchronize()
        start = time.perf_counter()
        frames = run_chunk(index)
        synchronize()
        times_ms.append((time.perf_counter() - start) * 1e3)
        print(f"chunk {index}: {times_ms[-1]:.1f} ms, {len(frames)} frames", flush=True)
    expected = (12, args.height, args.width, 3)
    if tuple(frames.shape) != expected:
        raise SystemExit(f"frames of a chunk have shape {tuple(frames.shape)}, expected {expected}")
    return times_ms


def save(
    args: argparse.Namespace,
    chunks_ms: list[float],
    *,
    peer: str,
    settings: dict[str, Any],
    fast_paths: dict[str, Any],
    replaced: list[str],
    **more: Any,
) -> None:
    """Write the measurements.

    Args:
        chunks_ms: Times of all chunks in milliseconds, in order. Chunks from index
            `args.steady_from` on are in the steady state.
        settings: The run's settings: window, steps, precision and the peer's options.
        fast_paths: The peer's fast paths, and whether each fast path was on.
        replaced: The peer's components that were replaced in this run.
    """
    import numpy
    import transformers

    steady = chunks_ms[args.steady_from :]
    memory = {}
    if torch.cuda.is_available():
        memory["peak_memory_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    measured = {
        "peer": peer,
        "chunk_ms": round(statistics.median(steady), 1),
        "chunk_ms_range": [round(min(steady), 1), round(max(steady), 1)],
        "first_chunk_ms": round(chunks_ms[0], 1),
        "chunks_ms": [round(value, 1) for value in chunks_ms],
        "steady_from": args.steady_from,
        "frames_per_chunk": 12,
        "size": [args.height, args.width],
        **memory,
        "settings": settings,
        "fast_paths": fast_paths,
        "replaced": replaced,
        **more,
    }
    versions = {
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "transformers": transformers.__version__,
    }
    args.result.write_text(json.dumps({"versions": versions, "result": measured}, default=str))


def start_image(args: argparse.Namespace) -> Any:
    """Return a random-noise start image as a PIL image."""
    import numpy
    from PIL import Image

    pixels = numpy.random.default_rng(0).integers(0, 256, (args.height, args.width, 3))
    return Image.fromarray(pixels.astype(numpy.uint8))
