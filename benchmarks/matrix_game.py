# SPDX-License-Identifier: Apache-2.0
"""Measure Matrix-Game 2.0 at full size with random weights in the real engine.

The benchmark reports frames per second, the time to the first frame, and stage times.

    # universal, one GPU, 352x640, window 6, 3 steps
    python benchmarks/matrix_game.py
    python benchmarks/matrix_game.py --variant gta_drive
    python benchmarks/matrix_game.py --model-options '{"cuda_graphs": false}'
    python benchmarks/matrix_game.py --sessions 4
    # try it without a GPU
    python benchmarks/matrix_game.py --tiny --height 64 --width 96 --eager --chunks 8

Random weights with the released shapes give the same times as trained weights. Steady-state values
are medians over all chunks after the window is full. Chunks are measured end to end, from the
controls to the uint8 frames. Each chunk is requested while its predecessor is running. The exact
VAE decodes the frames unless the options select another decoder. The model's authors report 25
frames per second on an H100.
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
    kernel_times,
    precision_of,
    run_request,
    running_engine,
    save,
    trace_folder,
    tracing,
)

AUTHORS_FPS = 25.0
HELD = {"universal": ["w", "l"], "gta_drive": ["w", "d"], "templerun": ["jump"]}
_LAYOUTS = {"universal": "original", "gta_drive": "original_gta", "templerun": "original_templerun"}


def write_checkpoint(root: Path, variant: str) -> None:
    """Write a checkpoint directory without weights for a released architecture, to be loaded with
    --load-format dummy.
    """
    from vllm_omni.model_executor.models.matrix_game.checkpoint import FOLDERS
    from vllm_omni.model_executor.models.matrix_game.config import VARIANTS

    keys = {each.name: len(each.keyboard) for each in VARIANTS}[variant]
    folder = root / next(folder for folder, served in FOLDERS.items() if served == variant)
    folder.mkdir(parents=True)
    action = {"keyboard_dim_in": keys, "enable_mouse": variant != "templerun"}
    config = {"_class_name": "CausalWanModel", "model_type": "i2v", "action_config": action}
    (folder / "config.json").write_text(json.dumps(config))


def session_chunk(
    engine: Any, name: str, args: argparse.Namespace
) -> Callable[[int], Coroutine[Any, Any, dict[str, Any]]]:
    """Return a function that runs the chunk with a given index and returns a record of the chunk's
    arrival time, stage times and frames.
    """
    import torch

    from vllm_omni.inputs import DiffusionParams

    generator = torch.Generator().manual_seed(0)
    image = torch.randint(
        0, 256, (args.height, args.width, 3), dtype=torch.uint8, generator=generator
    )

    async def chunk(index: int) -> dict[str, Any]:
        params = DiffusionParams(
            session_id=name,
            chunk_index=index,
            prompt=args.prompt if index == 0 else None,
            seed=1,
            height=args.height,
            width=args.width,
            actions=args.actions,
        )
        start = dict.fromkeys(("image", *args.image_tensors), image)
        meta, tensors = await run_request(
            engine, params, start if index == 0 else None, f"{name}-{index}"
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


def add_arguments(
    parser: argparse.ArgumentParser, *, name: str, size: tuple[int, int], warm_chunks: int
) -> None:
    """Add the command-line arguments for measuring an interactive world model. `size` is (height,
    width).
    """
    parser.add_argument("--chunks", type=int, default=24)
    parser.add_argument(
        "--warm-chunks", type=int, default=warm_chunks, help="chunks before all is compiled"
    )
    parser.add_argument("--height", type=int, default=size[0])
    parser.add_argument("--width", type=int, default=size[1])
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument(
        "--tiny", action="store_true", help="the tests' tiny model with its own weights"
    )
    add_serving_arguments(parser)
    add_tracing_arguments(parser)
    parser.add_argument("--name", default=name, help=f"name of the result file (default: {name})")
    add_output_arguments(parser)


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
            *(play(engine, f"game{n}", args) for n in range(args.sessions))
        )
        memory = await engine.collective_rpc("device_memory")
        held = await engine.collective_rpc("session_stats")
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
        "variant": args.variant,
        "model_options": options,
        "images": ["image", *args.image_tensors],
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
        "authors_fps": args.authors_fps,
        "stages_ms": {
            name: round(
                statistics.median(sum(record["timings_ms"].get(name, [])) for record in steady), 2
            )
            for name in names
        },
        "first_chunk_timings_ms": records[0]["timings_ms"],
        "device_memory": memory,
        "session_bytes": held[0]["bytes"],
        "kernels": kernels,
        "eager": args.eager,
        **precision_of(args),
    }


def main() -> None:
    from vllm_omni.model_executor.models.registry import get_family

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=tuple(HELD), default="universal")
    add_arguments(parser, name="matrix_game", size=(352, 640), warm_chunks=6)
    args = parser.parse_args()
    held = HELD[args.variant]
    args.actions, args.image_tensors = [held, [], held], ()
    args.prompt, args.authors_fps = None, AUTHORS_FPS
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "game"
        if args.tiny:
            get_family("matrix_game").make_tiny(model, 0, _LAYOUTS[args.variant])
        else:
            write_checkpoint(model, args.variant)
        result = asyncio.run(run(model, args))
    save(args.name, {"result": result}, args)


if __name__ == "__main__":
    main()
