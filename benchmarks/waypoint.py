# SPDX-License-Identifier: Apache-2.0
"""Measure Waypoint 1.5 at full size with random weights in the real engine.

The benchmark reports frames per second, the time to the first frame, stage times and memory.

    python benchmarks/waypoint.py                                       # 1.5 at 720x1280, one GPU
    python benchmarks/waypoint.py --model-options '{"cuda_graphs": false}'
    python benchmarks/waypoint.py --quantization fp8_per_channel
    python benchmarks/waypoint.py --release v1_5_360p --height 360 --width 640
    python benchmarks/waypoint.py --sessions 4
    # without a GPU
    python benchmarks/waypoint.py --tiny --height 40 --width 64 --eager --chunks 12 --warm-chunks 6

Random weights with the released shapes give the same times as trained weights. Steady-state values
are medians over all chunks (of four video frames) after both kinds of ring buffers are full, which
happens at latent frame 120. Chunks are measured end to end, from the controls to the uint8 frames.
Each chunk is requested while its predecessor is running. The model's own rate is 60 frames per
second. `time_to_first_frame_ms` is measured in the first session. `later_first_frames` are measured
in five more sessions, which run one after another on the same engine. Each entry of
`later_first_frames` also contains the stage times and the time spent outside the model (`outside`).
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
    add_output_arguments,
    add_serving_arguments,
    add_tracing_arguments,
    first_frames,
    kernel_times,
    precision_of,
    run_request,
    running_engine,
    save,
    trace_folder,
    tracing,
)

NATIVE_FPS = 60.0
RELEASES = {"v1_5": "waypoint", "v1_5_360p": "waypoint_360p"}
"""Maps each release to its name in `vllm-omni plan`."""


def write_checkpoint(root: Path, release: str) -> None:
    """Write a checkpoint directory without weights for a released architecture, to be loaded with
    --load-format dummy.
    """
    from vllm_omni.model_executor.models.waypoint.releases import GRIDS, WAYPOINT_1_5

    root.mkdir()
    height, width = GRIDS[RELEASES[release]]
    sizes = {"height": height, "width": width, "tokens_per_frame": height * width}
    (root / "config.yaml").write_text(json.dumps({**WAYPOINT_1_5, **sizes}))  # JSON is valid YAML


def session_chunk(
    engine: Any, name: str, args: argparse.Namespace
) -> Callable[[int], Coroutine[Any, Any, dict[str, Any]]]:
    """Return a function that runs the chunk with a given index and returns a record of the chunk's
    arrival time, stage times and frames.
    """
    import torch

    from vllm_omni.actions import ActionFrame
    from vllm_omni.inputs import DiffusionParams

    generator = torch.Generator().manual_seed(0)
    image = torch.randint(
        0, 256, (args.height, args.width, 3), dtype=torch.uint8, generator=generator
    )

    async def chunk(index: int) -> dict[str, Any]:
        params = DiffusionParams(
            session_id=name,
            chunk_index=index,
            seed=1,
            height=args.height,
            width=args.width,
            actions=[ActionFrame(buttons=("w",), axes={"dx": 3.0})] if index % 32 < 16 else None,
        )
        meta, tensors = await run_request(
            engine, params, {"image": image} if index == 0 else None, f"{name}-{index}"
        )
        assert len(tensors["frames"]) == meta["num_frames"]
        return {
            "done": time.perf_counter(),
            "timings_ms": meta["timings_ms"],
            "frames": meta["num_frames"],
        }

    return chunk


async def play(engine: Any, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the chunks of one session, and return each chunk's stage times and arrival time."""
    chunk = session_chunk(engine, name, args)
    start = time.perf_counter()
    pending = [asyncio.create_task(chunk(0))]
    records: list[dict[str, Any]] = []
    for index in range(args.chunks):
        if index + 1 < args.chunks:
            pending.append(asyncio.create_task(chunk(index + 1)))
        records.append(await pending.pop(0))
    return [{"done": start, "timings_ms": {}, "frames": 0}, *records]


async def run(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = json.loads(args.model_options)
    omni = {
        "height": args.height,
        "width": args.width,
        "model": options,
        **json.loads(args.omni_options),
    }
    async with running_engine(
        model,
        omni,
        enforce_eager=args.eager,
        load_format="auto" if args.tiny else "dummy",
        tensor_parallel_size=args.tensor_parallel,
        pipeline_parallel_size=args.pipeline_parallel,
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision_of(args),
        **tracing(args, trace_folder(args, model.parent)),
    ) as engine:
        sessions = await asyncio.gather(
            *(play(engine, f"world{n}", args) for n in range(args.sessions))
        )
        memory = await engine.collective_rpc("device_memory")
        held = await engine.collective_rpc("session_stats")
        later = await first_frames(engine, lambda name: session_chunk(engine, name, args))
        kernels = None
        if args.kernels:
            traced = session_chunk(engine, "traced", args)
            kernels = await kernel_times(
                engine, trace_folder(args, model.parent), traced, args.warm_chunks
            )
    start, *records = sessions[0]
    gaps_ms = [(b["done"] - a["done"]) * 1e3 for a, b in itertools.pairwise(records)][
        args.warm_chunks - 1 :
    ]
    steady = records[args.warm_chunks :]
    names = sorted({name for record in steady for name in record["timings_ms"]})
    interval_ms = statistics.median(gaps_ms)
    return {
        "release": args.release,
        "model_options": options,
        "size": [args.height, args.width],
        "tiny": args.tiny,
        "sessions": args.sessions,
        "parallel": {"tensor": args.tensor_parallel, "pipeline": args.pipeline_parallel},
        "omni_options": omni,
        "chunks": args.chunks,
        "time_to_first_frame_ms": round((records[0]["done"] - start["done"]) * 1e3, 1),
        "chunk_interval_ms": round(interval_ms, 1),
        "fps_each_session": round(steady[0]["frames"] / interval_ms * 1e3, 2),
        "fps_all_sessions": round(args.sessions * steady[0]["frames"] / interval_ms * 1e3, 2),
        "native_fps": NATIVE_FPS,
        "stages_ms": {
            name: round(
                statistics.median(sum(record["timings_ms"].get(name, [])) for record in steady), 2
            )
            for name in names
        },
        "first_chunk_timings_ms": records[0]["timings_ms"],
        "later_first_frames": later,
        "device_memory": memory,
        "session_bytes": held[0]["bytes"],
        "kernels": kernels,
        "eager": args.eager,
        **precision_of(args),
    }


def main() -> None:
    from vllm_omni.model_executor.models.registry import get_family

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", choices=tuple(RELEASES), default="v1_5")
    parser.add_argument("--chunks", type=int, default=320)
    parser.add_argument(
        "--warm-chunks", type=int, default=160, help="chunks before the rings are full"
    )
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument(
        "--tiny", action="store_true", help="the tests' tiny model with its own weights"
    )
    add_serving_arguments(parser)
    add_tracing_arguments(parser)
    parser.add_argument(
        "--name", default="waypoint", help="name of the result file (default: waypoint)"
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "world"
        if args.tiny:
            get_family("waypoint").make_tiny(model, 0, "v1_5")
        else:
            write_checkpoint(model, args.release)
        result = asyncio.run(run(model, args))
    save(args.name, {"result": result}, args)


if __name__ == "__main__":
    main()
