# SPDX-License-Identifier: Apache-2.0
"""Measure how many live streams one GPU sustains in the real engine, with FIFO and with
deadline-first scheduling.

    # causal Wan 1.3B, 480x832, exact decoder
    python benchmarks/streams_per_gpu.py --streams 1 2 3 4
    python benchmarks/streams_per_gpu.py --streams 1 2 3 4 5 --decoder tiny
    python benchmarks/streams_per_gpu.py --streams 2 --policies deadline \\
        --omni-options '{"degradations": ["tiny_vae"]}'
    # try it without a GPU
    python benchmarks/streams_per_gpu.py --streams 1 2 --tiny

Random weights with the released shapes give the same times as trained weights. For a run with N
streams, N viewers arrive at random times within one chunk's playing time. A viewer plays its first
chunk as soon as the chunk arrives. The viewer requests the next chunk when the previous chunk has
arrived and the chunk before that has started to play. Each request has the deadline that the
realtime endpoints would send (`PlayClock`), which FIFO ignores. Chunks are not counted until the
window is full. Each policy runs in a separate engine. Results are saved after the run for each
number of streams.

A gap is the time between the playback starts of two consecutive chunks, divided by a chunk's
playing time. A gap of 1.0 means smooth playback, because an early chunk is not played until its
predecessor has finished. `delivery_gap` is the time between two arrivals, including early arrivals.
A `miss` is a chunk that arrived after its deadline. A `degraded` chunk was generated with a
degradation. The streams are sustained if two conditions hold for each stream: the 99th percentile
of its gaps (the largest gap if there are about a dozen) is at most 1.5, and the stream plays at
98 % of its rate or more.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

sys.path.insert(0, str(Path(__file__).parent))
import streaming_wan
from common import (
    HUGE_PAGES,
    add_output_arguments,
    add_serving_arguments,
    close_session,
    precision_of,
    restart_with,
    run_chunks,
    run_request,
    running_engine,
    save,
)

MAX_GAP_CHUNKS = 1.5
MIN_RATE = 0.98
DECODERS = {"exact": "wan", "tiny": "tiny"}


@dataclasses.dataclass(slots=True)
class Chunk:
    """The times in seconds when a chunk was requested, was due, arrived and started to play, and
    its number of frames.

    `meta` is the metadata of the chunk's result.
    """

    requested_s: float
    deadline_s: float
    done_s: float
    shown_s: float
    num_frames: int
    meta: dict[str, Any]


def quantile(values: list[float], fraction: float) -> float:
    """Return the nearest-rank quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))]


class Viewer:
    """Viewer of one stream. The viewer requests its first chunk at `start_s`, and no more chunks
    from `stop_s` on.
    """

    def __init__(
        self, engine: Any, name: str, args: argparse.Namespace, start_s: float, stop_s: float
    ) -> None:
        from vllm_omni.entrypoints.realtime.connection.play_clock import PlayClock

        self.chunks: list[Chunk] = []
        self._engine, self._name, self._args = engine, name, args
        self._start_s, self._stop_s = start_s, stop_s
        self._clock = PlayClock()

    async def watch(self) -> None:
        """Play until enough chunks have arrived or it is time to stop."""
        total = self._args.warm_chunks + self._args.chunks
        request_s = self._start_s
        while len(self.chunks) < total and max(request_s, time.monotonic()) < self._stop_s:
            await asyncio.sleep(max(0.0, request_s - time.monotonic()))
            chunk = await self._send(len(self.chunks))
            if self.chunks:
                before = self.chunks[-1]
                chunk.shown_s = max(
                    chunk.done_s, before.shown_s + before.num_frames / self._args.fps
                )
                request_s = max(chunk.done_s, before.shown_s)
            else:
                request_s = chunk.done_s
            self.chunks.append(chunk)
        await close_session(self._engine, self._name)

    async def _send(self, index: int) -> Chunk:
        from vllm_omni.inputs import DiffusionParams

        args = self._args
        requested_s = time.monotonic()
        due = self._clock.schedule_chunk(
            args.chunk_frames if index else args.first_frames, args.fps, requested_s
        )
        params = DiffusionParams(
            session_id=self._name,
            chunk_index=index,
            prompt=None if index else "a coast road in the evening",
            seed=None if index else 1,
            height=args.height,
            width=args.width,
            deadline_s=due.in_s,
            chunk_period_s=due.period_s,
        )
        meta, results = await run_request(self._engine, params, None, f"{self._name}-{index}")
        done_s = time.monotonic()
        return Chunk(
            requested_s, requested_s + due.in_s, done_s, done_s, len(results["frames"]), meta
        )

    def result(self) -> dict[str, Any]:
        """Return the measurements of the counted chunks. Gaps are relative to the playing time of
        the previous chunk.
        """
        fps, counted = self._args.fps, self.chunks[self._args.warm_chunks - 1 :]
        pairs = list(itertools.pairwise(counted))
        if not pairs:
            return {"chunks": 0}
        periods_s = [before.num_frames / fps for before, _ in pairs]
        frames = sum(before.num_frames for before, _ in pairs)
        return {
            "chunks": len(pairs),
            "fps": round(frames / (counted[-1].shown_s - counted[0].shown_s), 2),
            "first_chunk_s": round(self.chunks[0].done_s - self.chunks[0].requested_s, 3),
            "gaps": [
                round((b.shown_s - a.shown_s) / p, 3)
                for (a, b), p in zip(pairs, periods_s, strict=True)
            ],
            "delivery_gaps": [
                round((b.done_s - a.done_s) / p, 3)
                for (a, b), p in zip(pairs, periods_s, strict=True)
            ],
            "latency_ms": [round((b.done_s - b.requested_s) * 1e3, 1) for _, b in pairs],
            "misses": sum(b.done_s > b.deadline_s for _, b in pairs),
            "degradations": [b.meta.get("degradations", []) for _, b in pairs],
            "decode_ms": [b.meta["timings_ms"].get("decode", [0.0])[0] for _, b in pairs],
        }


