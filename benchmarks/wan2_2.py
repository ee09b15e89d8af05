# SPDX-License-Identifier: Apache-2.0
"""Measure Wan 2.2 at full size with random weights in the real engine: seconds per denoise step,
decode time and memory.

    # TI2V 5B, one GPU, 81 frames of 480x832, 10 steps
    python benchmarks/wan2_2.py
    python benchmarks/wan2_2.py --size t2v-a14b --steps 6
    python benchmarks/wan2_2.py --size t2v-a14b --steps 6 --tensor-parallel 2 \\
        --model-options '{"cfg_parallel": true}'
    # half of the experts in host memory
    timeout 300 python benchmarks/wan2_2.py --size t2v-a14b --steps 6 --cpu-offload-gb 28 \\
        --model-options '{"text_encoder_device": "cpu"}'
    # try it without a GPU
    python benchmarks/wan2_2.py --tiny --size t2v-a14b

Random weights with the released shapes give the same times as trained weights. A step includes both
guidance branches. A14B switches experts at a certain noise level, so a few steps are enough to use
both experts. A run that uses only one expert fails, because it would not measure the other expert.
The runner reports step times, which are device times. An expert's first step also computes the
prompts' keys and values, so medians exclude the first step if the expert has other steps. `ideal`
is the time that the steps' arithmetic would take at the GPU's measured GEMM rate (790 TFLOP/s on an
H200). `--tiny` runs the tests' small model in the same layout.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

sys.path.insert(0, str(Path(__file__).parent))
from common import (
    add_output_arguments,
    add_serving_arguments,
    precision_of,
    run_request,
    running_engine,
    save,
)

GEMM_FLOPS = 790e12
"""Measured rate of bf16 matrix products on an H200, in FLOP/s."""
TEXT_ROWS = 512
LAYOUTS = {"ti2v-5b": "ti2v", "t2v-a14b": "t2v", "i2v-a14b": "i2v"}
"""Maps each released model to its layout for `make-tiny wan2_2`."""

A14B = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "ti2v-5b": {
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "ffn_dim": 14336,
        "num_layers": 30,
        "in_channels": 48,
        "out_channels": 48,
    },
    "t2v-a14b": {**A14B, "in_channels": 16, "out_channels": 16},
    "i2v-a14b": {**A14B, "in_channels": 36, "out_channels": 16},
}
BOUNDARIES = {"t2v-a14b": 0.875, "i2v-a14b": 0.9}
VAE_5B = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "latents_mean": [0.0] * 48,  # the released statistics do not affect times
    "latents_std": [1.0] * 48,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
}


def write_checkpoint(root: Path, size: str) -> None:
    """Write a diffusers directory without weights for a released model, to be loaded with
    --load-format dummy.

    The directory contains no `text_encoder/`, so the text encoder has the sizes of umt5-xxl (5.7
    billion parameters).
    """
    from vllm_omni.model_executor.models.wan.architecture import VAEConfig
    from vllm_omni.testing.tiny.text_tokenizers import write_t5_tokenizer

    transformer = {"_class_name": "WanTransformer3DModel", **TRANSFORMERS[size]}
    vae = VAE_5B if size == "ti2v-5b" else VAEConfig().to_dict()
    scheduler = {
        "_class_name": "UniPCMultistepScheduler",
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": 5.0 if size == "ti2v-5b" else 3.0,
    }
    files = {
        "transformer/config.json": transformer,
        "vae/config.json": {"_class_name": "AutoencoderKLWan", **vae},
        "scheduler/scheduler_config.json": scheduler,
    }
    index: dict[str, Any] = {
        "_class_name": "WanImageToVideoPipeline" if size == "i2v-a14b" else "WanPipeline",
        "expand_timesteps": size == "ti2v-5b",
        "scheduler": ["diffusers", scheduler["_class_name"]],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if size in BOUNDARIES:
        files["transformer_2/config.json"] = transformer
        index |= {"transformer_2": index["transformer"], "boundary_ratio": BOUNDARIES[size]}
    files["model_index.json"] = index
    for name, values in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(json.dumps(values))
    write_t5_tokenizer(root / "tokenizer")


def expert_of_steps(model: Path, steps: int, flow_shift: float | None) -> list[str]:
    """Return which transformer runs each step of a request, according to the checkpoint's own
    schedule.
    """
    import torch

    from vllm_omni.model_executor.models.wan2_2.checkpoint import find_layout
    from vllm_omni.model_executor.models.wan2_2.config import NUM_TRAIN_TIMESTEPS
    from vllm_omni.model_executor.models.wan2_2.pipeline import EXPERTS
    from vllm_omni.model_executor.models.wan2_2.schedule import new_scheduler

    layout = find_layout(model)
    ratio = layout.info().boundary_ratio or 0.0
    scheduler = new_scheduler(layout.scheduler_values(), steps, flow_shift, torch.device("cpu"))
    return [
        EXPERTS[float(timestep) < ratio * NUM_TRAIN_TIMESTEPS] for timestep in scheduler.timesteps
    ]


def step_flops(config: Any, tokens: int) -> float:
    """Return the FLOPs of one step with both guidance branches: linear layers, self-attention and
    cross-attention.
    """
    linear = 2 * tokens * (6 * config.dim**2 + 2 * config.dim * config.ffn_dim) * config.num_layers
    attention = 4 * tokens * (tokens + TEXT_ROWS) * config.dim * config.num_layers
    return 2.0 * (linear + attention)


async def run(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from vllm_omni.inputs import DiffusionParams
    from vllm_omni.model_executor.models.wan2_2.checkpoint import find_layout
    from vllm_omni.model_executor.models.wan2_2.config import Wan22Config, Wan22Options

    options = {
        "max_num_frames": args.frames,
        "defaults": {"num_frames": args.frames},
        **json.loads(args.model_options),
    }
    layout = find_layout(model)
    checkpoint, config = layout.info(), Wan22Config.from_checkpoint(layout.transformer_config())
    experts = expert_of_steps(model, args.steps, Wan22Options.parse(options).defaults.flow_shift)
    if checkpoint.two_experts and len(set(experts)) < 2:
        raise SystemExit(f"--steps {args.steps} meets only {experts[0]}: take more")
    generator = torch.Generator().manual_seed(0)
    tensors = None
    if checkpoint.kind == "i2v" or args.image:
        shape = (args.height, args.width, 3)
        tensors = {"image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)}

    async def request(number: int) -> dict[str, Any]:
        params = DiffusionParams(
            session_id=f"video{number}",
            one_shot=True,
            prompt="a coast road in the evening",
            seed=number,
            height=args.height,
            width=args.width,
            num_frames=args.frames,
            num_inference_steps=args.steps,
        )
        start = time.perf_counter()
        meta, results = await run_request(engine, params, tensors, f"video{number}")
        seconds = time.perf_counter() - start
        frames = results["frames"]
        assert frames.shape == (args.frames, args.height, args.width, 3), frames.shape
        return {"seconds": round(seconds, 3), "timings_ms": meta["timings_ms"]}

    loading = time.perf_counter()
    async with running_engine(
        model,
        {
            "height": args.height,
            "width": args.width,
            "model": options,
            **json.loads(args.omni_options),
        },
        enforce_eager=args.eager,
        load_format="auto" if args.tiny else "dummy",
        tensor_parallel_size=args.tensor_parallel,
        pipeline_parallel_size=args.pipeline_parallel,
        gpu_memory_utilization=args.gpu_memory_utilization,
        cpu_offload_gb=args.cpu_offload_gb,
        **precision_of(args),
    ) as engine:
        load_s = time.perf_counter() - loading
        records = [await request(number) for number in range(args.requests)]
        memory = await engine.collective_rpc("device_memory")
    latent_height, latent_width = checkpoint.latent_size(args.height, args.width)
    tokens = checkpoint.latent_frames(args.frames) * latent_height * latent_width // 4
    ideal_s = step_flops(config, tokens) / GEMM_FLOPS
    by_expert = seconds_by_expert([record["timings_ms"]["steps"] for record in records], experts)
    medians = {name: statistics.median(values) for name, values in by_expert.items()}
    return {
        "model": f"tiny {LAYOUTS[args.size]}" if args.tiny else args.size,
        "size": [args.height, args.width],
        "frames": args.frames,
        "tokens": tokens,
        "image": tensors is not None,
        "steps": args.steps,
        "steps_of_expert": {name: experts.count(name) for name in by_expert},
        "parallel": {"tensor": args.tensor_parallel, "pipeline": args.pipeline_parallel},
        "model_options": options,
        "omni_options": json.loads(args.omni_options),
        "eager": args.eager,
        **precision_of(args),
        "cpu_offload_gb": args.cpu_offload_gb,
        "load_and_warm_up_s": round(load_s, 1),
        "seconds_per_step": {name: round(value, 4) for name, value in medians.items()},
        "seconds_per_step_all": {
            name: [round(value, 4) for value in values] for name, values in by_expert.items()
        },
        "ideal_seconds_per_step": round(ideal_s, 4),
        "ratio_to_ideal": {name: round(ideal_s / value, 3) for name, value in medians.items()},
        "requests": records,
        "device_memory": memory,
    }


def seconds_by_expert(steps_ms: list[list[float]], experts: list[str]) -> dict[str, list[float]]:
    """Return the durations of all steps in seconds, by expert. An expert's first step in a request
    is left out if the expert runs other steps in that request.
    """
    names = list(dict.fromkeys(experts))
    seconds: dict[str, list[float]] = {}
    for name in names:
        positions = [index for index, expert in enumerate(experts) if expert == name]
        counted = positions[1:] or positions
        seconds[name] = [values[index] / 1e3 for values in steps_ms for index in counted]
    return seconds


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Wan 2.2 at full size with random weights.")
    parser.add_argument("--size", choices=list(TRANSFORMERS), default="ti2v-5b")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="the tests' small model of this layout, 9 frames of 64x96",
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="denoise steps of a request (authors: 50, A14B 40)"
    )
    parser.add_argument("--requests", type=int, default=1, help="one after another")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument(
        "--image", action="store_true", help="TI2V: start from a picture (I2V always does)"
    )
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument(
        "--cpu-offload-gb", type=float, default=0.0, help="of the experts' weights, in host memory"
    )
    add_serving_arguments(parser)
    parser.add_argument("--name", help="name of the result file (default: wan2_2_SIZE)")
    add_output_arguments(parser)
    return parser


def main() -> None:
    from vllm_omni.model_executor.models.registry import get_family

    args = make_parser().parse_args()
    if args.image and args.size == "t2v-a14b":
        raise SystemExit("--image: t2v-a14b takes no picture")
    if args.tiny:
        args.frames, args.height, args.width, args.eager = 9, 64, 96, True
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "wan"
        if args.tiny:
            get_family("wan2_2").make_tiny(model, 0, LAYOUTS[args.size])
        else:
            write_checkpoint(model, args.size)
        result = asyncio.run(run(model, args))
    default_name = f"wan2_2_{'tiny_' if args.tiny else ''}{args.size.replace('-', '_')}"
    save(args.name or default_name, {"result": result}, args)


if __name__ == "__main__":
    main()
