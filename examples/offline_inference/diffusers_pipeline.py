# SPDX-License-Identifier: Apache-2.0
"""Generate images or a video with a diffusers pipeline, offline, with one request to vLLM's `LLM`.

    vllm-omni make-tiny diffusers_pipeline my_pipeline --layout qwen_image
    python examples/offline_inference/diffusers_pipeline.py my_pipeline --prompt "A red fox" \\
        --size 64x64 --out fox.png

`--image` is the input image of an editing or image-to-video pipeline. `--out` must end in `.png`
(if there are several images, they are numbered) or, for a video pipeline, in `.mp4`. `--option
NAME=JSON` sets any other argument of the pipeline's `__call__`, or an option of this package
(`aspect_ratio`, `prompt_suffix` or `lora`).
"""

import argparse
import atexit
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.multimodal import rgb_image
from vllm_omni.outputs import RequestFailed, unpack


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Generate images or a video with a diffusers pipeline, offline."
    )
    parser.add_argument("model", type=Path, help="pipeline directory (with a model_index.json)")
    parser.add_argument("--prompt", default="A red fox in the snow")
    parser.add_argument("--negative-prompt")
    parser.add_argument("--image", type=Path, help="input of an edit or image-to-video pipeline")
    parser.add_argument("--size", help="WIDTHxHEIGHT in pixels (default: the pipeline's)")
    parser.add_argument("--steps", type=int, help="denoise steps (default: the pipeline's)")
    parser.add_argument("--guidance-scale", type=float, help="default: the pipeline's")
    parser.add_argument("--num-images", type=int, default=1)
    parser.add_argument(
        "--num-frames", type=int, help="frames of a video (default: the pipeline's)"
    )
    parser.add_argument("--seed", type=int, help="default: random, and printed")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="can be repeated",
    )
    parser.add_argument("--out", type=Path, default=Path("picture.png"), help=".png or .mp4")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--model-options", type=json.loads, default={}, help="JSON for additional_config.omni.model"
    )
    return parser


def main(args: argparse.Namespace) -> None:
    params = DiffusionParams(session_id="image-1", one_shot=True, **request_fields(args))
    tensors = {}
    if args.image is not None:
        tensors["image"] = torch.from_numpy(np.array(rgb_image(Image.open(args.image))))
    from vllm import LLM  # imported late, so that `--help` need not wait for it

    llm = LLM(
        model=str(args.model),
        config_format="omni",
        skip_tokenizer_init=True,
        # By default, a model that this package supports natively (Wan) runs on the package's
        # worker.
        distributed_executor_backend="vllm_omni.executor.DiffusersPipelineExecutor",
        dtype=args.dtype,
        additional_config={"omni": {"model": args.model_options}},
    )
    # Without this call, vLLM warns at exit that the engine ended unexpectedly.
    atexit.register(llm.llm_engine.engine_core.shutdown)
    (output,) = llm.encode(
        engine_prompt(), params.to_pooling_params(tensors), pooling_task="plugin", use_tqdm=False
    )
    try:
        meta, results = unpack(output.outputs.data)
    except RequestFailed as error:
        raise SystemExit(f"refused: {error}") from error
    for name in write(args.out, results, meta):
        print(f"wrote {name}")
    stages = ", ".join(f"{name} {sum(ms):.0f}" for name, ms in meta["timings_ms"].items())
    print(f"{meta['pipeline']}, seed {meta['seed']}, {meta['num_steps']} steps; ms: {stages}")


def request_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `DiffusionParams` that the command line sets."""
    fields: dict[str, Any] = {
        "prompt": args.prompt,
        "negative_prompt": args.negative_prompt,
        "seed": args.seed,
        "num_inference_steps": args.steps,
        "guidance_scale": args.guidance_scale,
        "num_images": args.num_images,
        "num_frames": args.num_frames,
        "options": {},
    }
    if args.size is not None:
        width, _, height = args.size.partition("x")
        if not (width.isdecimal() and height.isdecimal()):
            raise SystemExit(f"--size must be WIDTHxHEIGHT, got {args.size!r}")
        fields |= {"width": int(width), "height": int(height)}
    for option in args.option:
        name, _, value = option.partition("=")
        try:
            fields["options"][name] = json.loads(value)
        except json.JSONDecodeError:
            fields["options"][name] = value
    return fields


def write(out: Path, results: dict[str, torch.Tensor], meta: dict[str, Any]) -> list[Path]:
    """Write images as `.png` or a video as `.mp4`, and return the paths."""
    if "frames" in results:
        if out.suffix != ".mp4":
            raise SystemExit(f"this pipeline makes videos: --out must end in .mp4, got {out}")
        out.write_bytes(encode_mp4(results["frames"].numpy(), meta["fps"]))
        return [out]
    images_NHWC = results["images"].numpy()
    files = (
        [out]
        if len(images_NHWC) == 1
        else [out.with_stem(f"{out.stem}-{i}") for i in range(len(images_NHWC))]
    )
    for file, image_HWC in zip(files, images_NHWC, strict=True):
        Image.fromarray(image_HWC).save(file)
    return files


if __name__ == "__main__":
    main(make_parser().parse_args())
