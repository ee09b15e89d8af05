# SPDX-License-Identifier: Apache-2.0
"""Measure Lance at full size with random weights in the real engine.

The benchmark measures images, edits, video, text responses and mixed load.

    # one GPU, image checkpoint: 1024x1024, 768x768, edit, answers
    python benchmarks/lance.py
    # the video checkpoint: 480x768, 25 frames as well
    python benchmarks/lance.py --variant video
    python benchmarks/lance.py --tensor-parallel 2
    python benchmarks/lance.py --quantization fp8_per_channel --sections image_large
    # try it without a GPU
    python benchmarks/lance.py --tiny

Random weights with the released shapes give the same times as trained weights. The client measures
end-to-end times, from sending the request to unpacking the image. The runner reports stage times,
which are device times.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

sys.path.insert(0, str(Path(__file__).parent))
from common import (
    add_output_arguments,
    add_serving_arguments,
    add_tracing_arguments,
    kernel_times,
    precision_of,
    run_request,
    running_engine,
    save,
    trace_folder,
    tracing,
)

_VOCABULARY = 151_665
TARGETS_S = {"1024x1024": 4.5, "768x768": 2.3}
"""Target end-to-end time in seconds for each image size, on one H200 with 30 steps and guidance 4.
"""


def write_checkpoint(root: Path, variant: str, layers: int) -> Path:
    """Write a checkpoint without weights for the released architecture, to be loaded with
    --load-format dummy.
    """
    from vllm_omni.testing.tiny.lance import write_tokenizer

    folder = root / ("Lance_3B_Video" if variant == "video" else "Lance_3B")
    write_tokenizer(folder)
    # The tokenizer needs as many tokens as the released one, because the size of the last matrix
    # product depends on the number of tokens.
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, special = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    for number in range(_VOCABULARY - len(vocabulary) - len(special)):
        vocabulary[f"word{number}"] = len(vocabulary)
    for number, token in enumerate(special):
        token["id"] = len(vocabulary) + number
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"model_type": "qwen2_5_vl", "num_hidden_layers": layers, "dtype": "bfloat16"}
    (folder / "llm_config.json").write_text(json.dumps(config))
    return folder


class Client:
    def __init__(self, engine: Any, args: argparse.Namespace) -> None:
        import torch

        self.engine, self.args, self._number = engine, args, 0
        generator = torch.Generator().manual_seed(0)
        self.image = torch.randint(0, 256, (768, 768, 3), dtype=torch.uint8, generator=generator)

    async def send(self, tensors: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
        """Run one request, and return its time in seconds and the runner's stage times."""
        from vllm_omni.inputs import DiffusionParams

        self._number += 1
        name = f"request-{self._number}"
        params = DiffusionParams(session_id=name, one_shot=True, **fields)
        start = time.perf_counter()
        meta, _ = await run_request(self.engine, params, tensors, name)
        return {"seconds": time.perf_counter() - start, "meta": meta}

    def draw(self, height: int, width: int, **fields: Any) -> Any:
        return self.send(
            prompt="a lighthouse above the sea",
            height=height,
            width=width,
            num_inference_steps=self.args.steps,
            guidance_scale=4.0,
            **fields,
        )

    def read(self, tokens: int) -> Any:
        resolution = "image_256res" if self.args.tiny else "image_768res"
        options = {"modalities": ["text"], "max_tokens": tokens, "resolution": resolution}
        return self.send({"image": self.image}, prompt="What is in the picture?", options=options)

    def edit(self) -> Any:
        resolution = "image_256res" if self.args.tiny else "image_768res"
        return self.send(
            {"image": self.image},
            prompt="paint it red",
            num_inference_steps=self.args.steps,
            guidance_scale=4.0,
            options={"resolution": resolution},
        )


