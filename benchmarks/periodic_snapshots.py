# SPDX-License-Identifier: Apache-2.0
"""Measure how much periodic snapshots (`omni.snapshot_period_s`) slow down a session's chunks.

    # the tiny LingBot World on this machine
    python benchmarks/periodic_snapshots.py
    python benchmarks/periodic_snapshots.py --height 480 --width 832     # the same with more bytes

One session runs in the real engine without pauses, while the endpoints' own loop
(`PeriodicSnapshots`) saves the session. Blocks of equal length run in pairs, one without and one
with snapshots, and the order alternates from pair to pair. Snapshots every 5 s would cost less than
the random difference between two blocks. The session is therefore saved far more often. The
difference between a pair's blocks is divided by the number of snapshots, and the slowdown for
`--period-s` is computed from this cost per snapshot. CPU time is summed over all processes. Unlike
elapsed time, CPU time hardly depends on other load on the machine.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

sys.path.insert(0, str(Path(__file__).parent))
import psutil
from common import add_output_arguments, run_request, running_engine, save

TARGET_GROWTH_PERCENT = 2.0


def processor_s() -> float:
    """Return the CPU time of this process and all its children, in seconds."""
    own = psutil.Process()
    spent = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(times.user + times.system for times in spent)


async def run(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
    from vllm_omni.entrypoints.realtime.connection.session_engine import SessionEngine
    from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
    from vllm_omni.entrypoints.realtime.sessions.migration import SessionMigration
    from vllm_omni.entrypoints.realtime.sessions.session_manager import SessionManager
    from vllm_omni.entrypoints.staging_directory import StagingDirectory
    from vllm_omni.inputs import DiffusionParams

    omni: dict[str, Any] = {"height": args.height, "width": args.width, "max_sessions": 4}
    image = torch.full((args.height, args.width, 3), 128, dtype=torch.uint8)
    async with running_engine(model, omni, enforce_eager=True) as engine:
        info = StreamInfo.from_vllm_config(engine.vllm_config, model="tiny")
        manager = SessionManager(
            SessionEngine(engine), info, EndpointLimits(), ThreadPoolExecutor(1)
        )
        session = manager.open(("anonymous", "walk"))

        async def chunk() -> None:
            index, first = session.next_chunk, not session.started
            params = DiffusionParams(
                session_id=session.engine_id,
                chunk_index=index,
                prompt="a coast road" if first else None,
                seed=1 if first else None,
                height=args.height,
                width=args.width,
                actions=[["w"], ["w", "j"], []],
            )
            await run_request(engine, params, {"image": image} if first else None, f"walk-{index}")
            session.started, session.next_chunk = True, index + 1

        async def block(seconds: float) -> dict[str, float]:
            processor, start, first = processor_s(), time.perf_counter(), session.next_chunk
            while time.perf_counter() - start < seconds:
                await chunk()
            chunks, wall_s = session.next_chunk - first, time.perf_counter() - start
            return {
                "processor_ms": (processor_s() - processor) / chunks * 1e3,
                "wall_ms": wall_s / chunks * 1e3,
                "chunks": chunks,
            }

        async def with_checkpoints(seconds: float) -> dict[str, float]:
            migration = SessionMigration(
                manager, StagingDirectory(folder), folder / "kept", args.snapshot_period_s
            )
            assert migration.periodic_snapshots is not None and migration.persistent_dir is not None
            written, save_one = [], migration.periodic_snapshots._save

            async def counted(of: Any) -> float:
                written.append(await save_one(of))
                return written[-1]

            migration.periodic_snapshots._save = counted  # type: ignore[method-assign]
            measured = await block(seconds)
            assert migration.periodic_snapshots.task is not None
            migration.periodic_snapshots.task.cancel()
            await asyncio.wait([migration.periodic_snapshots.task])
            (file,) = migration.persistent_dir.folder.glob("*.session.safetensors")
            measured |= {"checkpoints": len(written), "cost_ms": statistics.mean(written) * 1e3}
            measured["file_bytes"] = file.stat().st_size
            file.unlink()
            return measured

        for _ in range(args.warm_up):
            await chunk()
        await with_checkpoints(1.0)  # the worker allocates the memory for copies only once
        pairs = []
        for number in range(args.pairs):
            if number % 2:
                after = await with_checkpoints(args.block_s)
                before = await block(args.block_s)
            else:
                before = await block(args.block_s)
                after = await with_checkpoints(args.block_s)
            pairs.append({"without": before, "with": after})
            print(pairs[-1], file=sys.stderr, flush=True)
    return {
        "size": [args.height, args.width],
        "checkpoint_every_s": round(
            statistics.median(
                pair["with"]["wall_ms"] * pair["with"]["chunks"] / 1e3 / pair["with"]["checkpoints"]
                for pair in pairs
            ),
            2,
        ),
        "engine_held_ms": round(statistics.median(pair["with"]["cost_ms"] for pair in pairs), 2),
        "file_bytes": pairs[-1]["with"]["file_bytes"],
        "checkpoint": {
            name: cost_of_one(pairs, name, args.period_s) for name in ("processor_ms", "wall_ms")
        },
        "period_s": args.period_s,
        "target_growth_percent": TARGET_GROWTH_PERCENT,
        "pairs": pairs,
    }


def cost_of_one(pairs: list[dict[str, Any]], name: str, period_s: float) -> dict[str, float]:
    """Compute, from all pairs of blocks, the milliseconds that one snapshot adds, and the growth in
    chunk time if there is one snapshot every `period_s` seconds.

    In the result, `standard_error` is the standard error of the mean, and `growth_percent_at_most`
    is the growth for the mean plus two standard errors.
    """
    costs = [
        (pair["with"][name] - pair["without"][name])
        * pair["with"]["chunks"]
        / pair["with"]["checkpoints"]
        for pair in pairs
    ]
    mean, error = statistics.mean(costs), statistics.stdev(costs) / len(costs) ** 0.5
    # Chunks run without pauses, so `busy` is the CPU time divided by the elapsed time.
    busy = statistics.median(pair["without"][name] / pair["without"]["wall_ms"] for pair in pairs)
    share_percent = 100 / (period_s * 1e3 * busy)
    return {
        "mean": round(mean, 2),
        "median": round(statistics.median(costs), 2),
        "standard_error": round(error, 2),
        "growth_percent": round(mean * share_percent, 2),
        "growth_percent_at_most": round((mean + 2 * error) * share_percent, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--snapshot-period-s", type=float, default=0.2)
    parser.add_argument(
        "--period-s", type=float, default=5.0, help="what the growth of chunks is told for"
    )
    parser.add_argument("--block-s", type=float, default=5.0, help="length of a block")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument(
        "--warm-up", type=int, default=8, help="chunks before the first block; 7 fill the window"
    )
    parser.add_argument("--name", default="checkpoints", help="name of the result file")
    add_output_arguments(parser)
    args = parser.parse_args()
    from vllm_omni.model_executor.models.registry import get_family

    with tempfile.TemporaryDirectory() as folder:
        get_family("lingbot_world").make_tiny(Path(folder) / "model", 0, "original")
        result = asyncio.run(run(Path(folder) / "model", Path(folder), args))
    save(args.name, {"result": result}, args)


if __name__ == "__main__":
    main()
