# SPDX-License-Identifier: Apache-2.0
"""Measure causal Wan 2.1 at full size with random weights in the real engine: frames per second,
time to the first frame, and stage times.

    # 1.3B, one GPU, 480x832, window 9, 4 steps
    python benchmarks/streaming_wan.py
    python benchmarks/streaming_wan.py --size 14B
    python benchmarks/streaming_wan.py --sequence-parallel 2
    python benchmarks/streaming_wan.py --streams 2
    python benchmarks/streaming_wan.py --pipeline-parallel 4 --pipeline temporal \\
        --chunks-in-flight 4 \\
        --model-options '{"cache": "noise_matched"}'
    python benchmarks/streaming_wan.py --source video \\
        --model-options '{"latent_frames_per_chunk": 1}'
    # try it without a GPU
    python benchmarks/streaming_wan.py --size tiny --height 64 --width 96 --chunks 8 --eager

Random weights with the released shapes give the same times as trained weights. Steady-state values
are medians over all chunks after the window is full. Chunks are measured end to end, from the
request to the uint8 frames, which the exact VAE decodes unless the options select another decoder.
`ideal` is the time that the arithmetic alone, including the decode, would take at the GPU's
measured GEMM rate (790 TFLOP/s on an H200), without any overlap.
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
from collections.abc import Callable, Coroutine
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
    add_tracing_arguments,
    close_session,
    kernel_times,
    precision_of,
    restart_with,
    run_request,
    running_engine,
    save,
    trace_folder,
    tracing,
    write_tiny_decoder,
)

SIZES: dict[str, dict[str, int]] = {
    "1.3B": {
        "num_attention_heads": 12,
        "attention_head_dim": 128,
        "ffn_dim": 8960,
        "num_layers": 30,
    },
    "14B": {
        "num_attention_heads": 40,
        "attention_head_dim": 128,
        "ffn_dim": 13824,
        "num_layers": 40,
    },
    "tiny": {"num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 112, "num_layers": 4},
}
GEMM_FLOPS = 790e12
"""Measured rate of bf16 matrix products on an H200, in FLOP/s."""
VAE_DECODE_FLOPS = 13.55e12 / (480 * 832)
"""FLOPs that Wan 2.1's decoder performs per latent frame and pixel."""
TEXT_ROWS = 512


def write_checkpoint(root: Path, size: str) -> None:
    """Write a diffusers directory without weights for the architecture, to be loaded with
    --load-format dummy.
    """
    from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer
    from vllm_omni.testing.tiny.wan import TEXT, VAE

    config: dict[str, Any] = {"_class_name": "CausalWanTransformer3DModel", **SIZES[size]}
    if size == "tiny":
        config |= {"freq_dim": 32, "text_dim": 32, "text_len": 64}
        for name, values in (("text_encoder", TEXT), ("vae", VAE.to_dict())):
            (root / name).mkdir(parents=True)
            (root / name / "config.json").write_text(json.dumps(values))
    (root / "transformer").mkdir(parents=True)
    (root / "transformer" / "config.json").write_text(json.dumps(config))
    write_t5_tokenizer(root / "tokenizer")
    write_tiny_decoder(root)


def ideal_ms(size: str, args: argparse.Namespace, plan: Any, passes: int) -> float:
    """Return the milliseconds of one chunk's arithmetic: `passes` forward passes of the network,
    and the exact decode.
    """
    sizes = SIZES[size]
    width, layers = sizes["num_attention_heads"] * sizes["attention_head_dim"], sizes["num_layers"]
    q = plan.chunk_frames * args.height * args.width // 256
    k = plan.window_frames * args.height * args.width // 256
    linear = 2 * q * (6 * width**2 + 2 * width * sizes["ffn_dim"]) * layers
    attention = 4 * q * (k + TEXT_ROWS) * width * layers
    decode = plan.chunk_frames * VAE_DECODE_FLOPS * args.height * args.width
    return (passes * (linear + attention) + decode) / GEMM_FLOPS * 1e3


def stream_chunk(
    engine: Any, name: str, args: argparse.Namespace, plan: Any
) -> Callable[[int], Coroutine[Any, Any, dict[str, Any]]]:
    """Return a function that runs the chunk with a given index and returns a record of the chunk's
    arrival time, stage times and frames.
    """
    import torch

    from vllm_omni.inputs import DiffusionParams

    generator = torch.Generator().manual_seed(0)

    async def chunk(index: int) -> dict[str, Any]:
        first = index == 0
        params = DiffusionParams(
            session_id=name,
            chunk_index=index,
            prompt="a coast road in the evening" if first else None,
            seed=1 if first else None,
            height=args.height,
            width=args.width,
            options={"source": args.source},
        )
        tensors = None
        if args.source == "video":
            shape = (len(plan.pixel_frames(index)), args.height, args.width, 3)
            tensors = {
                "video": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            }
        meta, results = await run_request(engine, params, tensors, f"{name}-{index}")
        frames = results["frames"]
        return {
            "done": time.perf_counter(),
            "timings_ms": meta["timings_ms"],
            "frames": len(frames),
        }

    return chunk


async def one_stream(engine: Any, name: str, args: argparse.Namespace, plan: Any) -> dict[str, Any]:
    """Run the chunks of one stream. While a chunk is running, up to `chunks_in_flight` of its
    successors are requested.
    """
    chunk = stream_chunk(engine, name, args, plan)
    start = time.perf_counter()
    pending: list[asyncio.Task[dict[str, Any]]] = []
    records: list[dict[str, Any]] = []
    for index in range(args.chunks):
        for number in range(
            index + len(pending), min(args.chunks, index + args.chunks_in_flight + 1)
        ):
            pending.append(asyncio.create_task(chunk(number)))
        records.append(await pending.pop(0))
    return {"records": records, "start": start}


