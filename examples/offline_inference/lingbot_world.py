# SPDX-License-Identifier: Apache-2.0
"""Generate a video from an image and a camera path, offline, with one request per chunk.

    vllm-omni make-tiny lingbot_world my_world
    python examples/offline_inference/lingbot_world.py my_world --image start.png \\
        --camera walk/ --out walk.mp4

The camera folder contains `poses.npy` ([N, 4, 4], absolute camera-to-world poses with OpenCV axes,
one per video frame) and `intrinsics.npy` ([N, 4], [N, 3, 3] or [N, 4, 4], in pixels of an 832x480
image). Without `--camera`, the camera follows `--keys`, or moves straight ahead for `--chunks`
chunks. `--keys` lists the keys held in each latent frame. A latent frame is four video frames,
except the first, which is one. The w, a, s and d keys move the camera, i, k, j and l turn it, and
`-` means no key. Without `--image`, the start image is the demo's landscape.

The suffix of `--out` selects the format: `.mp4` for a video, `.png` for numbered images
(`walk-0000.png` ...), `.npy` for raw frames, uint8 [T, H, W, 3]. With `--latents`, the `.npy` file
contains the model's latents, float32 [16, F, H / 8, W / 8].
"""

import argparse
import atexit
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vllm_omni.entrypoints.cli.demo import start_image
from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.controls.key_script import parse_keys
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed, unpack


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Image and camera path to video, offline.")
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--image", type=Path, help="start image")
    steering = parser.add_mutually_exclusive_group()
    steering.add_argument("--camera", type=Path, help="folder with poses.npy and intrinsics.npy")
    steering.add_argument("--keys", help="keys held in each latent frame, for example 'w*6 wl*3'")
    steering.add_argument(
        "--chunks", type=int, default=3, help="chunks without --camera and --keys (default: 3)"
    )
    parser.add_argument("--prompt", default="A path through green hills towards the evening sun")
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--out", type=Path, default=Path("lingbot_world.mp4"), help=".mp4, .png or .npy"
    )
    parser.add_argument(
        "--latents", action="store_true", help="write latents, not frames; --out must end in .npy"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument(
        "--enforce-eager", action="store_true", help="no compilation: starts faster, runs slower"
    )
    parser.add_argument(
        "--model-options", type=json.loads, default={}, help="JSON for additional_config.omni.model"
    )
    return parser


def main(args: argparse.Namespace) -> None:
    check_out(args.out, args.latents)
    try:
        keys = parse_keys(args.keys or "")
    except ValueError as error:
        raise SystemExit(f"--keys: {error}") from error
    # Memory for sessions on a CPU, in GiB. By default, vLLM's CPU worker requires 92 % of the
    # memory to be free.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    from vllm import LLM  # imported late, so that `--help` need not wait for it

    image = Image.open(args.image if args.image is not None else io.BytesIO(start_image()))
    omni = {"height": args.height, "width": args.width, "model": args.model_options}
    llm = LLM(
        model=str(args.model),
        config_format="omni",
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tensor_parallel_size,
        enforce_eager=args.enforce_eager,
        additional_config={"omni": omni},
    )
    # Without this call, vLLM warns at exit that the engine ended unexpectedly.
    atexit.register(llm.llm_engine.engine_core.shutdown)
    info = StreamInfo.from_vllm_config(llm.llm_engine.vllm_config, model=args.model.name)
    controls = walk(info, keys) if keys else path(info, args.camera, args.chunks)

    results = []
    for index, (actions, camera) in enumerate(controls):
        params = DiffusionParams(
            session_id="walk",
            chunk_index=index,
            prompt=args.prompt if index == 0 else None,
            seed=args.seed if index == 0 else None,
            height=args.height,
            width=args.width,
            actions=actions,
            output="latents" if args.latents else "rgb",
        )
        data = {
            **({"image": image} if index == 0 else {}),
            **({"camera": camera} if camera else {}),
        }
        prompt = {"prompt_token_ids": [0], "multi_modal_data": data}
        started_s = time.perf_counter()
        (output,) = llm.encode(
            prompt, params.to_pooling_params(), pooling_task="plugin", use_tqdm=False
        )
        try:
            meta, made = unpack(output.outputs.data)
        except RequestFailed as error:
            raise SystemExit(f"chunk {index} was refused: {error}") from error
        results.append(made["latents" if args.latents else "frames"].numpy().copy())
        took_ms = 1000 * (time.perf_counter() - started_s)
        stages = ", ".join(f"{name} {sum(ms):.0f}" for name, ms in meta["timings_ms"].items())
        print(f"chunk {index}: {results[-1].shape} in {took_ms:.0f} ms ({stages})")

    if args.latents:
        np.save(args.out, np.concatenate(results, axis=1))
        print(f"wrote {args.out}: latents of {len(results)} chunks")
    else:
        frames_THWC = np.concatenate(results)
        write_frames(args.out, frames_THWC, info.fps)
        print(f"wrote {args.out}: {len(frames_THWC)} frames, {args.width}x{args.height}")


def check_out(out: Path, latents: bool) -> None:
    """Exit if the output path is invalid. `main` calls this before it loads the model."""
    allowed = (".npy",) if latents else (".mp4", ".png", ".npy")
    if out.suffix not in allowed:
        raise SystemExit(
            f"--out must end in {' or '.join(allowed)}{' with --latents' * latents}, got {out}"
        )
    if not out.parent.is_dir():
        raise SystemExit(f"--out {out}: there is no folder {out.parent}")


def write_frames(out: Path, frames_THWC: np.ndarray, fps: float) -> None:
    """Write uint8 frames as a video, numbered images or an array, depending on the suffix of
    `out`.
    """
    if out.suffix == ".mp4":
        out.write_bytes(encode_mp4(frames_THWC, fps))
    elif out.suffix == ".png":
        for index, frame_HWC in enumerate(frames_THWC):
            Image.fromarray(frame_HWC).save(out.with_stem(f"{out.stem}-{index:04}"))
    else:
        np.save(out, frames_THWC)


Controls = Iterator[tuple[list[list[str]] | None, dict[str, torch.Tensor] | None]]
"""The controls of each chunk: either keys per latent frame or a camera with one pose per video
frame. The unused element is None.
"""


def walk(info: StreamInfo, keys: list[list[str]]) -> Controls:
    """Split keys into chunks. If the last chunk is incomplete, repeat the last entry to fill it."""
    first = info.first_chunk_latent_frames or info.latent_frames_per_chunk
    start, end = 0, first
    while start < len(keys):
        part = keys[start:end]
        yield part + keys[-1:] * (end - start - len(part)), None
        start, end = end, end + info.latent_frames_per_chunk


def path(info: StreamInfo, folder: Path | None, num_chunks: int) -> Controls:
    """Split the camera path in `folder`, or a straight path if there is no folder, into chunks."""
    poses_N44, intrinsics = straight_on(info, num_chunks) if folder is None else read_camera(folder)
    start = 0
    for size in chunk_sizes(info, len(poses_N44)):
        part = slice(start, start + size)
        yield None, {"poses": poses_N44[part], "intrinsics": intrinsics[part]}
        start += size


def chunk_sizes(info: StreamInfo, num_poses: int) -> list[int]:
    """Return the sizes of the chunks that `num_poses` poses fill, at one pose per video frame. Exit
    if the last chunk would be incomplete.
    """
    sizes, left = info.split(num_poses, first=True)
    if left or not sizes:
        raise SystemExit(
            f"{num_poses} poses do not fill whole chunks: the first chunk takes "
            f"{info.first_chunk_frames}, later ones "
            f"{info.chunk_frames}; send {info.first_chunk_frames} + a multiple of "
            f"{info.chunk_frames}"
        )
    return sizes


def read_camera(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Read poses `[N, 4, 4]` and intrinsics from a folder. The model validates them."""
    poses, intrinsics = (
        np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("poses", "intrinsics")
    )
    if len(poses) != len(intrinsics):
        raise SystemExit(
            f"{folder}: {len(poses)} poses and {len(intrinsics)} intrinsics; one of each is "
            "needed per frame"
        )
    return torch.from_numpy(poses), torch.from_numpy(intrinsics)


def straight_on(info: StreamInfo, num_chunks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a camera path for `num_chunks` chunks that moves forward without rotation."""
    count = info.first_chunk_frames + (num_chunks - 1) * info.chunk_frames
    poses_N44 = torch.eye(4).repeat(count, 1, 1)
    poses_N44[:, 2, 3] = 0.0125 * torch.arange(count)
    return poses_N44, torch.tensor(info.key_intrinsics(info.width, info.height)).expand(count, 4)


if __name__ == "__main__":
    main(make_parser().parse_args())
