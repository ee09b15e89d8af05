# SPDX-License-Identifier: Apache-2.0
"""Measure LoRA adapters for causal Wan at full size with random weights: how much adapters add to
the chunk time, and what switching adapters costs.

    # 1.3B, one GPU, 480x832, adapters of rank 64
    python benchmarks/lora.py
    python benchmarks/lora.py --size 14B --rank 128
    python benchmarks/lora.py --size 14B --quantization fp8_per_channel
    # without a GPU
    python benchmarks/lora.py --size tiny --height 64 --width 96 --chunks 4 --warm-chunks 2 --rank 8

Two engines run one after the other: the first without `--enable-lora`, and the second with it. The
second engine runs streams with no adapter, one adapter and two adapters. It then runs one stream
that switches to an adapter in a slot, to another strength, to an adapter in host memory, to an
adapter that must be read from its file, and to no adapter. The cost of a switch is the time of the
first chunk after the switch minus the time of the faster of the two chunks that follow it. The
adapters change every attention and feed-forward layer. Random adapters take the same time as
trained ones.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

sys.path.insert(0, str(Path(__file__).parent))
from common import (
    HUGE_PAGES,
    IDLE_S,
    add_output_arguments,
    add_serving_arguments,
    chunk_rate,
    close_session,
    precision_of,
    restart_with,
    run_chunks,
    running_engine,
    save,
)
from streaming_wan import SIZES, write_checkpoint

NAMES = ("one", "two", "three", "four")
SLOTS, KEPT = 2, 3
"""Numbers of adapters in GPU slots and in host memory. Of the four adapters, two are in slots, and
one more is only in host memory.
"""
SWITCHES: tuple[tuple[str, list[tuple[str, float]]], ...] = (
    ("start", [("one", 1.0)]),
    ("to one in a slot", [("two", 1.0)]),
    ("back", [("one", 1.0)]),
    ("to another strength", [("one", 0.5)]),
    ("to two at once", [("one", 1.0), ("two", 0.5)]),
    ("to one on the host", [("three", 1.0)]),
    ("to one in its file", [("four", 1.0)]),
    ("to none", []),
)


def write_adapter(path: Path, checkpoint: Path, rank: int, seed: int) -> int:
    """Write a random bf16 adapter for every layer in the blocks, and return the adapter's size in
    bytes.
    """
    import torch
    from safetensors.torch import save_file

    from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import hf_config
    from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
    from vllm_omni.model_executor.models.wan.transformer.weights import transformer_shapes

    config = CausalWanConfig.from_checkpoint(hf_config(checkpoint)["causal_wan"]["transformer"])
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in transformer_shapes(config).items():
        if name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2:
            module = f"diffusion_model.{name.removesuffix('.weight')}"
            for half, size in (("lora_down", (rank, shape[1])), ("lora_up", (shape[0], rank))):
                values = torch.randn(size, generator=generator) * (
                    0.02 if half == "lora_down" else 0.01
                )
                tensors[f"{module}.{half}.weight"] = values.bfloat16()
    save_file(tensors, path)
    return path.stat().st_size


async def measure(
    engine: Any, args: argparse.Namespace, name: str, choice: list[tuple[str, float]]
) -> dict[str, Any]:
    """Measure a stream whose chunks all use the same adapters."""

    def request(session: str, index: int) -> tuple[dict[str, Any], Any]:
        return fields_of(args, index, choice if index == 0 else None), None

    run = await run_chunks(engine, name, args.chunks, request)
    await close_session(engine, name)
    await asyncio.sleep(IDLE_S)
    return chunk_rate(run, args.warm_chunks)


async def switch(engine: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Run one stream that switches adapters at every third chunk after its warm-up. Return the cost
    of each switch in milliseconds, compared with the chunks that follow it.
    """
    plan: dict[int, tuple[str, list[tuple[str, float]]]] = {
        args.warm_chunks + 3 * number: step for number, step in enumerate(SWITCHES)
    }

    def request(session: str, index: int) -> tuple[dict[str, Any], Any]:
        return fields_of(args, index, plan[index][1] if index in plan else None), None

    run = await run_chunks(engine, "switch", max(plan) + 3, request, ahead=0)
    ends = [run.start, *(record["done"] for record in run.records)]
    took_ms = [(end - start) * 1e3 for start, end in itertools.pairwise(ends)]
    found = {}
    for index, (what, _) in plan.items():
        same = took_ms[index + 1 : index + 3]
        found[what] = {
            "chunk_ms": round(took_ms[index], 1),
            "beyond_ms": round(took_ms[index] - min(same), 1),
        }
    return found


