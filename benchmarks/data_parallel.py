# SPDX-License-Identifier: Apache-2.0
"""Compare how many sessions fit on one rank and on several data-parallel ranks.

All ranks have the same limits.

    # the tiny LingBot World, one and two ranks, without a GPU
    python benchmarks/data_parallel.py

Sessions are started one after another, as an endpoint starts them, until the engine responds with
`capacity`. All admitted sessions then generate one more chunk at the same time. Sessions are
admitted by size: `omni.max_session_bytes` limits their total bytes on each rank.
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
# Without this variable, all ranks would be bound to the same cores.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, running_engine, save

HEIGHT, WIDTH = 64, 96


async def fill(model: Path, num_ranks: int, max_session_bytes: int) -> dict[str, Any]:
    """Start sessions until no more fit. Return each rank's sessions and bytes, and the time that
    all sessions together take to generate one chunk each.
    """
    import numpy as np

    from vllm_omni.entrypoints.engine.client import OmniEngine
    from vllm_omni.entrypoints.engine.session_placement import SessionPlacement
    from vllm_omni.inputs import DiffusionParams
    from vllm_omni.outputs import RequestFailed

    image = np.full((HEIGHT, WIDTH, 3), 128, np.uint8)
    omni = {
        "height": HEIGHT,
        "width": WIDTH,
        "max_sessions": 1000,
        "max_session_bytes": max_session_bytes,
    }

    def chunk(number: int, index: int) -> DiffusionParams:
        first = (
            {"prompt": "a coast road", "seed": number, "height": HEIGHT, "width": WIDTH}
            if index == 0
            else {}
        )
        return DiffusionParams(
            session_id=f"s{number}", chunk_index=index, actions=[["w"], ["w"], ["w"]], **first
        )

    async with running_engine(
        model, omni, enforce_eager=True, data_parallel_size=num_ranks
    ) as client:
        engine = OmniEngine(client, SessionPlacement(num_ranks))
        held = 0
        while True:
            try:
                await engine.run_request(chunk(held, 0), {"image": image})
            except RequestFailed as failure:
                if failure.code != "capacity":
                    raise
                break
            held += 1
        start = time.perf_counter()
        await asyncio.gather(*(engine.run_request(chunk(number, 1), {}) for number in range(held)))
        elapsed_s = time.perf_counter() - start
        stats = await engine.session_stats()
    return {
        "sessions": held,
        "of_each_rank": [rank["sessions"] for rank in stats],
        "bytes_of_each_rank": [rank["bytes"] for rank in stats],
        "chunks_per_s_of_all": round(held / elapsed_s, 2),
    }


def main() -> None:
    args = make_parser().parse_args()
    from vllm_omni.model_executor.models.registry import get_family

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "world"
        get_family("lingbot_world").make_tiny(model, 0, "original")
        filled = {
            str(count): asyncio.run(fill(model, count, args.max_session_bytes))
            for count in (1, args.ranks)
        }
    ratio = round(filled[str(args.ranks)]["sessions"] / filled["1"]["sessions"], 3)
    result = {
        "max_session_bytes": args.max_session_bytes,
        "ranks": filled,
        "ratio_of_sessions": ratio,
    }
    save("data_parallel", {"result": result}, args)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--ranks", type=int, default=2, help="compared with one (default: %(default)s)"
    )
    parser.add_argument(
        "--max-session-bytes",
        type=int,
        default=40 << 20,
        help="of each rank (default: %(default)s)",
    )
    add_output_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
