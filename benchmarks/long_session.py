# SPDX-License-Identifier: Apache-2.0
"""Check that a session's chunk time and memory do not grow once its window is full.

The last chunks of a long session are compared with its early chunks.

    python benchmarks/long_session.py                         # 200 chunks of the tiny world
    python benchmarks/long_session.py --chunks 500

The script prints the median time of the last ten chunks divided by the median time of chunks 20-30.
It also prints the session's size in bytes at both points; the two sizes must be equal.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, run_request, running_engine, save

TARGET_RATIO = 1.05


async def run(model: Path, chunks: int, height: int, width: int) -> dict[str, object]:
    import torch

    from vllm_omni.inputs import DiffusionParams

    wall_ms, session_bytes, digests = [], [], set()
    keys = [[["w"]] * 3, [["w", "j"]] * 3, [["d"]] * 3, [["l"]] * 3]
    image = torch.full((height, width, 3), 128, dtype=torch.uint8)
    async with running_engine(
        model, {"height": height, "width": width}, enforce_eager=True
    ) as engine:
        for index in range(chunks):
            first = index == 0
            params = DiffusionParams(
                session_id="long",
                chunk_index=index,
                prompt="a walk without end" if first else None,
                seed=1 if first else None,
                actions=keys[index % len(keys)],
            )
            start = time.perf_counter()
            _, tensors = await run_request(
                engine, params, {"image": image} if first else None, f"r{index}"
            )
            wall_ms.append((time.perf_counter() - start) * 1e3)
            digests.add(hash(tensors["frames"].numpy().tobytes()))
            session_bytes.append((await engine.collective_rpc("session_stats"))[0]["bytes"])
    early, late = statistics.median(wall_ms[20:30]), statistics.median(wall_ms[-10:])
    return {
        "chunks": chunks,
        "size": [height, width],
        "different_chunks": len(digests),
        "early_ms": round(early, 3),
        "late_ms": round(late, 3),
        "ratio": round(late / early, 4),
        "target_ratio": TARGET_RATIO,
        "session_bytes_early": session_bytes[20],
        "session_bytes_late": session_bytes[-1],
        "bytes_constant": len(set(session_bytes[20:])) == 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument(
        "--model", type=Path, help="a checkpoint directory (default: a tiny LingBot World)"
    )
    parser.add_argument("--height", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    add_output_arguments(parser)
    args = parser.parse_args()
    from vllm_omni.model_executor.models.registry import get_family

    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            model = Path(folder) / "world"
            get_family("lingbot_world").make_tiny(model, 0, "original")
        result = asyncio.run(run(model, args.chunks, args.height, args.width))
    save("long_session", {"result": result}, args)
    print(
        f"\nchunk time {result['early_ms']} ms -> {result['late_ms']} ms, ratio {result['ratio']} "
        f"(target <= {TARGET_RATIO}); session bytes {result['session_bytes_early']} -> "
        f"{result['session_bytes_late']}"
    )


if __name__ == "__main__":
    main()