async def repeated(call: Any, count: int) -> dict[str, Any]:
    """Run a call several times in sequence, after one warm-up run. Return the median time in
    seconds, and the stage times of the median run.
    """
    await call()
    runs = sorted([await call() for _ in range(count)], key=lambda run: float(run["seconds"]))
    middle = runs[len(runs) // 2]
    timings = middle["meta"]["timings_ms"]
    return {
        "seconds": round(middle["seconds"], 4),
        "all_seconds": [round(run["seconds"], 4) for run in runs],
        "stages_ms": {name: round(sum(values), 2) for name, values in timings.items()},
        "step_ms": round(statistics.median(timings["steps"][1:] or timings["steps"]), 3),
        "context_ms": timings["steps"][0],
    }


async def responses(client: Client, tokens: int) -> dict[str, Any]:
    runs = [await client.read(tokens) for _ in range(client.args.repeats + 1)][1:]
    best = min(runs, key=lambda run: float(run["seconds"]))
    timings, made = best["meta"]["timings_ms"], best["meta"]["completion_tokens"]
    decode_ms = sum(timings["steps"][1:])
    per_step = made / max(1, len(timings["steps"]))
    return {
        "tokens": made,
        "prompt_tokens": best["meta"]["prompt_tokens"],
        "seconds": round(best["seconds"], 4),
        "tokens_per_s_end_to_end": round(made / best["seconds"], 1),
        "tokens_per_s_decoding": round(
            per_step * len(timings["steps"][1:]) / max(1e-9, decode_ms / 1e3), 1
        ),
        "stages_ms": {name: round(sum(values), 2) for name, values in timings.items()},
    }


async def batch_curve(
    client: Client, size: tuple[int, int], batches: list[int]
) -> list[dict[str, Any]]:
    """Measure the time of n identical, concurrent image requests for each n in `batches`. If
    `batches` contains 1, the times are also given relative to one request.
    """
    curve: list[dict[str, Any]] = []
    for count in batches:
        # This run compiles the shapes for this batch size.
        await asyncio.gather(*(client.draw(*size) for _ in range(count)))
        start = time.perf_counter()
        await asyncio.gather(*(client.draw(*size) for _ in range(count)))
        seconds = time.perf_counter() - start
        curve.append({"requests": count, "seconds": round(seconds, 4)})
    alone = [point["seconds"] for point in curve if point["requests"] == 1]
    for point in curve:
        point["times_one"] = round(point["seconds"] / alone[0], 3) if alone else None
    return curve


async def mixed_load(client: Client, size: tuple[int, int], tokens: int) -> dict[str, Any]:
    """Compare the time that 4 image requests and 8 understanding requests take concurrently with
    the time that the same requests take one after another.
    """
    calls = [lambda: client.draw(*size)] * 4 + [lambda: client.read(tokens)] * 8
    await asyncio.gather(*(call() for call in calls))
    start = time.perf_counter()
    for call in calls:
        await call()
    sequential = time.perf_counter() - start
    start = time.perf_counter()
    together = await asyncio.gather(*(call() for call in calls))
    seconds = time.perf_counter() - start
    return {
        "one_after_another_s": round(sequential, 3),
        "at_once_s": round(seconds, 3),
        "gain": round(sequential / seconds, 2),
        "drawing_s": [round(run["seconds"], 3) for run in together[:4]],
        "answer_s": [round(run["seconds"], 3) for run in together[4:]],
    }


def measurements(client: Client, engine: Any) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Return the functions that measure the sections of the result, keyed by section name, with the
    most important section first.
    """
    args = client.args
    large, small = ((128, 128), (64, 64)) if args.tiny else ((1024, 1024), (768, 768))
    video = (64, 96, 9) if args.tiny else (480, 768, 25)
    tokens = 16 if args.tiny else 256
    batches = list(range(1, args.max_batch + 1))

    async def image(size: tuple[int, int]) -> dict[str, Any]:
        name = f"{size[1]}x{size[0]}"
        measured = await repeated(lambda: client.draw(*size), args.repeats)
        return {"size": name, **measured, "target_s": TARGETS_S.get(name)}

    sections: dict[str, Callable[[], Awaitable[Any]]] = {
        "image_large": lambda: image(large),
        "image_small": lambda: image(small),
        "memory_after_images": lambda: engine.collective_rpc("device_memory"),
        "answer": lambda: responses(client, tokens),
        "mixed_load": lambda: mixed_load(client, small, tokens),
        "edit": lambda: repeated(client.edit, args.repeats),
    }
    if args.variant == "video":
        sections["video"] = lambda: repeated(
            lambda: client.draw(*video[:2], num_frames=video[2]), args.repeats
        )
    return sections | {
        "batch_curve_small": lambda: batch_curve(client, small, args.batches or batches[:4]),
        "batch_curve_large": lambda: batch_curve(client, large, args.batches or batches),
        "memory_at_the_end": lambda: engine.collective_rpc("device_memory"),
    }


async def run(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    ranks = args.tensor_parallel
    options: dict[str, Any] = json.loads(args.model_options)
    if args.variant == "video" and not args.tiny:
        # The limit is the measured length, so the warm-up at startup takes no longer than
        # necessary.
        options.setdefault("max_num_frames", 25)
    if args.tiny:
        options |= {"max_image_pixels": 128 * 128, "max_video_pixels": 64 * 96, "max_num_frames": 9}
    omni = {
        "batch_invariant": False,
        "max_requests_per_step": args.max_batch,
        "max_sessions": 32,
        "model": options,
        **json.loads(args.omni_options),
    }
    loading = time.perf_counter()
    result: dict[str, Any] = {
        "variant": args.variant,
        "steps": args.steps,
        "layers": None if args.tiny else args.layers,
        "tensor_parallel": ranks,
        "model_options": options,
        "eager": args.eager,
        **precision_of(args),
    }
    async with running_engine(
        model,
        omni,
        enforce_eager=args.eager,
        load_format="auto" if args.tiny else "dummy",
        tensor_parallel_size=ranks,
        gpu_memory_utilization=args.gpu_memory_utilization,
        **precision_of(args),
        **tracing(args, trace_folder(args, model.parent)),
    ) as engine:
        result["load_and_warm_up_s"] = round(time.perf_counter() - loading, 1)
        client = Client(engine, args)
        sections = measurements(client, engine)
        for name in args.sections or sections:
            result[name] = await sections[name]()
            print(f"{name}: {json.dumps(result[name])}", flush=True)
            # Finished sections are saved, so that they are not lost if the next one fails.
            save(args.name, {"result": result}, args)
        if args.kernels:
            size = (128, 128) if args.tiny else (1024, 1024)
            result["kernels"] = await kernel_times(
                engine,
                trace_folder(args, model.parent),
                lambda _: client.draw(*size),
                warm_chunks=1,
            )
            save(args.name, {"result": result}, args)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=("image", "video"), default="image")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument(
        "--max-batch", type=int, default=8, help="requests the engine takes into one step"
    )
    parser.add_argument(
        "--batches",
        type=int,
        nargs="+",
        help="batch sizes of the curves (default: every one up to --max-batch, 4 for the "
        "small size)",
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument(
        "--tiny", action="store_true", help="the tiny checkpoint, for a machine without a GPU"
    )
    add_serving_arguments(parser)
    add_tracing_arguments(parser)
    parser.add_argument("--name", default="lance", help="name of the result file")
    parser.add_argument(
        "--sections", nargs="+", help="measure only these, by the names the result gives them"
    )
    add_output_arguments(parser)
    args = parser.parse_args()
    if args.batches and not all(1 <= count <= args.max_batch for count in args.batches):
        parser.error(
            f"--batches must lie between 1 and --max-batch {args.max_batch}, got {args.batches}"
        )
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        if args.tiny:
            from vllm_omni.testing.tiny.lance import make_tiny

            make_tiny(model, 0, args.variant)
        else:
            model = write_checkpoint(model, args.variant, args.layers)
        asyncio.run(run(model, args))


if __name__ == "__main__":
    main()
