# SPDX-License-Identifier: Apache-2.0
"""Measure how many idle causal Wan sessions one GPU can serve alongside the playing sessions.

    # causal Wan 1.3B, 480x832, six sessions that play and four times as many that wait
    python benchmarks/suspended_sessions.py --decoder tiny \\
        --model-options '{"preset":"realtime","context_kv":"last_step"}' --kv-cache-dtype fp8
    # try it without a GPU
    python benchmarks/suspended_sessions.py --streams 2 --tiny

Random weights with the released shapes give the same times as trained weights. Regardless of the
device's memory, only the playing sessions and `--spare` additional sessions may be on the device,
so all other sessions wait in host memory. The benchmark has these phases:

1. Sessions play at their own rate while no other session exists (`played_alone`).
2. The waiting sessions are opened one after another. Each of these sessions fills its window.
3. The waiting sessions play two chunks each, one session after another, while no other session
   plays. A session is moved back to the device only for the first of its two chunks, so the
   difference between the times of the two chunks is the cost of the move (`idle`).
4. The sessions of phase 1 play again, and once per second a waiting session plays two chunks
   (`played_beside`, `under_load`).

At the end, a session that never waits repeats the chunks of a session that did wait, and both
sessions must return the same frames.
"""

import argparse
import asyncio
import hashlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# This setting allows `limit_sessions` below to be sent to the worker.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

sys.path.insert(0, str(Path(__file__).parent))
import streaming_wan
from common import (
    HUGE_PAGES,
    close_session,
    precision_of,
    quantiles,
    restart_with,
    run_request,
    running_engine,
    save,
)
from streams_per_gpu import make_parser, measure, model_options, set_plan

PROMPT = "a coast road in the evening"


def limit_sessions(worker: Any, count: int) -> int:
    """Run in the worker: limit the device to the size of `count` live sessions.

    Returns:
        Size of one session in bytes.
    """
    sessions = worker.model_runner.sessions
    nbytes = sessions.nbytes // len(sessions)
    sessions.max_bytes = count * nbytes
    return int(nbytes)


def host_bytes(worker: Any) -> int:
    """Run in the worker: return the resident memory of the worker's process in bytes."""
    import psutil

    return int(psutil.Process().memory_info().rss)


class Waiting:
    """A session that is idle between its chunks."""

    def __init__(self, engine: Any, name: str, seed: int, args: argparse.Namespace) -> None:
        self.name, self.digests = name, list[str]()
        self._engine, self._seed, self._args = engine, seed, args

    async def chunk(self) -> float:
        """Play the next chunk, and return the milliseconds that it took."""
        from vllm_omni.inputs import DiffusionParams

        index = len(self.digests)
        params = DiffusionParams(
            session_id=self.name,
            chunk_index=index,
            prompt=None if index else PROMPT,
            seed=None if index else self._seed,
            height=self._args.height,
            width=self._args.width,
        )
        started_s = time.perf_counter()
        _, results = await run_request(self._engine, params, None, f"{self.name}-{index}")
        took_ms = (time.perf_counter() - started_s) * 1e3
        (frames,) = results.values()
        self.digests.append(hashlib.sha256(frames.numpy().tobytes()).hexdigest()[:16])
        return took_ms


class Resumed:
    """Times of the chunks that required moving a session back to the device, and times of the
    chunks that followed.
    """

    def __init__(self) -> None:
        self.first_ms, self.next_ms = list[float](), list[float]()

    async def play(self, session: Waiting) -> None:
        self.first_ms.append(await session.chunk())
        self.next_ms.append(await session.chunk())

    def result(self) -> dict[str, Any]:
        pairs = zip(self.first_ms, self.next_ms, strict=True)
        return {
            "resumed": len(self.next_ms),
            "resume_ms": quantiles([first - after for first, after in pairs]),
            "resumed_chunk_ms": quantiles(self.first_ms),
            "next_chunk_ms": quantiles(self.next_ms),
        }


