# SPDX-License-Identifier: Apache-2.0
"""Measure, on a CPU, the demo world that ships with the package.

The benchmark reports the engine's elapsed time and CPU time per chunk.

    python benchmarks/demo_world.py
    python benchmarks/demo_world.py --chunks 40

`chunk_interval_ms` is the median time between two results of one session. Other programs on the
same cores increase this time. `processor_ms` is the CPU time per chunk, summed over all engine
processes. `vllm-omni bench --check` compares `processor_ms`, because other programs hardly affect
this value.
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, run_request, running_engine, save


def processor_s() -> float:
    """Return the CPU time of this process's children, in seconds."""
    import psutil

    total = 0.0
    for child in psutil.Process().children(recursive=True):
        times = child.cpu_times()
        total += times.user + times.system
    return total


async def run(chunks: int, warm_chunks: int) -> dict[str, object]:
    import torch

    from vllm_omni.inputs import DiffusionParams
    from vllm_omni.worlds import village_checkpoint
    from vllm_omni.worlds.description import read_description, with_defaults

    village = village_checkpoint()
    description = read_description(village)
    omni = with_defaults({}, description)["omni"]
    image = torch.full((omni["height"], omni["width"], 3), 128, dtype=torch.uint8)
    ends_s, frames = [], 0
    async with running_engine(village, omni) as engine:
        for index in range(warm_chunks + chunks):
            first = index == 0
            params = DiffusionParams(
                session_id="village",
                chunk_index=index,
                prompt="the village" if first else None,
                seed=1 if first else None,
                actions=[["w"]],  # one latent frame per chunk
            )
            _, tensors = await run_request(
                engine, params, {"image": image} if first else None, f"r{index}"
            )
            ends_s.append(time.perf_counter())
            frames = len(tensors["frames"])
            if index + 1 == warm_chunks:
                before_s = processor_s()
        spent_s = processor_s() - before_s
    intervals_ms = [
        1e3 * (after - before)
        for before, after in zip(ends_s[warm_chunks - 1 :], ends_s[warm_chunks:], strict=False)
    ]
    interval_ms = statistics.median(intervals_ms)
    return {
        "size": [omni["height"], omni["width"]],
        "chunks": chunks,
        "frames_per_chunk": frames,
        "chunk_interval_ms": round(interval_ms, 1),
        "shortest_chunk_ms": round(min(intervals_ms), 1),
        "fps": round(1e3 * frames / interval_ms, 1),
        "processor_ms": round(1e3 * spent_s / chunks, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--warm-chunks", type=int, default=8, help="default: %(default)s")
    add_output_arguments(parser)
    args = parser.parse_args()
    save("demo_world", {"result": asyncio.run(run(args.chunks, args.warm_chunks))}, args)


if __name__ == "__main__":
    main()
