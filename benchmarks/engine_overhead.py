# SPDX-License-Identifier: Apache-2.0
"""Measure the engine's overhead per chunk, which excludes the model's own time.

The overhead consists of engine steps, transport of the result, and everything else between client
and runner.

A real engine serves a world model that does almost no work. The front end and EngineCore are
separate processes; with the `mp` executor, the worker is a third process. For every chunk of five
denoise steps, the client measures the elapsed time from the request to the unpacked result, and
subtracts the time that the engine reports for encode, denoise and decode.

The same run also measures two baselines: five engine steps of stock vLLM (one pooling request of a
tiny language model, minus the time of its forward passes), and one plain copy of the result's bytes
between two processes. `ratio_to_stock` is the overhead divided by the sum of the two baselines.

    python benchmarks/engine_overhead.py

The script restarts itself with GLIBC_TUNABLES=glibc.malloc.hugetlb=1, which the serving guide
recommends for servers.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send functions to workers

sys.path.insert(0, str(Path(__file__).parent))
import stock_engine
from common import (
    HUGE_PAGES,
    add_output_arguments,
    quantiles,
    restart_with,
    run_request,
    running_engine,
    save,
)

SIZES = {"1.2 MB": (200, 168), "14.4 MB": (480, 832)}
"""Height and width of the frames in each measured result. 12 RGB frames of these sizes take up 1.21
MB and 14.38 MB.
"""
TARGET_RATIO = 1.3


EXECUTORS = {
    "in-process": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "mp": "mp",
}
"""Executors to measure. `in-process` is vLLM's default on one GPU, where the worker runs in the
EngineCore process. `mp` uses one process per worker.
"""


async def measure(
    model: Path, height: int, width: int, chunks: int, executor: str
) -> dict[str, Any]:
    from vllm_omni.inputs import DiffusionParams

    wall_ms, overhead_ms, result_bytes = [], [], 0
    warm_up = 5
    engine_args = {"enforce_eager": True, "distributed_executor_backend": EXECUTORS[executor]}
    async with running_engine(model, {"height": height, "width": width}, **engine_args) as engine:
        for index in range(chunks + warm_up):
            params = DiffusionParams(
                session_id="s", chunk_index=index, prompt="nothing" if index == 0 else None
            )
            start = time.perf_counter()
            meta, tensors = await run_request(engine, params, None, f"r{index}")
            elapsed = (time.perf_counter() - start) * 1e3
            if index >= warm_up:
                model_ms = sum(
                    sum(meta["timings_ms"][stage]) for stage in ("encode", "steps", "decode")
                )
                wall_ms.append(elapsed)
                overhead_ms.append(elapsed - model_ms)
                result_bytes = tensors["frames"].numel()
    return {
        "result_bytes": result_bytes,
        "steps": 5,
        "chunks": chunks,
        "wall_ms": quantiles(wall_ms),
        "overhead_ms": quantiles(overhead_ms),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument(
        "--runs",
        type=int,
        default=3,
        help="starts of both engines; that of median ratio is reported",
    )
    parser.add_argument("--executor", choices=list(EXECUTORS), nargs="+", default=list(EXECUTORS))
    add_output_arguments(parser)
    args = parser.parse_args()
    restart_with(HUGE_PAGES)
    from vllm_omni.model_executor.models.registry import get_family

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "null_world"
        get_family("null_world").make_tiny(model, 0, "original")
        for executor in args.executor:
            by_size: dict[str, list[dict[str, Any]]] = {name: [] for name in SIZES}
            for run in range(args.runs):
                stock_folder = Path(folder) / f"stock_{executor}_{run}"
                stock_ms = asyncio.run(
                    stock_engine.five_steps_ms(stock_folder, args.chunks, EXECUTORS[executor])
                )
                for name, (height, width) in SIZES.items():
                    found = asyncio.run(measure(model, height, width, args.chunks, executor))
                    copied = quantiles(stock_engine.copy_ms(found["result_bytes"], args.chunks))
                    steps = quantiles(stock_ms)
                    ratio = found["overhead_ms"]["p50"] / (steps["p50"] + copied["p50"])
                    compared = {
                        "stock_five_steps_ms": steps,
                        "copy_ms": copied,
                        "ratio_to_stock": round(ratio, 3),
                    }
                    by_size[name].append(found | compared)
            for name, runs in by_size.items():
                runs.sort(key=lambda run: run["ratio_to_stock"])
                row = {
                    "executor": executor,
                    "result": name,
                    "target_ratio": TARGET_RATIO,
                    **runs[len(runs) // 2],
                }
                every = {
                    "of_every_run": [
                        [run["overhead_ms"]["p50"], run["ratio_to_stock"]] for run in runs
                    ]
                }
                rows.append(row | every)
    save("engine_overhead", {"environment": HUGE_PAGES, "rows": rows}, args)
    print("\nexecutor, result: overhead p50, stock's five steps + a copy, ratio (of every run)")
    for row in rows:
        stock, copied = row["stock_five_steps_ms"]["p50"], row["copy_ms"]["p50"]
        print(
            f"{row['executor']}, {row['result']}: {row['overhead_ms']['p50']:.2f} ms, {stock:.2f} "
            f"+ {copied:.2f} ms,"
            f" {row['ratio_to_stock']} "
            f"({', '.join(str(ratio) for _, ratio in row['of_every_run'])})"
        )


if __name__ == "__main__":
    main()
