# SPDX-License-Identifier: Apache-2.0
"""Measure how much time step caching saves and how much it changes the results.

Several thresholds are measured in the real engine.

    python benchmarks/step_cache.py path/to/Lance_3B --prompt "a lighthouse above the sea" \\
        --steps 30
    python benchmarks/step_cache.py path/to/Wan2.2-T2V-A14B-Diffusers --frames 81 \\
        --thresholds 1.5 2 3
    python benchmarks/step_cache.py path/to/Qwen-Image --option first_block_cache \\
        --thresholds 0.05 0.1 0.2
    # or ti2v-5b: full size, its time
    python benchmarks/step_cache.py --random lance --quantization fp8_per_channel
    # or wan2_2: try it without a GPU
    python benchmarks/step_cache.py --tiny lance

For each threshold, the benchmark reports the share of steps that were computed (for a diffusers
pipeline, the share of forward passes), the seconds, and a comparison with the same request without
step caching: the relative L2 error of the latents and the PSNR of the images or frames. The errors
depend on the weights, so a run with random weights only measures the time and confirms that the
mechanism works.
"""

import argparse
import asyncio
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

sys.path.insert(0, str(Path(__file__).parent))
import lance
import wan2_2
from common import (
    add_output_arguments,
    add_serving_arguments,
    precision_of,
    run_request,
    running_engine,
    save,
)

TINY = {
    "lance": ("lance", "image"),
    "wan2_2": ("wan2_2", "ti2v"),
    "qwen_image": ("diffusers_pipeline", "qwen_image"),
}
"""Maps a model name to its family and layout for `make-tiny`."""
RANDOM = ("lance", *wan2_2.TRANSFORMERS)


def random_model(name: str, folder: Path) -> Path:
    """Write a checkpoint directory without weights for a released architecture, to be loaded with
    --load-format dummy.
    """
    if name == "lance":
        return lance.write_checkpoint(folder, "image", layers=36)
    model = folder / "model"
    wan2_2.write_checkpoint(model, name)
    return model


async def measure(model: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    size = {"height": args.height, "width": args.width}
    async with running_engine(
        model,
        {**size, "model": json.loads(args.model_options), **json.loads(args.omni_options)},
        enforce_eager=args.eager,
        load_format="dummy" if args.random else "auto",
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision_of(args),
    ) as engine:

        async def make(threshold: float | None, output: str) -> tuple[dict[str, Any], Any, float]:
            from vllm_omni.inputs import DiffusionParams

            params = DiffusionParams(
                session_id=f"{threshold}-{output}-{time.perf_counter_ns()}",
                one_shot=True,
                prompt=args.prompt,
                seed=1,
                num_frames=args.frames,
                num_inference_steps=args.steps,
                output=output,  # type: ignore[arg-type]
                options={} if threshold is None else {args.option: threshold},
                **size,
            )
            start = time.perf_counter()
            meta, tensors = await run_request(engine, params, None, params.session_id)
            (tensor,) = tensors.values()
            return meta, tensor.double(), time.perf_counter() - start

        await make(None, "rgb")  # compiles the code that the first request runs
        _, exact, _ = await make(None, "latents")
        _, images, seconds = await make(None, "rgb")
        rows = [{"threshold": None, "computed_share": 1.0, "seconds": round(seconds, 4)}]
        for threshold in args.thresholds:
            _, latents, _ = await make(threshold, "latents")
            meta, frames, seconds = await make(threshold, "rgb")
            squared = float((frames - images).square().mean())
            rows.append(
                {
                    **meta[args.option],
                    "seconds": round(seconds, 4),
                    "latents_relative_error": round(
                        float((latents - exact).norm() / exact.norm()), 5
                    ),
                    "psnr_db": None
                    if squared == 0
                    else round(10 * math.log10(255**2 / squared), 2),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", nargs="?", type=Path, help="directory of Lance, Wan 2.2 or a pipeline of diffusers"
    )
    parser.add_argument(
        "--random", choices=RANDOM, help="a model of full size with random weights instead"
    )
    parser.add_argument("--tiny", choices=TINY, help="a tiny model instead")
    parser.add_argument("--prompt", default="a lighthouse above the sea")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--height", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--frames", type=int, help="of a video")
    parser.add_argument(
        "--option", choices=("step_cache", "first_block_cache"), default="step_cache"
    )
    parser.add_argument("--thresholds", type=float, nargs="+", default=[1.5, 2.0, 3.0, 4.0])
    add_serving_arguments(parser)
    parser.add_argument("--name", default="step_cache", help="name of the result file")
    add_output_arguments(parser)
    args = parser.parse_args()
    if [args.model, args.random, args.tiny].count(None) != 2:
        parser.error(
            "name one of: a model's directory, --random and --tiny with one of their models"
        )
    with tempfile.TemporaryDirectory() as folder:
        model = args.model
        if args.random is not None:
            model = random_model(args.random, Path(folder))
        if args.tiny is not None:
            from vllm_omni.model_executor.models.registry import get_family

            family, layout = TINY[args.tiny]
            model, args.height, args.width = Path(folder) / "model", 64, 96
            args.frames = 9 if family == "wan2_2" else None
            get_family(family).make_tiny(model, 0, layout)
        rows = asyncio.run(measure(model, args))
    size = [args.height, args.width]
    result = {
        "option": args.option,
        "steps": args.steps,
        "size": size,
        **precision_of(args),
        "rows": rows,
    }
    save(args.name, {"result": result}, args)


if __name__ == "__main__":
    main()
