# SPDX-License-Identifier: Apache-2.0
"""Measure LingBot World at full size with random weights in the real engine.

The benchmark reports chunk times, stage times and memory.

    # one GPU, 480x832, window 18, sink 9
    python benchmarks/lingbot_world.py
    # chunks of 16 frames, window 18, sink 6
    python benchmarks/lingbot_world.py --release v2_1_3b
    python benchmarks/lingbot_world.py --sequence-parallel 2            # Ulysses over two GPUs
    python benchmarks/lingbot_world.py --pipeline-parallel 2 --sessions 2
    # try it without a GPU
    python benchmarks/lingbot_world.py --tiny --height 64 --width 96 --eager

Random weights with the released shapes give the same times as trained weights. The first chunk has
9 frames, and every later chunk has 12 (v2: 13 and 16). Steady-state values are medians over all
chunks after the window is full. `time_to_first_frame_ms` is measured in the engine's first session.
`later_first_frames` are measured in five more sessions, which run one after another with different
prompts and start images. `known_first_frames` are measured in five sessions with the start image of
the first session. If the conditioning settled in that session, the server does not encode the image
again, and the stage `condition` takes almost no time. The runner reports stage times, which are
device times. `--tiny` runs the tests' small model, because even with few `--layers`, the full-width
model and its text encoder take up about 20 GiB. The script restarts itself with the environment
variable for huge pages that the serving guide recommends.
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

sys.path.insert(0, str(Path(__file__).parent))
from common import (
    HUGE_PAGES,
    add_output_arguments,
    add_serving_arguments,
    add_tracing_arguments,
    close_session,
    first_frames,
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

RELEASES: dict[str, dict[str, Any]] = {
    "fast": {"num_layers": 40},
    "v2_1_3b": {
        "num_layers": 30,
        "dim": 1536,
        "ffn_dim": 8960,
        "num_heads": 12,
        "sliding_window_num_frames": 18,
        "sink_size": 6,
        "num_frames_per_block": 4,
    },
}
"""Each release's differences from the architecture's defaults, as entries of the transformer's
`config.json`.
"""


def write_checkpoint(root: Path, release: str, layers: int | None = None) -> None:
    """Write a checkpoint directory without weights for a released architecture, to be loaded with
    --load-format dummy.
    """
    from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer

    transformer = root / "lingbot_world_fast"
    transformer.mkdir(parents=True)
    config = {
        "_class_name": "WanModelFast",
        "model_type": "i2v",
        "control_type": "cam",
        **RELEASES[release],
    }
    if layers is not None:
        config["num_layers"] = layers
    (transformer / "config.json").write_text(json.dumps(config))
    write_t5_tokenizer(root / "google" / "umt5-xxl")
    write_tiny_decoder(root)


def session_chunk(
    engine: Any,
    name: str,
    args: argparse.Namespace,
    output: str,
    prompt: str = "a coast road in the evening",
    image_name: str = "",
) -> Callable[[int], Coroutine[Any, Any, dict[str, Any]]]:
    """Return a function that runs the chunk with a given index and returns a record of the chunk's
    arrival time, stage times, frames and digest. Equal image names give equal start images.
    """
    import torch

    from vllm_omni.inputs import DiffusionParams

    generator = torch.Generator().manual_seed(zlib.crc32(image_name.encode()))
    image = torch.randint(
        0, 256, (args.height, args.width, 3), dtype=torch.uint8, generator=generator
    )

    async def chunk(index: int) -> dict[str, Any]:
        first = index == 0
        params = DiffusionParams(
            session_id=name,
            chunk_index=index,
            prompt=prompt if first else None,
            seed=1 if first else None,
            height=args.height,
            width=args.width,
            actions=[["w"], ["w", "j"], ["w"]],
            output=output,
        )
        meta, tensors = await run_request(
            engine, params, {"image": image} if first else None, f"{name}-{index}"
        )
        done = time.perf_counter()
        (result,) = tensors.values()
        digest = hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16]
        return {
            "done": done,
            "timings_ms": meta["timings_ms"],
            "frames": meta["num_frames"],
            "digest": digest,
        }

    return chunk


async def one_session(
    engine: Any, name: str, args: argparse.Namespace, chunks: int, output: str
) -> dict[str, Any]:
    """Run the chunks of one session. Request each chunk while its predecessor is running. Return
    the chunk records and the start time.
    """
    chunk = session_chunk(engine, name, args, output)
    start = time.perf_counter()
    pending = [asyncio.create_task(chunk(0))]
    records = []
    for index in range(chunks):
        if index + 1 < chunks:
            pending.append(asyncio.create_task(chunk(index + 1)))
        records.append(await pending.pop(0))
    return {"records": records, "start": start}


async def run(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(args.model_options)
    ranks = args.tensor_parallel
    if args.sequence_parallel > 1:
        options["sequence_parallel"], ranks = True, args.sequence_parallel
    loading = time.perf_counter()
    async with running_engine(
        model,
        {
            "height": args.height,
            "width": args.width,
            "model": options,
            **json.loads(args.omni_options),
        },
        enforce_eager=args.eager,
        load_format="auto" if args.tiny else "dummy",
        tensor_parallel_size=ranks,
        pipeline_parallel_size=args.pipeline_parallel,
        distributed_executor_backend=args.executor,
        disable_custom_all_reduce=args.disable_custom_all_reduce,
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision_of(args),
        **tracing(args, trace_folder(args, model.parent)),
    ) as engine:
        load_s = time.perf_counter() - loading
        runs = await asyncio.gather(
            *(
                one_session(engine, f"world{n}", args, args.chunks, "rgb")
                for n in range(args.sessions)
            )
        )
        memory = await engine.collective_rpc("device_memory")
        sessions = await engine.collective_rpc("session_stats")
        for n in range(args.sessions):
            await close_session(engine, f"world{n}")
        prompt = "a coast road in the evening"
        later = await first_frames(
            engine,
            lambda name: session_chunk(engine, name, args, "rgb", f"{prompt}, {name}", name),
        )
        known = await first_frames(
            engine,
            lambda name: session_chunk(engine, name, args, "rgb", f"{prompt}, {name}"),
            "known",
        )
        # The latents of two chunks allow a bit-for-bit comparison of runs on any number of GPUs.
        latents = await one_session(engine, "latents", args, 2, "latents")
        kernels = None
        if args.kernels:
            traced = session_chunk(engine, "traced", args, "rgb")
            kernels = await kernel_times(
                engine, trace_folder(args, model.parent), traced, args.warm_chunks
            )

    records = runs[0]["records"]
    steady = records[args.warm_chunks :]
    gaps_ms = [(b["done"] - a["done"]) * 1e3 for a, b in itertools.pairwise(records)][
        args.warm_chunks - 1 :
    ]

    def stage(name: str) -> float | None:
        values = [
            sum(record["timings_ms"][name]) for record in steady if name in record["timings_ms"]
        ]
        return round(statistics.median(values), 2) if values else None

    steps = [record["timings_ms"]["steps"] for record in steady]
    return {
        "size": [args.height, args.width],
        "parallel": {
            "tensor": args.tensor_parallel,
            "sequence": args.sequence_parallel,
            "pipeline": args.pipeline_parallel,
        },
        "executor": args.executor,
        "sessions": args.sessions,
        "model_options": options,
        "vae_parallel": json.loads(args.omni_options).get("vae_parallel", False),
        "omni_options": json.loads(args.omni_options),
        "release": None if args.tiny else args.release,
        "layers": None if args.tiny else args.layers or RELEASES[args.release]["num_layers"],
        "tiny": args.tiny,
        "chunks": args.chunks,
        "load_and_warm_up_s": round(load_s, 1),
        "time_to_first_frame_ms": round((records[0]["done"] - runs[0]["start"]) * 1e3, 1),
        "later_first_frames": later,
        "known_first_frames": known,
        "chunk_interval_ms": round(statistics.median(gaps_ms), 1),
        "chunk_interval_ms_all": [round(gap, 1) for gap in gaps_ms],
        "fps_all_sessions": round(
            steady[0]["frames"] * args.sessions / (statistics.median(gaps_ms) / 1e3), 2
        ),
        "stages_ms": {
            name: stage(name)
            for name in ("encode", "text", "condition", "camera", "steps", "decode", "total")
        },
        "steps_ms": [round(statistics.median(values), 2) for values in zip(*steps, strict=False)],
        "first_chunk_timings_ms": records[0]["timings_ms"],
        "device_memory": memory,
        "session_bytes": sessions[0]["bytes"],
        "eager": args.eager,
        **precision_of(args),
        "kernels": kernels,
        "latents_digests": [record["digest"] for record in latents["records"]],
    }


def main() -> None:
    from vllm_omni.model_executor.models.registry import get_family

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=12)
    parser.add_argument(
        "--warm-chunks", type=int, default=6, help="chunks before the window is full"
    )
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--release", choices=tuple(RELEASES), default="fast")
    parser.add_argument("--layers", type=int, help="fewer layers than the release has")
    parser.add_argument(
        "--tiny", action="store_true", help="the tests' tiny model with its own weights"
    )
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--sequence-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument(
        "--executor", choices=("mp", "ray"), help="vLLM's executor (default: vLLM's choice)"
    )
    parser.add_argument(
        "--disable-custom-all-reduce",
        action="store_true",
        help="vLLM's flag: all-reduces by NCCL only",
    )
    add_serving_arguments(parser)
    add_tracing_arguments(parser)
    parser.add_argument(
        "--name", help="name of the result file (default: lingbot_world, and the release)"
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    restart_with(HUGE_PAGES)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "world"
        if args.tiny:
            get_family("lingbot_world").make_tiny(model, 0, "original")
        else:
            write_checkpoint(model, args.release, args.layers)
        result = asyncio.run(run(model, args))
    default_name = "lingbot_world" if args.release == "fast" else f"lingbot_world_{args.release}"
    save(args.name or default_name, {"result": result}, args)


if __name__ == "__main__":
    main()