def fields_of(
    args: argparse.Namespace, index: int, choice: list[tuple[str, float]] | None
) -> dict[str, Any]:
    from vllm_omni.inputs import Lora

    first = (
        {"prompt": "a coast road", "seed": 1, "height": args.height, "width": args.width}
        if index == 0
        else {}
    )
    lora = None if choice is None else [Lora(name=name, scale=scale) for name, scale in choice]
    return {**first, "lora": lora}


def engine_of(model: Path, args: argparse.Namespace, **more: Any) -> Any:
    options = {
        "window_frames": args.window,
        "sink_frames": args.sink,
        **json.loads(args.model_options),
    }
    omni = {
        "height": args.height,
        "width": args.width,
        "model": options,
        **json.loads(args.omni_options),
    }
    return running_engine(
        model,
        omni,
        enforce_eager=args.eager,
        load_format="dummy",
        tensor_parallel_size=args.tensor_parallel,
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision_of(args),
        **more,
    )


async def run(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    from vllm.lora.request import LoRARequest

    model = folder / "stream"
    write_checkpoint(model, args.size)
    paths = {name: folder / f"{name}.safetensors" for name in NAMES}
    sizes = [
        write_adapter(path, model, args.rank, seed) for seed, path in enumerate(paths.values())
    ]
    async with engine_of(model, args) as engine:
        without = await measure(engine, args, "plain", [])
        plain_memory = await engine.collective_rpc("device_memory")
    lora = {
        "enable_lora": True,
        "max_loras": SLOTS,
        "max_cpu_loras": KEPT,
        "max_lora_rank": args.rank,
    }
    async with engine_of(model, args, **lora) as engine:
        loads_ms = []
        for number, (name, path) in enumerate(paths.items(), start=1):
            start = time.perf_counter()
            await engine.add_lora(LoRARequest(name, number, str(path)))
            loads_ms.append((time.perf_counter() - start) * 1e3)
        streams = {
            "none": await measure(engine, args, "none", []),
            "one": await measure(engine, args, "one", [("one", 1.0)]),
            "two": await measure(engine, args, "two", [("one", 1.0), ("two", 0.5)]),
            "none again": await measure(engine, args, "again", []),
        }
        for name in ("four", "three", "two", "one"):  # the last three stay in slots or host memory
            short = argparse.Namespace(**{**vars(args), "chunks": 3, "warm_chunks": 1})
            await measure(engine, short, name, [(name, 1.0)])
        switches = await switch(engine, args)
        memory = await engine.collective_rpc("device_memory")
    return {
        "model": args.size,
        "size": [args.height, args.width],
        "rank": args.rank,
        "adapter_bytes": sizes[0],
        "tensor_parallel": args.tensor_parallel,
        "eager": args.eager,
        **precision_of(args),
        "without_enable_lora": without,
        "streams": streams,
        "chunk_ms_beyond_without": {
            name: round(stream["chunk_interval_ms"] - without["chunk_interval_ms"], 1)
            for name, stream in streams.items()
        },
        "switches": switches,
        "load_ms": round(statistics.median(loads_ms), 1),
        "device_memory": {"without": plain_memory, "with": memory},
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="LoRA adapters of causal Wan at full size with random weights."
    )
    parser.add_argument("--size", choices=list(SIZES), default="1.3B")
    parser.add_argument("--rank", type=int, default=64, help="one of vLLM's --max-lora-rank")
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument(
        "--warm-chunks", type=int, default=6, help="chunks before the window is full"
    )
    parser.add_argument(
        "--window", type=int, default=9, help="latent frames a chunk sees, itself included"
    )
    parser.add_argument("--sink", type=int, default=3)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    add_serving_arguments(parser)
    parser.add_argument("--name", default="lora", help="name of the result file")
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.chunks <= args.warm_chunks + 1:
        raise SystemExit(
            f"--chunks {args.chunks} leaves too few after --warm-chunks {args.warm_chunks}"
        )
    restart_with(HUGE_PAGES)
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run(Path(folder), args))
    save(args.name, {"result": result}, args)


if __name__ == "__main__":
    main()