def summary(streams: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Summarise the measurements for one number of streams: quantiles over the chunks of all
    streams.
    """
    if not all(stream["chunks"] for stream in streams):
        return {"held": False, "too_slow_to_count": True, "per_stream": streams}
    gaps = [gap for stream in streams for gap in stream["gaps"]]
    delivery_gaps = [gap for stream in streams for gap in stream["delivery_gaps"]]
    latencies_ms = [latency for stream in streams for latency in stream["latency_ms"]]
    worst_p99 = max(quantile(stream["gaps"], 0.99) for stream in streams)
    slowest = min(stream["fps"] for stream in streams)
    return {
        "held": worst_p99 <= MAX_GAP_CHUNKS and slowest >= MIN_RATE * args.fps,
        "gap_p50": quantile(gaps, 0.5),
        "gap_p99": quantile(gaps, 0.99),
        "worst_stream_gap_p99": worst_p99,
        "delivery_gap_p50": quantile(delivery_gaps, 0.5),
        "delivery_gap_p99": quantile(delivery_gaps, 0.99),
        "slowest_stream_fps": slowest,
        "misses": sum(stream["misses"] for stream in streams),
        "degraded": sum(bool(names) for stream in streams for names in stream["degradations"]),
        "chunks": len(gaps),
        "latency_ms_p50": quantile(latencies_ms, 0.5),
        "latency_ms_p99": quantile(latencies_ms, 0.99),
        "per_stream": streams,
    }


async def measure(
    engine: Any, name: str, num_streams: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Run `num_streams` viewers, which are the same for every policy, and return the
    measurements.
    """
    rng = random.Random(f"{args.seed} {num_streams}")
    period_s = args.chunk_frames / args.fps
    now_s = time.monotonic()
    viewers = [
        Viewer(
            engine,
            f"{name}-{number}",
            args,
            now_s + rng.uniform(0, period_s),
            now_s + args.most_seconds,
        )
        for number in range(num_streams)
    ]
    await asyncio.gather(*(viewer.watch() for viewer in viewers))
    row = summary([viewer.result() for viewer in viewers], args)
    return {"streams": num_streams, **row, "wall_s": round(time.monotonic() - now_s, 1)}


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return causal Wan's options under `omni.model`."""
    return {
        "window_frames": args.window,
        "sink_frames": args.sink,
        "video_input": False,
        "decoder": DECODERS[args.decoder],
        **json.loads(args.model_options),
    }


async def measure_policy(
    model: Path, policy: str, args: argparse.Namespace, rows: list[Any], keep: Any
) -> None:
    """Measure one policy in one engine. Add a row for each number of streams, and call `keep` after
    each row.
    """
    omni = {
        "height": args.height,
        "width": args.width,
        "scheduling": policy,
        "max_sessions": max(args.streams) + 1,
        "model": model_options(args),
        **json.loads(args.omni_options),
    }
    loading_s = time.monotonic()
    async with running_engine(
        model,
        omni,
        enforce_eager=args.eager,
        load_format="dummy",
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision_of(args),
    ) as engine:
        start_s = round(time.monotonic() - loading_s, 1)

        def request(name: str, index: int) -> tuple[dict[str, Any], None]:
            first = {"prompt": "a coast road in the evening", "seed": 1} if index == 0 else {}
            return {"height": args.height, "width": args.width, **first}, None

        # One stream at full speed shows the engine's upper bound. This run also compiles every
        # shape.
        alone = await run_chunks(engine, "alone", args.warm_chunks + 2, request)
        await close_session(engine, "alone")
        done_s = [record["done"] for record in alone.records]
        for num_streams in args.streams:
            row = await measure(engine, f"{policy}-{num_streams}", num_streams, args)
            rows.append(
                {
                    "policy": policy,
                    "engine_start_s": start_s,
                    "chunk_alone_ms": round((done_s[-1] - done_s[-2]) * 1e3, 1),
                    "time_to_first_frame_ms": alone.time_to_first_frame_ms,
                    **row,
                }
            )
            keep()


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="How many live streams of causal Wan one GPU holds."
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument(
        "--policies", nargs="+", choices=["fifo", "deadline"], default=["fifo", "deadline"]
    )
    parser.add_argument("--decoder", choices=list(DECODERS), default="exact")
    parser.add_argument("--size", choices=list(streaming_wan.SIZES), default="1.3B")
    parser.add_argument("--tiny", action="store_true", help="a tiny network at 64x96, few chunks")
    parser.add_argument("--fps", type=float, default=16.0, help="what viewers play at")
    parser.add_argument("--chunks", type=int, default=12, help="counted chunks of each stream")
    parser.add_argument(
        "--warm-chunks", type=int, default=3, help="chunks before them, in which the window fills"
    )
    parser.add_argument(
        "--most-seconds",
        type=float,
        default=15.0,
        help="of one number of streams; what came counts",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the times at which viewers come")
    parser.add_argument(
        "--window", type=int, default=9, help="latent frames a chunk sees, itself included"
    )
    parser.add_argument("--sink", type=int, default=3)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    add_serving_arguments(parser)
    parser.set_defaults(dtype="bfloat16")
    parser.add_argument("--name", help="name of the result file (default: streams_per_gpu_DECODER)")
    add_output_arguments(parser)
    return parser


def set_plan(args: argparse.Namespace) -> None:
    """Apply `--tiny`, check the numbers of chunks, and set the number of frames per chunk."""
    if args.tiny:
        args.size, args.height, args.width, args.dtype = "tiny", 64, 96, "float32"
        args.eager = True
        # Any CPU can play all streams of the tiny model.
        args.chunks, args.most_seconds = min(args.chunks, 5), max(args.most_seconds, 60.0)
    if args.warm_chunks < 1 or args.chunks < 1:
        raise SystemExit("--warm-chunks and --chunks must be at least 1")
    from vllm_omni.model_executor.models.causal_wan.config import (
        CausalWanConfig,
        CausalWanOptions,
        resolve_plan,
    )

    options = CausalWanOptions.parse(
        {"window_frames": args.window, "sink_frames": args.sink, **json.loads(args.model_options)}
    )
    plan = resolve_plan(CausalWanConfig(), options)
    args.first_frames, args.chunk_frames = len(plan.pixel_frames(0)), len(plan.pixel_frames(1))


def main() -> None:
    args = make_parser().parse_args()
    restart_with(HUGE_PAGES)
    set_plan(args)
    started_s = time.monotonic()
    rows: list[dict[str, Any]] = []

    def keep() -> None:
        result = {
            "model": f"causal_wan {args.size}",
            "size": [args.height, args.width],
            "decoder": args.decoder,
            **precision_of(args),
            "fps": args.fps,
            "frames_per_chunk": args.chunk_frames,
            "max_gap_chunks": MAX_GAP_CHUNKS,
            "total_s": round(time.monotonic() - started_s, 1),
            "rows": rows,
        }
        save(args.name or f"streams_per_gpu_{args.decoder}", {"result": result}, args)

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "stream"
        streaming_wan.write_checkpoint(model, args.size)
        for policy in args.policies:
            try:
                asyncio.run(measure_policy(model, policy, args, rows, keep))
            # If an error occurs, for example because the sessions do not fit into memory, earlier
            # measurements must not be lost.
            except Exception as error:
                rows.append(
                    {"policy": policy, "held": False, "error": f"{type(error).__name__}: {error}"}
                )
                keep()
    for row in rows:
        figures = row.get("error") or (
            f"held {row['held']}, gap p50 {row.get('gap_p50')} p99 {row.get('gap_p99')}, "
            f"slowest {row.get('slowest_stream_fps')} FPS, misses {row.get('misses')} of "
            f"{row.get('chunks')}"
        )
        print(f"{args.decoder} {row['policy']} {row.get('streams', '')}: {figures}")
    print(f"{time.monotonic() - started_s:.1f} s in all")


if __name__ == "__main__":
    main()
