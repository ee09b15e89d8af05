# SPDX-License-Identifier: Apache-2.0
"""Compare FIFO with deadline-first scheduling in virtual time, and measure how long a decision
takes in the real scheduler.

    python benchmarks/scheduling.py            # both; no GPU needed

The replay uses the step times measured on an H200 for causal Wan 2.1 1.3B at 480x832, with 4 steps
and a clean-context pass. A chunk of 12 frames takes 399 ms: 237 ms for five steps, 150 ms for the
decode and 12 ms for the encode and other work. Arrival times come from a seeded random generator. A
stream is sustained if the 99th percentile of the gaps between its chunks is at most 1.5 times a
chunk's playing time. The decision time is measured with the real `StreamBatchScheduler`, on top of
vLLM's scheduler, and a simulated worker.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, quantiles, save

CHUNK_S = 12 / 16
"""Playing time of a chunk at 16 frames per second, in seconds."""
STEPS = 5


def trace(kind: str, streams: int, seed: int) -> list[Any]:
    """Return the viewers of one scenario. The viewers arrive within the first three seconds, in
    random order.
    """
    from scheduler_simulator import Viewer

    rng = random.Random(seed)
    viewers = []
    for number in range(streams):
        slow = kind == "mixed_rates" and number % 2 == 1
        period_s = 4 * CHUNK_S if slow else CHUNK_S
        viewers.append(Viewer(rng.uniform(0, 3), 50 if slow else 200, period_s, STEPS))
    if kind == "background_jobs":
        # Four jobs without a viewer generate one-shot videos one after another. Each video takes
        # fifty steps.
        viewers += [Viewer(1.0, 4, None, 50) for _ in range(4)]
    return viewers


SCENARIOS = {
    "equal_streams": "streams of 16 frames a second, exact decoder",
    "tiny_decoder": "the same with the tiny decoder (150 ms become 6 ms)",
    "mixed_rates": "tiny decoder; every second stream plays 4 frames a second",
    "background_jobs": "tiny decoder; beside the streams, 16 video jobs of 50 steps without "
    "deadlines, four at a time",
    "hiccups": "tiny decoder; every ten seconds a step takes 300 ms longer",
    "refusing": "streams that cannot be held are refused",
    "shared_steps": "a model whose step takes 40 ms plus 3 ms a stream: batches pay",
}


def replay(kind: str, streams: int, seeds: int) -> dict[str, Any]:
    from scheduler_simulator import Load, quantile, simulate

    from vllm_omni.core.sched.policy import StepCosts

    costs = StepCosts(step_s=0.0003, size_s=0.2370 / STEPS, first_s=0.012, last_s=0.150)
    most = 4
    if kind in ("tiny_decoder", "mixed_rates", "background_jobs", "hiccups"):
        costs = StepCosts(costs.step_s, costs.size_s, costs.first_s, 0.006)
    elif kind == "shared_steps":
        costs, most = StepCosts(0.040, 0.003, 0.001, 0.004), 32
    row: dict[str, Any] = {"streams": streams}
    for policy in ("fifo", "deadline"):
        outcomes = []
        for seed in range(seeds):
            load = Load(
                trace(kind, streams, seed),
                costs,
                most=most,
                seed=seed,
                hiccups_per_s=0.1 if kind == "hiccups" else 0.0,
                hiccup_s=0.3,
                refuse=kind == "refusing",
            )
            outcomes += simulate(load, policy)  # type: ignore[arg-type]
        watched = [outcome for outcome in outcomes if outcome.viewer.period_s is not None]
        served = [outcome for outcome in watched if not outcome.refused]
        gaps = [gap / outcome.viewer.period_s for outcome in served for gap in outcome.gaps_s]
        row[policy] = {
            "streams_held": round(sum(outcome.holds() for outcome in watched) / seeds, 2),
            "refused": round((len(watched) - len(served)) / seeds, 2),
            "gap_chunks_p50": round(quantile(gaps, 0.5), 3),
            "gap_chunks_p99": round(quantile(gaps, 0.99), 3),
            "first_chunk_s_p50": round(
                quantile([o.first_s for o in served if o.first_s is not None], 0.5), 3
            ),
            "deadline_misses": round(
                sum(outcome.misses for outcome in served)
                / max(1, sum(outcome.delivered for outcome in served)),
                4,
            ),
        }
        jobs = [outcome for outcome in outcomes if outcome.viewer.period_s is None]
        if jobs:
            row[policy]["job_s"] = round(quantile([outcome.last_s for outcome in jobs], 0.5), 1)
    return row


def make_scheduler(model: Path, omni: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_omni.core.sched import StreamBatchScheduler

    args = EngineArgs(
        model=str(model),
        config_format="omni",
        skip_tokenizer_init=True,
        enforce_eager=True,
        additional_config={"omni": omni},
    )
    config = args.create_engine_config()
    config.scheduler_config.enable_chunked_prefill = False
    config.cache_config.num_gpu_blocks = 1
    return StreamBatchScheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )


def decisions(model: Path, omni: dict[str, Any], streams: int, num_steps: int) -> dict[str, Any]:
    """Measure the time of `schedule()`, the part of that time spent in this package's code, and the
    time of `update_from_output()`, with two queued chunks per stream.
    """
    import torch
    from vllm.v1.request import Request

    from vllm_omni.core.sched import stream_batch_scheduler
    from vllm_omni.core.step_protocol import ChunkProgress, StepOutput
    from vllm_omni.inputs import DiffusionParams

    scheduler = make_scheduler(model, {**omni, "max_sessions": streams})
    rng = random.Random(0)
    chunks = [0] * streams

    def send(number: int) -> None:
        params = DiffusionParams(
            session_id=f"s{number}",
            chunk_index=chunks[number],
            deadline_s=rng.uniform(0.2, 2.0),
            chunk_period_s=CHUNK_S,
        )
        name = f"{number}-{chunks[number]}"
        chunks[number] += 1
        scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=[0],
                sampling_params=None,
                pooling_params=params.to_pooling_params(),
            )
        )

    for number in range(streams):
        send(number)
        send(number)
    done: dict[str, int] = {}
    schedule_ms, schedule_cpu_ms, update_ms, ours_ms, ours_cpu_ms = [], [], [], [], []
    pick = scheduler._choose

    def timed_choose(*args: Any) -> None:
        start, cpu = time.perf_counter(), time.thread_time()
        pick(*args)
        ours_cpu_ms.append((time.thread_time() - cpu) * 1e3)
        ours_ms.append((time.perf_counter() - start) * 1e3)

    scheduler._choose = timed_choose
    assert stream_batch_scheduler.StreamBatchScheduler is type(scheduler)
    empty = torch.zeros(1, dtype=torch.uint8)
    for _ in range(num_steps):
        start, cpu = time.perf_counter(), time.thread_time()
        output = scheduler.schedule()
        schedule_cpu_ms.append((time.thread_time() - cpu) * 1e3)
        schedule_ms.append((time.perf_counter() - start) * 1e3)
        names = list(output.num_scheduled_tokens)
        for name in names:
            done[name] = done.get(name, 0) + 1
        progress = {
            name: ChunkProgress(done[name], STEPS, 99840) for name in names if done[name] < STEPS
        }
        response = StepOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            pooler_output=[None if name in progress else empty for name in names],
            progress=progress,
        )
        start = time.perf_counter()
        scheduler.update_from_output(output, response)
        update_ms.append((time.perf_counter() - start) * 1e3)
        for name in names:
            if name not in progress:
                send(int(name.split("-")[0]))
    warm = num_steps // 10
    return {
        "omni": omni,
        "live_streams": streams,
        "queued_requests": 2 * streams,
        "steps": num_steps,
        "schedule_ms": quantiles(schedule_ms[warm:]),
        "schedule_cpu_ms": quantiles(schedule_cpu_ms[warm:]),
        "policy_part_ms": quantiles(ours_ms[warm:]) if ours_ms else None,
        "policy_part_cpu_ms": quantiles(ours_cpu_ms[warm:]) if ours_cpu_ms else None,
        "update_from_output_ms": quantiles(update_ms[warm:]),
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="FIFO against deadline-first, and the cost of a decision."
    )
    parser.add_argument("--seeds", type=int, default=10, help="traces per point of a curve")
    parser.add_argument("--most-streams", type=int, default=6)
    parser.add_argument("--steps", type=int, default=5000, help="scheduler steps that are timed")
    parser.add_argument("--live", type=int, default=64, help="live streams of the timed scheduler")
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()

    from vllm_omni.model_executor.models.registry import get_family

    curves: dict[str, Any] = {}
    for kind, what in SCENARIOS.items():
        counts = [4, 8, 16, 24, 32] if kind == "shared_steps" else range(1, args.most_streams + 1)
        curves[kind] = {
            "what": what,
            "curve": [replay(kind, count, args.seeds) for count in counts],
        }
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "null"
        get_family("null_world").make_tiny(model, 0, "original")
        timed = [
            decisions(model, {"scheduling": "fifo"}, args.live, args.steps),
            decisions(model, {"scheduling": "deadline"}, args.live, args.steps),
            decisions(
                model,
                {"scheduling": "deadline", "max_requests_per_step": 16},
                args.live,
                args.steps,
            ),
        ]
    save("scheduling", {"chunk_playing_time_s": CHUNK_S, "replay": curves, "decision": timed}, args)


if __name__ == "__main__":
    main()
