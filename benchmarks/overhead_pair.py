# SPDX-License-Identifier: Apache-2.0
"""Overhead of two checkouts of this package side by side: engine_overhead.py's figure, where a machine is not quiet.

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/overhead_pair.py /tmp/before

Both engines live at once and take turns, some chunks each, in random order: other work on the machine slows both alike.
Only one is at work at a time. Reported are the medians over all chunks, and the median of the ratio (this checkout
against the other) of two neighbouring blocks' medians.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

sys.path.insert(0, str(Path(__file__).parent))
from common import HUGE_PAGES, add_output_arguments, quantiles, run_request, running_engine, save
from engine_overhead import EXECUTORS, SIZES

HERE = Path(__file__).parents[1]
WARM_UP = 2
"""Chunks at the start of a block that do not count: the other engine was at work before."""


class Arm:
    """An engine of one checkout's package, in a process of its own; it runs as many chunks as it is asked to."""

    def __init__(self, checkout: Path, executor: str, size: tuple[int, int]) -> None:
        self.checkout = checkout
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", executor, *map(str, size), str(checkout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**HUGE_PAGES, **os.environ, "PYTHONPATH": str(checkout)},
        )

    def run(self, chunks: int) -> list[float]:
        """Overhead of each, in milliseconds."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(chunks, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("overhead "):
                found: list[float] = json.loads(line.removeprefix("overhead "))
                return found
        raise RuntimeError(f"the engine of {self.checkout} ended with status {self._process.wait()}")

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=60)


async def serve(executor: str, height: int, width: int, checkout: Path) -> None:
    """One arm: reads numbers of chunks from stdin until it closes, prints the overheads."""
    import vllm_omni
    from vllm_omni.inputs import DiffusionParams
    from vllm_omni.model_executor.models.registry import get_family

    assert Path(vllm_omni.__file__).resolve().is_relative_to(checkout.resolve()), (
        f"{vllm_omni.__file__} is not of {checkout}"
    )
    engine_args = {"enforce_eager": True, "distributed_executor_backend": EXECUTORS[executor]}
    with tempfile.TemporaryDirectory() as folder:
        model, indices = Path(folder), itertools.count()
        get_family("null_world").make_tiny(model, 0, "original")
        async with running_engine(model, {"height": height, "width": width}, **engine_args) as engine:
            while line := await asyncio.to_thread(sys.stdin.readline):
                found = []
                for index in itertools.islice(indices, int(line)):
                    prompt = "nothing" if index == 0 else None
                    params = DiffusionParams(session_id="s", chunk_index=index, prompt=prompt)
                    start = time.perf_counter()
                    meta, _ = await run_request(engine, params, None, f"r{index}")
                    elapsed = (time.perf_counter() - start) * 1e3
                    found.append(elapsed - sum(sum(meta["timings_ms"][name]) for name in ("encode", "steps", "decode")))
                print("overhead", json.dumps(found), flush=True)


def pair(before: Path, executor: str, size: tuple[int, int], blocks: int, chunks: int) -> dict[str, Any]:
    arms = {"before": Arm(before, executor, size), "after": Arm(HERE, executor, size)}
    found: dict[str, list[list[float]]] = {name: [] for name in arms}
    try:
        for arm in arms.values():
            arm.run(10)
        for _ in range(blocks):
            for name in random.sample(list(arms), 2):
                found[name].append(arms[name].run(WARM_UP + chunks)[WARM_UP:])
    finally:
        for arm in arms.values():
            arm.close()
    medians = {name: [statistics.median(block) for block in found[name]] for name in arms}
    ratios = [after / before for before, after in zip(medians["before"], medians["after"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        **{name: quantiles([ms for block in found[name] for ms in block]) for name in arms},
        **{f"block_medians_ms_{name}": [round(ms, 3) for ms in medians[name]] for name in arms},
        "ratio": {"p50": round(middle, 3), "p25": round(low, 3), "p75": round(high, 3)},
    }


def commit_of(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        executor, height, width, checkout = sys.argv[2:]
        asyncio.run(serve(executor, int(height), int(width), Path(checkout)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--chunks", type=int, default=15, help="of a block")
    parser.add_argument("--executor", choices=list(EXECUTORS), nargs="+", default=list(EXECUTORS))
    add_output_arguments(parser)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    rows = []
    for executor in args.executor:
        for name, size in SIZES.items():
            row = {"executor": executor, "result": name, **pair(args.before, executor, size, args.blocks, args.chunks)}
            rows.append(row)
            print(f"{executor}, {name}: {row['before']['p50']}, {row['after']['p50']} ms, ratio {row['ratio']}")
    commits = {"before": commit_of(args.before), "after": commit_of(HERE)}
    loads = [round(load, 1), round(os.getloadavg()[0], 1)]
    result = {"environment": HUGE_PAGES, "commits": commits, "blocks": args.blocks, "load_average": loads, "rows": rows}
    save("overhead_pair", result, args)


if __name__ == "__main__":
    main()
