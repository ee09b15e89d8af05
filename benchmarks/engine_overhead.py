# SPDX-License-Identifier: Apache-2.0
"""One chunk's overhead over the model: engine steps, transport of the result, everything between client and runner.

A world that does nothing is served by a real engine (front end, EngineCore and worker are three processes). For
every chunk of five denoise steps the client's wall time is measured from request to unpacked result; the model's own
time (reported for encode, denoise and decode) is subtracted.

    python benchmarks/engine_overhead.py

It restarts itself with GLIBC_TUNABLES=glibc.malloc.hugetlb=1, as the serving guide recommends for servers.
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

sys.path.insert(0, str(Path(__file__).parent))
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
"""12 frames of RGB at these heights and widths: 1.21 MB and 14.38 MB."""
TARGET_MS = {"1.2 MB": 4.0, "14.4 MB": 10.0}


EXECUTORS = {
    "in-process": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
    "mp": "mp",
}
"""in-process: vLLM's default on one GPU (the worker lives in the EngineCore process); mp: a process per worker."""


async def measure(model: Path, height: int, width: int, chunks: int, executor: str) -> dict[str, Any]:
    from vllm_omni.inputs import DiffusionParams

    wall_ms, overhead_ms, result_bytes = [], [], 0
    warm_up = 5
    engine_args = {"enforce_eager": True, "distributed_executor_backend": EXECUTORS[executor]}
    async with running_engine(model, {"height": height, "width": width}, **engine_args) as engine:
        for index in range(chunks + warm_up):
            params = DiffusionParams(session_id="s", chunk_index=index, prompt="nothing" if index == 0 else None)
            start = time.perf_counter()
            meta, tensors = await run_request(engine, params, None, f"r{index}")
            elapsed = (time.perf_counter() - start) * 1e3
            if index >= warm_up:
                model_ms = sum(sum(meta["timings_ms"][stage]) for stage in ("encode", "steps", "decode"))
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
    parser.add_argument("--runs", type=int, default=3, help="engines started per row; the median run is reported")
    parser.add_argument("--executor", choices=list(EXECUTORS), nargs="+", default=list(EXECUTORS))
    add_output_arguments(parser)
    args = parser.parse_args()
    restart_with(HUGE_PAGES)
    from vllm_omni.model_executor.models.registry import get_family

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        get_family("null_world").make_tiny(model, 0, "original")
        for executor in args.executor:
            for name, (height, width) in SIZES.items():
                runs = [asyncio.run(measure(model, height, width, args.chunks, executor)) for _ in range(args.runs)]
                runs.sort(key=lambda run: run["overhead_ms"]["p50"])
                row = {"executor": executor, "result": name, "target_ms": TARGET_MS[name], **runs[len(runs) // 2]}
                rows.append({**row, "p50_of_every_run_ms": [run["overhead_ms"]["p50"] for run in runs]})
    save("engine_overhead", {"environment": HUGE_PAGES, "rows": rows}, args)
    print(
        f"\n{'executor':>12} {'result':>8} {'overhead p50':>13} {'p90':>8} {'p99':>8} {'target':>8}  p50 of every run"
    )
    for row in rows:
        overhead = row["overhead_ms"]
        columns = " ".join(f"{value:8.2f}" for value in (overhead["p90"], overhead["p99"], row["target_ms"]))
        every = ", ".join(f"{value:.2f}" for value in row["p50_of_every_run_ms"])
        print(f"{row['executor']:>12} {row['result']:>8} {overhead['p50']:10.2f} ms {columns}  {every}")


if __name__ == "__main__":
    main()
