# SPDX-License-Identifier: Apache-2.0
"""Measure the speed, bit rate and quality of video encoders on a village walk (1280x720, 60 fps).

    python benchmarks/encoders.py                        # every encoder of this machine, two cores
    python benchmarks/encoders.py --encoders nvjpeg      # one of them

This benchmark needs no engine. The village's renderer draws a walk, which takes seconds on a GPU
and about ten seconds per frame on a CPU. The frames are cached in `build/`. The walk is played
forwards and then backwards, and is encoded in chunks of `--chunk` frames at playback speed. The
following values are reported for each encoder:

    encode_ms      elapsed time per frame, averaged over its chunk
    cpu_ms         CPU time per frame, summed over all threads
    mbit_per_s     bit rate of the stream without its first frame, which is a key frame
    psnr_db        PSNR of the decoded frames over the samples of Y, Cb and Cr (4:2:0), from the
                   mean squared error over all frames
    psnr_rgb_db    PSNR over R, G and B, which includes the loss of the conversion to 4:2:0

If an encoder is not available on the machine, the result states why.
"""

import argparse
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, add_output_arguments, quantiles, save

from vllm_omni.entrypoints.realtime.encoding.frames import (
    EncodedPart,
    FrameEncoder,
    FrameStamp,
    StampedFrames,
    StatelessEncoder,
)
from vllm_omni.entrypoints.realtime.encoding.h264 import H264Encoder
from vllm_omni.entrypoints.realtime.encoding.images import ImageEncoder, NvJpegEncoder

# T frames, H height, W width, C = 3 channels (RGB)

WALK = ("w", "wl", "w", "wj", "l", "w", "a", "j")
"""Keys of the walk, in order. Each is held for five latent frames."""
LATENTS_PER_KEY = 5
LATENT_S = 0.25
SQUARE = (1.2, -4.0)
"""Start position of the walk: x and z, in metres. It is the camera position of the `square` start
image, in which the camera faces north.
"""
QUALITY = 95


# -- frames ----------------------------------------------------------------------------------------