async def run(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    (playing,) = args.streams
    waiting = playing * args.times + args.spare
    omni = {
        "height": args.height,
        "width": args.width,
        "scheduling": "deadline",
        "max_sessions": playing + waiting + 1,
        "suspend_idle_s": 0.1,
        "max_suspended_bytes": args.host_bytes,
        "session_idle_s": 3600,
        "model": model_options(args),
        **json.loads(args.omni_options),
    }
    result: dict[str, Any] = {
        "model": f"causal_wan {args.size}",
        "size": [args.height, args.width],
        "decoder": args.decoder,
        **precision_of(args),
        "fps": args.fps,
        "frames_per_chunk": args.chunk_frames,
        "playing": playing,
        "waiting": waiting,
        "chunk_period_ms": 1e3 * args.chunk_frames / args.fps,
    }
    began_s = time.monotonic()

    def note(what: str) -> None:
        print(f"[{time.monotonic() - began_s:6.1f} s] {what}", file=sys.stderr, flush=True)
        result["total_s"] = round(time.monotonic() - began_s, 1)
        if not args.no_save:
            args.out.mkdir(parents=True, exist_ok=True)
            partial = args.out / f"partial_{args.name or 'suspended_sessions'}.json"
            partial.write_text(json.dumps(result))

    async with running_engine(
        model,
        omni,
        enforce_eager=args.eager,
        load_format="dummy",
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision_of(args),
    ) as engine:
        note("the engine is up")
        first = Waiting(engine, "first", 0, args)
        for _ in range(args.warm_chunks + 2):
            result["chunk_alone_ms"] = round(await first.chunk(), 1)
        (nbytes,) = await engine.collective_rpc(limit_sessions, args=(playing + args.spare,))
        result["session_bytes"] = nbytes
        await close_session(engine, "first")

        result["played_alone"] = await measure(engine, "alone", playing, args)
        note(f"{playing} played: held {result['played_alone']['held']}")

        sessions = [Waiting(engine, f"waiting-{seed}", seed, args) for seed in range(waiting)]
        opened_ms = []
        for session in sessions:
            opened_ms.append(await session.chunk())
            for _ in range(args.warm_chunks):
                await session.chunk()
        result["opened_ms"] = quantiles(opened_ms)
        note(f"{waiting} wait")

        idle = Resumed()
        for session in sessions:
            await idle.play(session)
        result["idle"] = idle.result()
        note(f"resumed: {result['idle']['resume_ms']}")

        loaded, stats = Resumed(), dict[str, Any]()

        async def resume_some() -> None:
            await asyncio.sleep(2.0)  # wait until the sessions play
            for session in sessions:
                await asyncio.sleep(1.0)
                await loaded.play(session)
                (now,) = await engine.collective_rpc("session_stats")
                if now["sessions"] >= stats.get("sessions", 0):
                    stats.update(now)

        resuming = asyncio.create_task(resume_some())
        result["played_beside"] = await measure(engine, "beside", playing, args)
        resuming.cancel()
        await asyncio.gather(resuming, return_exceptions=True)
        result["under_load"] = loaded.result() if loaded.next_ms else None
        stats.pop("chunks", None)
        result["stats"] = stats
        result["suspended_per_playing"] = stats["suspended"] / playing
        result["device_memory"] = await engine.collective_rpc("device_memory")
        result["worker_resident_bytes"] = await engine.collective_rpc(host_bytes)
        note(f"{playing} played beside them: held {result['played_beside']['held']}")

        twin = Waiting(engine, "twin", 0, args)
        for _ in sessions[0].digests:
            await twin.chunk()
        result["bit_identical"] = twin.digests == sessions[0].digests
        result["compared_chunks"] = len(twin.digests)
        note(f"bit-identical: {result['bit_identical']}")
    return result


def main() -> None:
    parser = make_parser()
    parser.description = __doc__.splitlines()[0]
    parser.set_defaults(streams=[6], decoder="tiny")
    parser.add_argument("--times", type=int, default=4, help="waiting sessions for each that plays")
    parser.add_argument("--spare", type=int, default=1, help="sessions for which there is room")
    parser.add_argument("--host-bytes", type=int, default=64 << 30, help="omni.max_suspended_bytes")
    args = parser.parse_args()
    restart_with(HUGE_PAGES)
    set_plan(args)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "stream"
        streaming_wan.write_checkpoint(model, args.size)
        result = asyncio.run(run(model, args))
    save(args.name or "suspended_sessions", {"result": result}, args)


if __name__ == "__main__":
    main()
