# SPDX-License-Identifier: Apache-2.0
"""Measure the overhead of `DiffusersPipelineExecutor` over direct calls to diffusers.

    # tiny Qwen-Image on the CPU, about a second of work
    python benchmarks/diffusers_executor.py
    # the released model's sizes, random weights, on CUDA
    python benchmarks/diffusers_executor.py --full-size

In each pair, the request runs twice: once in a real engine (the front end in this process,
EngineCore and the pipeline in another process) and once by calling the pipeline in this process.
The order within each pair is random, so changes in the machine's load affect both kinds of runs.
Both runs end with uint8 images in this process's host memory. The result is the median over pairs
of (engine time / direct time - 1), for elapsed time and for the CPU time of this process and its
children. Other programs on the machine affect CPU time less than elapsed time. For every pair, the
benchmark also compares the images byte for byte.

With `--full-size`, the transformer has 60 layers, 24 heads of 128 channels and a text width of 3584
(about 41 GB in bf16), and the VAE has the released size. The full-size model has no text encoder,
so its prompt embeddings are random. The engine and the direct call each load a copy of the model,
so about 85 GB of device memory are required. With `--in-process`, EngineCore runs in this process
and the direct call uses EngineCore's pipeline, so only 45 GB are required.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, quantiles, run_request, running_engine, save

TARGET = 0.02
PROMPT_TOKENS = 256


def write_full_size(out: Path) -> None:
    """Write the released Qwen-Image's configs, to be loaded with `--load-format dummy`. Weights and
    the text encoder are left out; requests contain prompt embeddings.
    """
    components = {
        "transformer": {
            "_class_name": "QwenImageTransformer2DModel",
            "attention_head_dim": 128,
            "axes_dims_rope": [16, 56, 56],
            "guidance_embeds": False,
            "in_channels": 64,
            "joint_attention_dim": 3584,
            "num_attention_heads": 24,
            "num_layers": 60,
            "out_channels": 16,
            "patch_size": 2,
        },
        "vae": {
            "_class_name": "AutoencoderKLQwenImage",
            "attn_scales": [],
            "base_dim": 96,
            "dim_mult": [1, 2, 4, 4],
            "dropout": 0.0,
            "num_res_blocks": 2,
            "temperal_downsample": [False, True, True],
            "z_dim": 16,
        },
        "scheduler": {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "base_image_seq_len": 256,
            "base_shift": 0.5,
            "max_image_seq_len": 8192,
            "max_shift": 0.9,
            "num_train_timesteps": 1000,
            "shift_terminal": 0.02,
            "time_shift_type": "exponential",
            "use_dynamic_shifting": True,
        },
    }
    index: dict[str, Any] = {
        "_class_name": "QwenImagePipeline",
        "text_encoder": [None, None],
        "tokenizer": [None, None],
    }
    for name, config in components.items():
        (out / name).mkdir(parents=True)
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (out / name / file).write_text(json.dumps(config))
        index[name] = ["diffusers", config["_class_name"]]
    (out / "model_index.json").write_text(json.dumps(index))


class Request:
    """The benchmark's request, as arguments for the engine and as arguments for diffusers."""

    def __init__(self, args: argparse.Namespace, text_width: int | None) -> None:
        import torch

        self.size = {"height": args.height, "width": args.width, "num_inference_steps": args.steps}
        self.guidance = 4.0 if args.guidance else 1.0
        self.tensors: dict[str, torch.Tensor] = {}
        if text_width is not None:
            generator = torch.Generator().manual_seed(0)
            for name in ("prompt_embeds", "negative_prompt_embeds"):
                self.tensors[name] = torch.randn(PROMPT_TOKENS, text_width, generator=generator)

    def params(self, number: int) -> Any:
        from vllm_omni.inputs import DiffusionParams

        text = {} if self.tensors else {"prompt": "a red fox", "negative_prompt": "rain"}
        return DiffusionParams(
            session_id=f"r{number}",
            one_shot=True,
            seed=7,
            guidance_scale=self.guidance,
            **text,
            **self.size,
        )

    def direct(self, pipeline: Any) -> Any:
        """Return uint8 images on the host, as a caller of diffusers would get them with
        `output_type="pil"`.
        """
        import numpy as np
        import torch

        device, dtype = pipeline.device, pipeline.transformer.dtype
        text: dict[str, Any] = {"prompt": "a red fox", "negative_prompt": "rain"}
        if self.tensors:
            text = {
                name: tensor.to(device, dtype).unsqueeze(0) for name, tensor in self.tensors.items()
            }
        output = pipeline(
            **text,
            true_cfg_scale=self.guidance,
            generator=torch.Generator(device).manual_seed(7),
            output_type="pil",
            **self.size,
        )
        return np.stack([np.array(image) for image in output.images])


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "enforce_eager": True,
        **({"load_format": "dummy", "dtype": "bfloat16"} if args.full_size else {}),
    }


def load_direct(model: Path, args: argparse.Namespace) -> Any:
    """Load the engine's pipeline in this process, with the same weights as in the engine."""
    import torch

    from vllm_omni.executor.pipeline_host import PipelineHost
    from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions

    device = torch.device("cuda", 0) if args.full_size else torch.device("cpu")
    dtype = torch.bfloat16 if args.full_size else torch.float32
    return PipelineHost(
        model, DiffusersOptions(), device, dtype, random_weights=args.full_size
    ).pipeline