async def run(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    from vllm_omni.model_executor.models.causal_wan.config import (
        CausalWanConfig,
        CausalWanOptions,
        resolve_plan,
    )

    options: dict[str, Any] = {
        "window_frames": args.window,
        "sink_frames": args.sink,
        "video_input": args.source == "video",
        **json.loads(args.model_options),
    }
    ranks = args.tensor_parallel
    if args.sequence_parallel > 1:
        options["sequence_parallel"], ranks = True, args.sequence_parallel
    parsed = CausalWanOptions.parse(options)
    plan = resolve_plan(CausalWanConfig(), parsed)
    passes = len(parsed.denoising_steps) + (parsed.cache != "noise_matched")
    loading = time.perf_counter()
    async with running_engine(
        model,
        {
            "height": args.height,
            "width": args.width,
            "model": options,
            "max_sessions": args.streams + 1,
            "chunks_in_flight": args.chunks_in_flight,
            "pipeline": args.pipeline,
            **json.loads(args.omni_options),
        },
        enforce_eager=args.eager,
        load_format="dummy",
        tensor_parallel_size=ranks,
        pipeline_parallel_size=args.pipeline_parallel,
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision_of(args),
        **tracing(args, trace_folder(args, model.parent)),
    ) as engine:
        load_s = time.perf_counter() - loading
        first = await one_stream(
            engine, "first", argparse.Namespace(**{**vars(args), "chunks": 2}), plan
        )
        await close_session(engine, "first")
        await asyncio.sleep(IDLE_S)
        runs = await asyncio.gather(
            *(one_stream(engine, f"stream{n}", args, plan) for n in range(args.streams))
        )
        memory = await engine.collective_rpc("device_memory")
        sessions = await engine.collective_rpc("session_stats")
        kernels = None
        if args.kernels:
            for n in range(args.streams):
                await close_session(engine, f"stream{n}")
            traced = stream_chunk(engine, "traced", args, plan)
            kernels = await kernel_times(
                engine, trace_folder(args, model.parent), traced, args.warm_chunks
            )

    records = runs[0]["records"]
    steady = records[args.warm_chunks :]
    gaps_ms = [(b["done"] - a["done"]) * 1e3 for a, b in itertools.pairwise(records)][
        args.warm_chunks - 1 :
    ]
    interval_ms = statistics.median(gaps_ms)
    names = sorted({name for record in steady for name in record["timings_ms"]})
    stages = {
        name: statistics.median(sum(r["timings_ms"].get(name, [0.0])) for r in steady)
        for name in names
    }
    steps = [record["timings_ms"]["steps"] for record in steady]
    ideal = ideal_ms(args.size, args, plan, passes)
    frames = steady[0]["frames"]
    return {
        "model": args.size,
        "size": [args.height, args.width],
        "source": args.source,
        "streams": args.streams,
        "parallel": {
            "tensor": args.tensor_parallel,
            "sequence": args.sequence_parallel,
            "pipeline": args.pipeline_parallel,
            "kind": args.pipeline,
        },
        "chunks_in_flight": args.chunks_in_flight,
        "model_options": options,
        "eager": args.eager,
        **precision_of(args),
        "chunks": args.chunks,
        "frames_per_chunk": frames,
        "load_and_warm_up_s": round(load_s, 1),
        "time_to_first_frame_ms": round((records[0]["done"] - runs[0]["start"]) * 1e3, 1),
        "time_to_first_frame_ms_first_stream": round(
            (first["records"][0]["done"] - first["start"]) * 1e3, 1
        ),
        "chunk_interval_ms": round(interval_ms, 1),
        "chunk_interval_ms_all": [round(gap, 1) for gap in gaps_ms],
        "fps_per_stream": round(frames / (interval_ms / 1e3), 2),
        "fps_all_streams": round(args.streams * frames / (interval_ms / 1e3), 2),
        "stages_ms": {name: round(value, 2) for name, value in stages.items()},
        "steps_ms": [round(statistics.median(values), 2) for values in zip(*steps, strict=False)],
        "first_chunk_timings_ms": records[0]["timings_ms"],
        "ideal_chunk_ms": round(ideal, 2),
        "ideal_fps": round(frames / (ideal / 1e3), 1),
        "ratio_to_ideal": round(args.streams * ideal / interval_ms, 3),
        "device_memory": memory,
        "session_bytes": sessions[0]["bytes"],
        "kernels": kernels,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Causal Wan 2.1 at full size with random weights.")
    parser.add_argument("--size", choices=list(SIZES), default="1.3B")
    parser.add_argument("--source", choices=["text", "video"], default="text")
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument(
        "--warm-chunks", type=int, default=6, help="chunks before the window is full"
    )
    parser.add_argument(
        "--window", type=int, default=9, help="latent frames a chunk sees, itself included"
    )
    parser.add_argument("--sink", type=int, default=3)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--sequence-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument(
        "--pipeline", choices=["blocks", "temporal"], default="blocks", help="what a stage owns"
    )
    parser.add_argument(
        "--chunks-in-flight", type=int, default=1, help="of one stream at work at once"
    )
    add_serving_arguments(parser)
    add_tracing_arguments(parser)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--name", default="streaming_wan", help="name of the result file")
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.chunks <= args.warm_chunks:
        raise SystemExit(
            f"--chunks {args.chunks} leaves nothing after --warm-chunks {args.warm_chunks}"
        )
    restart_with(HUGE_PAGES)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "stream"
        write_checkpoint(model, args.size)
        result = asyncio.run(run(model, args))
    save(args.name, {"result": result}, args)


if __name__ == "__main__":
    main()
