# SPDX-License-Identifier: Apache-2.0
"""Generate a video stream with causal Wan from a prompt, an image or a video, offline.

    vllm-omni make-tiny causal_wan my_stream
    python examples/offline_inference/streaming_wan.py my_stream --chunks 4 --out stream.mp4
    python examples/offline_inference/streaming_wan.py my_stream --video input.mp4 \\
        --out repainted.mp4
    python examples/offline_inference/streaming_wan.py my_stream --image start.png \\
        --out from_a_picture.mp4
    python examples/offline_inference/streaming_wan.py my_stream --chunks 9 --out two.mp4 \\
        --switch 3:"a town at night" --switch 5s:"a town in the snow"

The script sends one request per chunk to vLLM's `LLM`. A chunk is three latent frames, so the first
chunk has 9 video frames and each later chunk has 12. With `--model-options
'{"latent_frames_per_chunk": 1}'`, these numbers are 1 and 4. `--out` must end in `.mp4` or `.npy`
(uint8 [T, H, W, 3]).
"""

import argparse
import atexit
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import decode_mp4, encode_mp4
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.timed_prompts import PromptSchedule, TimedPrompt
from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.multimodal import rgb_image
from vllm_omni.outputs import RequestFailed, unpack


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Generate a video stream from text, an image or a video, offline."
    )
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--prompt", default="A coast road in the evening, waves break on the rocks")
    parser.add_argument(
        "--switch",
        type=_switch,
        action="append",
        default=[],
        help="CHUNK:PROMPT or SECONDSs:PROMPT: a new prompt from this chunk or time on",
    )
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--image", type=Path, help="the first frame (default: text to video)")
    start.add_argument("--video", type=Path, help="MP4 file for video to video")
    parser.add_argument(
        "--chunks", type=int, default=3, help="chunks to generate without --video (default: 3)"
    )
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("stream.mp4"), help=".mp4 or .npy")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--model-options", type=json.loads, default={}, help="JSON for additional_config.omni.model"
    )
    return parser


def _switch(text: str) -> TimedPrompt:
    try:
        return TimedPrompt.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(args: argparse.Namespace) -> None:
    if args.out.suffix not in (".mp4", ".npy") or not args.out.parent.is_dir():
        raise SystemExit(f"--out must be a .mp4 or .npy in an existing folder, got {args.out}")
    video_THWC = None if args.video is None else read_video(args.video, args.height, args.width)
    # Memory for sessions on a CPU, in GiB. By default, vLLM's CPU worker requires 92 % of the
    # memory to be free.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM  # imported late, so that `--help` need not wait for it

    llm = LLM(
        model=str(args.model),
        config_format="omni",
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tensor_parallel_size,
        additional_config={
            "omni": {"height": args.height, "width": args.width, "model": args.model_options}
        },
    )
    # Without this call, vLLM warns at exit that the engine ended unexpectedly.
    atexit.register(llm.llm_engine.engine_core.shutdown)
    info = StreamInfo.from_vllm_config(llm.llm_engine.vllm_config, model=args.model.name)
    prompts = PromptSchedule(args.switch, info.fps)
    image = (
        None
        if args.image is None
        else torch.from_numpy(np.asarray(rgb_image(Image.open(args.image))).copy())
    )

    results = []
    start = 0
    for index, size in enumerate(chunk_sizes(info, args.chunks, video_THWC)):
        params = DiffusionParams(
            session_id="stream",
            chunk_index=index,
            prompt=prompts.take_prompt(index, start) or (args.prompt if index == 0 else None),
            seed=args.seed if index == 0 else None,
            height=args.height,
            width=args.width,
            options={"source": "text" if video_THWC is None else "video"},
        )
        tensors = {} if video_THWC is None else {"video": video_THWC[start : start + size]}
        if image is not None and index == 0:
            tensors["image"] = image
        started_s = time.perf_counter()
        (output,) = llm.encode(
            [engine_prompt()],
            params.to_pooling_params(tensors),
            pooling_task="plugin",
            use_tqdm=False,
        )
        try:
            meta, made = unpack(output.outputs.data)
        except RequestFailed as error:
            raise SystemExit(f"chunk {index} was refused: {error}") from error
        results.append(made["frames"].numpy().copy())
        took_ms = 1000 * (time.perf_counter() - started_s)
        noise = f", noise {meta['noise_scale']:.3f}" if "noise_scale" in meta else ""
        print(f"chunk {index}: {size} frames in {took_ms:.0f} ms{noise}")
        start += size

    frames_THWC = np.concatenate(results)
    if args.out.suffix == ".mp4":
        args.out.write_bytes(encode_mp4(frames_THWC, info.fps))
    else:
        np.save(args.out, frames_THWC)
    print(f"wrote {args.out}: {len(frames_THWC)} frames, {args.width}x{args.height}")


def chunk_sizes(info: StreamInfo, num_chunks: int, video_THWC: torch.Tensor | None) -> list[int]:
    """Return the number of video frames in each chunk. Input frames after the last whole chunk are
    dropped. Exit if the input video does not fill a chunk.
    """
    if video_THWC is None:
        sizes = info.chunk_sizes(first=True)
        return [next(sizes) for _ in range(num_chunks)]
    sizes_of_video, left = info.split(len(video_THWC), first=True)
    if not sizes_of_video:
        raise SystemExit(
            f"{len(video_THWC)} frames do not fill a chunk: the first chunk takes "
            f"{info.first_chunk_frames}"
        )
    if left:
        print(f"the last {left} frames do not fill a chunk and are dropped")
    return sizes_of_video


def read_video(path: Path, height: int, width: int) -> torch.Tensor:
    """Return the frames of an MP4 file, stretched to `height` x `width`, uint8 [T, H, W, 3]."""
    frames_THWC, _ = decode_mp4(path.read_bytes())
    resized = [
        np.asarray(Image.fromarray(frame_HWC).resize((width, height))) for frame_HWC in frames_THWC
    ]
    return torch.from_numpy(np.stack(resized))


if __name__ == "__main__":
    main(make_parser().parse_args())