async def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    request = Request(args, 3584 if args.full_size else None)
    if args.in_process:
        return await _in_process(model, args, request)
    async with running_engine(model, {}, **engine_arguments(args)) as engine:
        pipeline = load_direct(model, args)

        async def through_engine(number: int) -> Any:
            return await run_request(engine, request.params(number), request.tensors, f"r{number}")

        return await _pairs(args, request, pipeline, through_engine)


async def _in_process(model: Path, args: argparse.Namespace, request: Request) -> dict[str, Any]:
    from vllm import LLM

    from vllm_omni.inputs import engine_prompt
    from vllm_omni.outputs import unpack

    llm = LLM(
        model=str(model), config_format="omni", skip_tokenizer_init=True, **engine_arguments(args)
    )
    core = llm.llm_engine.engine_core.engine_core

    async def through_engine(number: int) -> Any:
        params = request.params(number).to_pooling_params(request.tensors)
        (response,) = llm.encode(engine_prompt(), params, pooling_task="plugin", use_tqdm=False)
        return unpack(response.outputs.data)

    try:
        return await _pairs(
            args, request, core.model_executor.worker.runner.host.pipeline, through_engine
        )
    finally:
        core.shutdown()


def processor_s() -> float:
    """Return the CPU time in seconds that this process and all its children, including EngineCore,
    have used so far.
    """
    import psutil

    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(spent.user + spent.system for spent in times)


async def _pairs(
    args: argparse.Namespace, request: Request, pipeline: Any, through_engine: Any
) -> dict[str, Any]:
    import numpy as np

    order = random.Random(0)
    engine_ms, direct_ms, equal, inside_ms, cpu_ratios = [], [], True, [], []
    for number in range(args.pairs + args.warm_up):
        images: dict[str, Any] = {}
        elapsed: dict[str, float] = {}
        cpu: dict[str, float] = {}
        for side in order.sample(["engine", "direct"], 2):
            start, cpu_start = time.perf_counter(), processor_s()
            if side == "engine":
                meta, tensors = await through_engine(number)
                images[side] = tensors["images"].numpy()
            else:
                images[side] = request.direct(pipeline)
            elapsed[side] = (time.perf_counter() - start) * 1e3
            cpu[side] = processor_s() - cpu_start
        equal = equal and bool(np.array_equal(images["engine"], images["direct"]))
        if number >= args.warm_up:
            engine_ms.append(elapsed["engine"])
            direct_ms.append(elapsed["direct"])
            cpu_ratios.append(cpu["engine"] / cpu["direct"] - 1)
            stages = meta["timings_ms"]
            inside_ms.append(sum(sum(values) for name, values in stages.items() if name != "total"))
    ratios = [engine / direct - 1 for engine, direct in zip(engine_ms, direct_ms, strict=True)]
    return {
        "request": {**request.size, "guidance": args.guidance, "full_size": args.full_size},
        "in_process": args.in_process,
        "pairs": args.pairs,
        "engine_ms": quantiles(engine_ms),
        "direct_ms": quantiles(direct_ms),
        "outside_the_pipeline_ms": quantiles(
            [e - i for e, i in zip(engine_ms, inside_ms, strict=True)]
        ),
        "overhead": {
            "median_of_pairs": round(statistics.median(ratios), 5),
            "median_of_pairs_processor_time": round(statistics.median(cpu_ratios), 5),
            "of_every_pair": [round(ratio, 4) for ratio in ratios],
            "target": TARGET,
        },
        "pictures_equal": equal,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--full-size", action="store_true", help="the released Qwen-Image's sizes, random, on CUDA"
    )
    parser.add_argument(
        "--in-process", action="store_true", help="engine core and direct call share one pipeline"
    )
    parser.add_argument("--width", type=int, help="default: 256 (full size: 1024)")
    parser.add_argument("--height", type=int, help="default: 256 (full size: 1024)")
    parser.add_argument("--steps", type=int, help="default: 40 (full size: 20)")
    parser.add_argument(
        "--no-guidance", dest="guidance", action="store_false", help="one forward a step, not two"
    )
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2, help="pairs run first and not counted")
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    side, steps = (1024, 20) if args.full_size else (256, 40)
    args.width, args.height, args.steps = (
        args.width or side,
        args.height or side,
        args.steps or steps,
    )
    if args.in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm_omni.model_executor.models.registry import get_family

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        model.mkdir()
        if args.full_size:
            write_full_size(model)
        else:
            get_family("diffusers_pipeline").make_tiny(model, 0, "qwen_image")
        result = asyncio.run(measure(model, args))
    name = (
        "diffusers_executor"
        + ("_full_size" if args.full_size else "")
        + ("_in_process" if args.in_process else "")
    )
    save(name, result, args)
    overhead = result["overhead"]["median_of_pairs"]
    by_processor = result["overhead"]["median_of_pairs_processor_time"]
    direct, engine = result["direct_ms"]["p50"], result["engine_ms"]["p50"]
    print(
        f"\ndirect {direct:.0f} ms, engine {engine:.0f} ms, overhead {100 * overhead:+.2f} % by "
        "the clock, "
        f"{100 * by_processor:+.2f} % by processor time (target {100 * TARGET:.0f} %)"
    )
    print("pictures are equal, byte for byte" if result["pictures_equal"] else "pictures DIFFER")


if __name__ == "__main__":
    main()