def render_walk(num_frames: int, fps: float, width: int, height: int) -> np.ndarray:
    """Return frames of a walk through the village, uint8 [T, H, W, C]."""
    import torch

    from training.tiny_world.render import Renderer
    from training.tiny_world.walks import key_bits, scripted_walks

    device = "cuda" if torch.cuda.is_available() else "cpu"
    num_latents = math.ceil(num_frames / (fps * LATENT_S)) + 2
    keys = [key_bits(WALK[at // LATENTS_PER_KEY % len(WALK)]) for at in range(num_latents)]
    start_N2 = torch.tensor([SQUARE])
    walk = scripted_walks(start_N2, torch.zeros(1), torch.tensor([keys], dtype=torch.uint8))
    at_T = torch.arange(num_frames) / (fps * LATENT_S)
    before_T = at_T.long()

    def between(values_L: Any) -> Any:
        part = (at_T - before_T).view(-1, *[1] * (values_L.dim() - 1)).to(values_L.dtype)
        return torch.lerp(values_L[before_T], values_L[before_T + 1], part)

    renderer = Renderer(device, height, width, compiled=True, frames_per_call=4)
    style_T = torch.zeros(num_frames, dtype=torch.long)
    frames = renderer.render(
        between(walk.positions[0]), between(walk.yaw[0]), between(walk.pitch[0]), style_T
    )
    return frames.cpu().numpy()


def walk_frames(args: argparse.Namespace) -> np.ndarray:
    """Return the walk's `--frames` frames forwards and then backwards. The frames are rendered, or
    loaded from the cache of an earlier run.
    """
    file = args.cache / f"village_{args.width}x{args.height}_{args.fps:g}_{args.frames}.npy"
    if not file.exists():
        args.cache.mkdir(parents=True, exist_ok=True)
        np.save(file, render_walk(args.frames, args.fps, args.width, args.height))
    frames_THWC = np.load(file)
    # The backward walk omits the last and the first frame, at which the walk turns around.
    return np.concatenate([frames_THWC, frames_THWC[-2:0:-1]])


# -- encoders --------------------------------------------------------------------------------------


class StreamCandidate(StatelessEncoder):
    """Encoder for an FFmpeg codec that this package does not serve. The measurements help decide
    whether to add the codec.

    Args:
        codec: FFmpeg's name for the codec.
        options: Options that make the codec encode in real time.
    """

    def __init__(self, codec: str, fps: float, bits_per_s: int, options: dict[str, str]) -> None:
        self._codec, self._fps, self._bits_per_s = codec, fps, bits_per_s
        self._options = options
        self._context: Any = None

    def encode(self, frames: StampedFrames) -> list[EncodedPart]:
        _, height, width, _ = frames.frames_THWC.shape
        if self._context is None:
            self._context = av.CodecContext.create(self._codec, "w")
            self._context.width, self._context.height = width, height
            self._context.pix_fmt, self._context.bit_rate = "yuv420p", self._bits_per_s
            self._context.time_base = Fraction(1, round(self._fps))
            self._context.framerate = Fraction(self._fps).limit_denominator(1001)
            self._context.options = self._options
        parts = []
        for frame_HWC, stamp in zip(frames.frames_THWC, frames.stamps, strict=True):
            image = av.VideoFrame.from_ndarray(frame_HWC, format="rgb24")
            image.pts = stamp.frame
            for packet in self._context.encode(image):
                parts.append(EncodedPart(bytes(packet), [stamp], width, height, packet.is_keyframe))
        return parts


def encoders(fps: float, bits_per_s: int) -> dict[str, Callable[[], FrameEncoder]]:
    """Return the constructors of all encoders, by encoder name."""
    svt = {"preset": "12", "svtav1-params": "pred-struct=1:rc=2:lp=2:lookahead=0"}
    vpx = {
        "deadline": "realtime",
        "cpu-used": "8",
        "lag-in-frames": "0",
        "error-resilient": "1",
        "qmin": "4",
        "qmax": "56",
        "threads": "2",
        "minrate": str(bits_per_s),
        "maxrate": str(bits_per_s),
        "bufsize": str(bits_per_s // 4),
    }
    return {
        "libx264": lambda: H264Encoder("libx264", fps, bits_per_s),
        "h264_nvenc": lambda: H264Encoder("h264_nvenc", fps, bits_per_s),
        "pillow": lambda: ImageEncoder("jpeg", QUALITY),
        "nvjpeg": lambda: NvJpegEncoder(QUALITY),
        "libvpx": lambda: StreamCandidate("libvpx", fps, bits_per_s, vpx),
        "libsvtav1": lambda: StreamCandidate("libsvtav1", fps, bits_per_s, svt),
    }


DECODERS = {
    "libx264": "h264",
    "h264_nvenc": "h264",
    "libvpx": "vp8",
    "libsvtav1": "libdav1d",
}


# -- measuring -------------------------------------------------------------------------------------


def chunks(frames_THWC: np.ndarray, fps: float, size: int) -> Iterator[StampedFrames]:
    for start in range(0, len(frames_THWC), size):
        part = frames_THWC[start : start + size]
        stamps = [
            FrameStamp(start // size, start + at, round((start + at) * 1e6 / fps))
            for at in range(len(part))
        ]
        yield StampedFrames(part, stamps)


def planes(frame: av.VideoFrame) -> np.ndarray:
    """Return the samples of a frame as a flat array, in 4:2:0 and the limited range."""
    if frame.format.name.startswith("yuvj"):  # JPEG: the full range
        frame = av.VideoFrame.from_ndarray(frame.to_ndarray(format="rgb24"), format="rgb24")
    return frame.to_ndarray(format="yuv420p").reshape(-1)


def decoded(name: str, parts: list[EncodedPart]) -> Iterator[av.VideoFrame]:
    if name not in DECODERS:
        for part in parts:
            with av.open(io.BytesIO(part.data), format="mjpeg") as container:
                yield next(container.decode(video=0))
        return
    context = av.CodecContext.create(DECODERS[name], "r")
    for part in parts:
        yield from context.decode(av.Packet(part.data))
    yield from context.decode(None)


class Quality:
    """Accumulates the mean squared error over frames."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, shown: np.ndarray, source: np.ndarray) -> None:
        error = shown.astype(np.float32) - source.astype(np.float32)
        self._sum += float(np.square(error).sum(dtype=np.float64))
        self._count += error.size

    @property
    def psnr_db(self) -> float:
        return round(10 * math.log10(255**2 * self._count / max(self._sum, 1e-9)), 2)


def measure(
    name: str, create: Callable[[], FrameEncoder], frames_THWC: np.ndarray, args: argparse.Namespace
) -> dict[str, Any]:
    """Encode the walk and return the measurements, or the reason why the encoder cannot run."""
    wall_ms, cpu_ms, parts = [], [], []
    try:
        encoder = create()
        for _ in range(2):  # the second run excludes the encoder's construction
            warm_up = StampedFrames(frames_THWC[:1], [FrameStamp(0, 0, 0)])
            (encoder if name in ("pillow", "nvjpeg") else create()).encode(warm_up)
        started_s = time.perf_counter()
        for chunk in chunks(frames_THWC, args.fps, args.chunk):
            due_s = started_s + chunk.stamps[0].frame / args.fps
            time.sleep(max(0.0, due_s - time.perf_counter()))
            before = time.perf_counter(), time.process_time()
            parts += encoder.encode(chunk)
            after = time.perf_counter(), time.process_time()
            wall_ms.append(1000 * (after[0] - before[0]) / len(chunk))
            cpu_ms.append(1000 * (after[1] - before[1]) / len(chunk))
    # PyAV, torch and torchvision raise many exception types if a driver or device is missing
    except Exception as error:
        return {"missing": (str(error).strip().splitlines() or [type(error).__name__])[0][:200]}
    if not parts:
        return {"missing": "the encoder delays all frames"}
    shown_by_yuv, shown_by_rgb, num_shown = Quality(), Quality(), 0
    # If a codec starts with a delay, fewer frames are decoded. Each decoded frame is compared with
    # its own source frame.
    for source_HWC, frame in zip(frames_THWC, decoded(name, parts), strict=False):
        source = av.VideoFrame.from_ndarray(source_HWC, format="rgb24")
        shown_by_yuv.add(planes(frame), planes(source))
        shown_by_rgb.add(frame.to_ndarray(format="rgb24"), source_HWC)
        num_shown += 1
    rest = parts[1:]
    return {
        "encode_ms": quantiles(wall_ms),
        "cpu_ms": quantiles(cpu_ms),
        "mbit_per_s": round(sum(len(one.data) for one in rest) * 8 * args.fps / len(rest) / 1e6, 2),
        "key_frame_kbyte": round(len(parts[0].data) / 1000, 1),
        "delayed_frames": len(frames_THWC) - len(parts),
        "frames_shown": num_shown,
        "psnr_db": shown_by_yuv.psnr_db,
        "psnr_rgb_db": shown_by_rgb.psnr_db,
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    frames_THWC = walk_frames(args)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    found = {}
    for name, create in encoders(args.fps, args.bits_per_s).items():
        if name in args.encoders:
            found[name] = measure(name, create, frames_THWC, args)
            print(name, found[name], file=sys.stderr, flush=True)
    return {
        "world": "village",
        "size": f"{args.width}x{args.height}",
        "fps": args.fps,
        "frames": len(frames_THWC),
        "frames_per_chunk": args.chunk,
        "cores_used": args.cores,
        "bits_per_s": args.bits_per_s,
        "jpeg_quality": QUALITY,
        "load_average": os.getloadavg()[0],
        "encoders": found,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(encoders(60, 8_000_000))
    parser.add_argument("--encoders", nargs="+", choices=names, default=names)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=720)
    parser.add_argument("--fps", type=float, default=60.0)
    parser.add_argument("--frames", type=int, default=120, help="frames that are rendered")
    parser.add_argument("--chunk", type=int, default=4, help="frames encoded at once")
    parser.add_argument("--cores", type=int, default=2, help="CPU cores that may be used")
    parser.add_argument("--bits-per-s", type=int, default=8_000_000)
    parser.add_argument(
        "--cache", type=Path, default=RESULTS.parent / "frames", help="folder of rendered frames"
    )
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    save("encoders", run(args), args)


if __name__ == "__main__":
    main()
