# SPDX-License-Identifier: Apache-2.0
"""Generate, edit and understand images and videos with Lance, offline, through vLLM's `LLM`.

    vllm-omni make-tiny lance my_lance --layout video
    python examples/offline_inference/lance.py my_lance text-to-image \\
        --prompt "A cat on a roof" --out cat.png
    python examples/offline_inference/lance.py my_lance image-edit --image cat.png \\
        --prompt "Make it night"
    python examples/offline_inference/lance.py my_lance image-understanding --image cat.png \\
        --prompt "What is there?"

The tasks are text-to-image, image-edit, image-understanding, text-to-video, image-to-video,
video-edit and video-understanding. Video tasks need the video checkpoint: `.../Lance_3B_Video`, or
a directory that contains only this checkpoint. Images are written as PNG and videos as MP4. Text is
printed as it is decoded.
"""

import argparse
import atexit
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.multimodal import rgb_image
from vllm_omni.outputs import RequestFailed, unpack

TASKS = {
    "text-to-image": "t2i",
    "image-edit": "image_edit",
    "image-understanding": "x2t_image",
    "text-to-video": "t2v",
    "image-to-video": "i2v",
    "video-edit": "video_edit",
    "video-understanding": "x2t_video",
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Draw, edit, film and read with Lance, offline.")
    parser.add_argument(
        "model", type=Path, help="checkpoint directory: the repository, or one of its decoders"
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument(
        "--prompt", help="description, edit or question; optional for understanding"
    )
    parser.add_argument("--negative-prompt", help="negative prompt")
    parser.add_argument(
        "--image", type=Path, help="image to edit or describe, or start image of a video"
    )
    parser.add_argument("--video", type=Path, help="video to edit or describe")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument(
        "--num-frames", type=int, help="frames of a video: 1 + 4k; other numbers are rounded down"
    )
    parser.add_argument("--num-images", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--guidance-scale", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--resolution",
        help="preset for the size of input images and videos, for example image_512res",
    )
    parser.add_argument("--out", type=Path, help=".png or .mp4 (default: lance.png, lance.mp4)")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--model-options", type=json.loads, default={}, help="JSON for additional_config.omni.model"
    )
    return parser


def main(args: argparse.Namespace) -> None:
    task = TASKS[args.task]
    tensors = read_inputs(args)
    # Memory for requests on a CPU, in GiB. By default, vLLM's CPU worker requires 92 % of the
    # memory to be free.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM  # imported late, so that `--help` need not wait for it

    llm = LLM(
        model=str(args.model),
        config_format="omni",
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tensor_parallel_size,
        additional_config={"omni": {"model": args.model_options}},
    )
    # Without this call, vLLM warns at exit that the engine ended unexpectedly.
    atexit.register(llm.llm_engine.engine_core.shutdown)
    options: dict[str, Any] = {"task": task}
    if args.resolution:
        options["resolution"] = args.resolution
    if task in ("x2t_image", "x2t_video"):
        read(llm, args, options, tensors)
        return
    params = DiffusionParams(
        session_id="generation",
        one_shot=True,
        prompt=args.prompt,
        negative_prompt=args.negative_prompt,
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        num_images=args.num_images,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        seed=args.seed,
        options=options,
    )
    meta, result = send(llm, params, tensors)
    timings = {name: round(sum(values)) for name, values in meta["timings_ms"].items()}
    for path in write(args.out, meta, result):
        print(f"{path}: {meta['width']}x{meta['height']}, milliseconds {timings}")


def send(llm: Any, params: DiffusionParams, tensors: dict[str, torch.Tensor]) -> Any:
    (output,) = llm.encode(
        [engine_prompt()],
        pooling_params=params.to_pooling_params(tensors),
        pooling_task="plugin",
        use_tqdm=False,
    )
    try:
        return unpack(output.outputs.data)
    except RequestFailed as failure:
        raise SystemExit(f"{failure.code}: {failure.message}") from None


def read(
    llm: Any, args: argparse.Namespace, options: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    """Generate a text response and print it as it is decoded. Each request generates up to eight
    tokens, and all requests belong to one session.
    """
    options |= {"max_tokens": args.max_tokens, "temperature": args.temperature, "chunk_tokens": 8}
    params = DiffusionParams(
        session_id="answer", prompt=args.prompt, seed=args.seed, options=options
    )
    while True:
        meta, _ = send(llm, params, tensors)
        print(meta["text"], end="", flush=True)
        if meta["finish_reason"] is not None:
            break
        params, tensors = DiffusionParams(session_id="answer"), {}
    print(f"\n[{meta['completion_tokens']} tokens, ended by {meta['finish_reason']}]")
    send(llm, DiffusionParams(session_id="answer", op="close"), {})


def read_inputs(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    tensors = {}
    if args.image is not None:
        tensors["image"] = torch.from_numpy(np.array(rgb_image(Image.open(args.image))))
    if args.video is not None:
        import av

        with av.open(str(args.video)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        tensors["video"] = torch.from_numpy(np.stack(frames))
    return tensors


def write(out: Path | None, meta: dict[str, Any], result: dict[str, torch.Tensor]) -> list[Path]:
    """Write a video, an image or several numbered images, and return the paths."""
    if "frames" in result:
        path = out or Path("lance.mp4")
        path.write_bytes(encode_mp4(result["frames"].numpy(), meta["fps"]))
        return [path]
    path = out or Path("lance.png")
    images = result["images"].numpy()
    paths = (
        [path]
        if len(images) == 1
        else [path.with_stem(f"{path.stem}-{n}") for n in range(len(images))]
    )
    for file, image in zip(paths, images, strict=True):
        Image.fromarray(image).save(file)
    return paths


if __name__ == "__main__":
    main(make_parser().parse_args())
