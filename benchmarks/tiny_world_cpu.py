# SPDX-License-Identifier: Apache-2.0
"""Measure the elapsed time and CPU time per chunk of a small LingBot World on a CPU.

Chunks are measured in this process and, with `--engine`, also in the real engine.

    # both chunk lengths, both decoders, in process
    python benchmarks/tiny_world_cpu.py
    # also through the engine: its overhead per step
    python benchmarks/tiny_world_cpu.py --engine
    python benchmarks/tiny_world_cpu.py --model DIR --size 160x96

Without `--model`, the script uses random weights with the shipped world's sizes. Random weights
take the same time as trained weights. The script prints one JSON object. `wall_ms` and `cpu_ms`
(summed over all threads) are measured in the steady state, when the window is full and the
conditioning has settled. On a busy machine, use `min` and `cpu_ms`.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout contains only JSON

sys.path.insert(0, str(Path(__file__).parent))
from common import fast_paths, run_request, running_engine

SIZES: dict[str, Any] = {
    "dim": 256,
    "num_heads": 4,
    "num_layers": 6,
    "ffn_dim": 1024,
    "freq_dim": 64,
    "text_dim": 32,
    "text_len": 64,
    "sliding_window_num_frames": 18,
    "sink_size": 3,
    "num_frames_per_block": 3,
}
VAE_WIDTH = 12
TINY_VAE_CHANNELS = (64, 32, 16, 16)
KEYS = [["w"], ["w", "l"], ["w"]]


def write_world(out: Path) -> None:
    from vllm_omni.model_executor.models.wan.architecture import VAEConfig
    from vllm_omni.testing.tiny.lingbot_world import write_random_world

    write_random_world(out, 0, SIZES, VAEConfig(base_dim=VAE_WIDTH), TINY_VAE_CHANNELS)


class Clocks:
    """Elapsed time and CPU time of named stages, for each chunk."""

    def __init__(self) -> None:
        self.chunks: list[dict[str, list[float]]] = []

    def start_chunk(self) -> None:
        self.chunks.append(defaultdict(lambda: [0.0, 0.0]))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        entry = self.chunks[-1][name]
        entry[0] += 1e3 * (time.perf_counter() - wall)
        entry[1] += 1e3 * (time.process_time() - cpu)

    def summary(self, steady: int) -> dict[str, Any]:
        chunks = self.chunks[-steady:]
        parts = {name: [chunk[name] for chunk in chunks] for name in chunks[0]}
        parts["chunk"] = [
            [sum(pair[i] for pair in chunk.values()) for i in (0, 1)] for chunk in chunks
        ]
        return {
            name: {
                f"{clock}_ms": spread([pair[i] for pair in pairs])
                for i, clock in enumerate(("wall", "cpu"))
            }
            for name, pairs in parts.items()
        }


def spread(values: list[float]) -> dict[str, float]:
    return {"min": round(min(values), 1), "median": round(statistics.median(values), 1)}


def in_process(
    model: Path, size: tuple[int, int], options: dict[str, Any], chunks: int, steady: int
) -> dict[str, Any]:
    """Run the model in this process in the same way as the runner does. `options` are the options
    under `omni.model`.
    """
    import torch

    from vllm_omni.config import OmniConfig
    from vllm_omni.inputs import DiffusionParams
    from vllm_omni.model_executor.interfaces import DiffusionRequest
    from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
    from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout, hf_config
    from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld, WorldSetup

    width, height = size
    layout = find_layout(model)
    omni = OmniConfig(height=height, width=width, model=options)
    setup = WorldSetup.of_checkpoint(
        hf_config(model)["lingbot_world"], layout, omni, torch.float32, ParallelContext()
    )
    world = LingBotWorld(setup)
    world.load_checkpoint(layout)
    session = world.new_session(DiffusionParams(session_id="a", prompt="a village"))
    image = torch.randint(
        0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    clocks = Clocks()
    settled_at = None
    with torch.inference_mode():
        for index in range(chunks):
            keys = (KEYS * 8)[: len(session.next_frames())]
            params = DiffusionParams(session_id="a", prompt="a village", actions=keys, seed=1)
            request = DiffusionRequest("r", params, {"image": image} if index == 0 else {}, session)
            clocks.start_chunk()
            with clocks.part("encode"):
                world.prepare_encode(request)
            with clocks.part("passes"):
                while request.step < request.num_steps:
                    world.step_scheduler([request], world.denoise_step([request]))
                    request.step += 1
            with clocks.part("decode"):
                world.post_decode(request)
            with clocks.part("commit"):
                world.commit(request)
            if settled_at is None and session.condition is not None and session.condition.settled:
                settled_at = session.condition.num_encoded
    summary = clocks.summary(steady)
    frames = len(world.plan.pixel_frames(chunks - 1))
    wall = summary["chunk"]["wall_ms"]
    rates = {name: round(1e3 * frames / wall[name], 1) for name in ("min", "median")}
    return {
        "frames": frames,
        "frames_per_s": {"best": rates["min"], "median": rates["median"]},
        "settled_after_latents": settled_at,
        **summary,
    }


async def through_engine(
    model: Path, size: tuple[int, int], options: dict[str, Any], chunks: int, steady: int
) -> dict[str, Any]:
    """Run one client's chunks in the engine, one after another. In the result, `beside_stages_ms`
    is the part of a request's time that is not spent in the runner's own stages.
    """
    import torch

    from vllm_omni.inputs import DiffusionParams

    width, height = size
    image = torch.randint(
        0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    walls, alongside = [], []
    async with running_engine(
        model, {"height": height, "width": width, "model": options}
    ) as engine:
        (worker,) = await engine.collective_rpc("cpu_threads")
        for index in range(chunks):
            params = DiffusionParams(
                session_id="a",
                chunk_index=index,
                prompt="a village" if index == 0 else None,
                seed=1 if index == 0 else None,
                actions=KEYS[: options["latent_frames_per_chunk"]],
            )
            started = time.perf_counter()
            meta, tensors = await run_request(
                engine, params, {"image": image} if index == 0 else None, f"r{index}"
            )
            walls.append(1e3 * (time.perf_counter() - started))
            stages = {name: sum(ms) for name, ms in meta["timings_ms"].items()}
            alongside.append(walls[-1] - sum(ms for name, ms in stages.items() if name != "total"))
            frames = len(tensors["frames"])
    return {
        "threads": worker["threads"],
        "frames": frames,
        "wall_ms": spread(walls[-steady:]),
        "beside_stages_ms": spread(alongside[-steady:]),
        "last_stages_ms": {name: round(ms, 1) for name, ms in stages.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="checkpoint directory (default: random weights)")
    parser.add_argument("--size", default="160x96", help="WIDTHxHEIGHT (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="in this process (default: torch's)")
    parser.add_argument(
        "--latents", type=int, default=36, help="latent frames of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--steady", type=int, default=4, help="chunks at the end that count (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk", type=int, action="append", help="latent frames a chunk (default: 3 and 1)"
    )
    parser.add_argument("--decoder", action="append", choices=["wan", "tiny"], help="default: both")
    parser.add_argument("--engine", action="store_true", help="through the engine as well")
    args = parser.parse_args()
    import torch

    if args.threads is not None:
        torch.set_num_threads(args.threads)
    width, _, height = args.size.partition("x")
    size = int(width), int(height)
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if model is None:
            model = Path(folder) / "world"
            write_world(model)
        for chunk in args.chunk or (3, 1):
            for decoder in args.decoder or ("wan", "tiny"):
                options = {"latent_frames_per_chunk": chunk, "decoder": decoder}
                chunks = max(args.latents // chunk, args.steady)
                run: dict[str, Any] = {"chunk_latents": chunk, "decoder": decoder}
                run["in_process"] = in_process(model, size, options, chunks, args.steady)
                if args.engine:
                    run["engine"] = asyncio.run(
                        through_engine(model, size, options, chunks, args.steady)
                    )
                runs.append(run)
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    print(
        json.dumps(
            {
                "size": args.size,
                "threads": torch.get_num_threads(),
                "machine": machine,
                "fast_paths": fast_paths(),
                "runs": runs,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
