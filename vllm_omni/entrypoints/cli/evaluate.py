# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni evaluate DIR`: generate videos with a model and measure their quality."""

import argparse
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm_omni.entrypoints.cli import demo, replay
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.output_paths import check_directory, new_directory
from vllm_omni.entrypoints.cli.parsers import add_command

if TYPE_CHECKING:
    from vllm_omni.evaluation.client import EvaluatedServer
    from vllm_omni.evaluation.generate import RunOptions
    from vllm_omni.evaluation.run_folder import RunFolder

_KEY_VARIABLE: Final = "VLLM_API_KEY"
_LOG: Final = "server.log"
_LONGEST_PROMPT: Final = 16384


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "evaluate",
        "generate videos with a model and measure them",
        (
            "Serve a model, generate videos, and measure sharpness, contrast, colour, flicker and, "
            "for worlds, turns, steps and returns against the keys that were held. DIR gets the "
            "videos in the layouts of VBench and WBench, report.md, report.json and frames.png. "
            "Nothing is downloaded. The status is 0 if everything could be measured; the report "
            "lists unusual values.\n\nWithout --model and --server, the trained world of this "
            f"package is evaluated. The API key of a server is read from {_KEY_VARIABLE}."
        ),
        [
            "vllm-omni evaluate my_run",
            "vllm-omni evaluate my_run --model my_model --image photo.jpg --prompt 'A harbour'",
            "vllm-omni evaluate my_run --server http://127.0.0.1:8000 --program rest loop",
            "vllm-omni evaluate my_run --recordings recordings/walk.recording",
            "vllm-omni evaluate my_run --measure --reference frames_of_the_original",
        ],
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="folder of the run; new, or empty")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--model", help="checkpoint directory or Hugging Face id to serve")
    source.add_argument("--server", metavar="URL", help="a server of this package that runs")
    source.add_argument(
        "--recordings",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="run recorded sessions again (omni.record_dir) and measure them",
    )
    source.add_argument(
        "--measure",
        action="store_true",
        help="only measure the videos that DIR has already; without run.json, any .mp4 and .png",
    )
    parser.add_argument(
        "--serve-flags",
        default="",
        metavar="FLAGS",
        help="flags of `vllm serve` for --model, as one text: '--tensor-parallel-size 2'",
    )
    parser.add_argument(
        "--program",
        nargs="+",
        metavar="NAME",
        help="key programs for worlds: rest, walk_and_back, left_and_back, right_and_back, loop "
        "(default: all)",
    )
    parser.add_argument(
        "--prompt", action="append", default=[], help="prompt; may be repeated (default: a few)"
    )
    parser.add_argument("--prompts", type=Path, help="file with one prompt in each line")
    parser.add_argument(
        "--image",
        action="append",
        type=Path,
        default=[],
        help="start image; may be repeated, once for each prompt",
    )
    parser.add_argument(
        "--starts", type=int, default=1, help="start images of the world to use (default: 1)"
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=1,
        help="videos of each prompt and program (default: 1; VBench expects 5)",
    )
    parser.add_argument(
        "--turn",
        type=int,
        default=16,
        help="latent frames of each turn of a program (default: 16, 4 s at 16 frames per second)",
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed (default: 0)")
    parser.add_argument("--size", help="WIDTHxHEIGHT in pixels (default: the model's)")
    parser.add_argument(
        "--num-frames", type=int, help="frames of clips without keys (default: the model's)"
    )
    parser.add_argument(
        "--reference",
        type=Path,
        help="folder with reference frames, named like the videos: NAME.mp4, NAME.npy, or frame N "
        "as NAME.N.png or NAME.N.npy; PSNR and SSIM of each are reported",
    )
    parser.add_argument(
        "--start-timeout", type=float, default=1800.0, help="seconds the server may take to start"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0 if all videos were generated and measured."""
    import torch

    from vllm_omni.evaluation.client import ServerRefusedError
    from vllm_omni.evaluation.report import measure_run
    from vllm_omni.evaluation.run_folder import RunFolder

    # The frames are so small that a second thread would make measuring many times slower on a busy
    # machine.
    torch.set_num_threads(1)
    options = _options(args)
    if args.reference is not None and not args.reference.is_dir():
        raise CommandError(f"--reference {args.reference} is not a directory")
    try:
        if args.measure:
            folder = RunFolder.read(args.dir)
            check_directory("DIR", args.dir)
        elif args.recordings:
            folder = _replayed(args)
        else:
            folder = _generated(args, options)
        measured = measure_run(folder, args.reference)
    except (ServerRefusedError, ValueError) as error:
        raise CommandError(str(error)) from error
    for result in measured:
        for finding in result.findings():
            print(f"{result.made.file}: {finding}")
    print(f"wrote {args.dir / 'report.md'}, report.json and frames.png")
    return 0


def _options(args: argparse.Namespace) -> "RunOptions":
    """Return the options for a run.

    Raises:
        CommandError: An option is invalid or a file cannot be read.
    """
    from vllm_omni.evaluation.generate import RunOptions
    from vllm_omni.evaluation.steering import PROGRAMS

    if unknown := set(args.program or ()) - PROGRAMS.keys():
        raise CommandError(f"--program {min(unknown)}: allowed: {', '.join(PROGRAMS)}")
    for name, most in (("starts", 1000), ("samples", 1000), ("turn", 64)):
        if not 1 <= getattr(args, name) <= most:
            raise CommandError(f"--{name} must be from 1 to {most}, got {getattr(args, name)}")
    if args.size is not None and not re.fullmatch(r"[1-9]\d{1,3}x[1-9]\d{1,3}", args.size):
        raise CommandError(f"--size must be WIDTHxHEIGHT in pixels, 832x480, got {args.size}")
    try:
        lines = [] if args.prompts is None else args.prompts.read_text().splitlines()
        images = [_image_file(path) for path in args.image]
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot be read: {error}") from error
    prompts = [*args.prompt, *(line.strip() for line in lines if line.strip())]
    if args.prompts is not None and not prompts:
        raise CommandError(f"--prompts {args.prompts} has no prompt; write one in each line")
    if too_long := [prompt for prompt in prompts if len(prompt) > _LONGEST_PROMPT]:
        raise CommandError(
            f"a prompt has {len(too_long[0])} characters; at most {_LONGEST_PROMPT} are allowed"
        )
    if len(images) > 1 and len(images) != len(prompts):
        raise CommandError(
            f"{len(images)} times --image for {len(prompts)} prompts; pass one, or one for each"
        )
    return RunOptions(
        programs=args.program or tuple(PROGRAMS),
        prompts=prompts,
        images=images,
        default_image=demo.start_image(),
        default_prompt=demo.PROMPT,
        starts=args.starts,
        samples=args.samples,
        turn=args.turn,
        seed=args.seed,
        size=args.size,
        num_frames=args.num_frames,
    )


def _image_file(path: Path) -> bytes:
    """Convert an image file to PNG, with the pixels that image viewers display."""
    import io

    from PIL import Image

    from vllm_omni.multimodal import rgb_image

    content = io.BytesIO()
    with Image.open(path) as image:
        rgb_image(image).save(content, "PNG")
    return content.getvalue()


def _generated(args: argparse.Namespace, options: "RunOptions") -> "RunFolder":
    from vllm_omni.evaluation.generate import generate
    from vllm_omni.evaluation.run_folder import RunFolder

    model = None if args.server else _checked_model(args.model)
    check_directory("DIR", args.dir)
    if args.dir.is_dir() and [path.name for path in args.dir.iterdir()] == [_LOG]:
        (args.dir / _LOG).unlink()  # left over from an earlier run whose server did not start
    new_directory(args.dir)
    with _server(args, model) as server:
        folder = RunFolder.create(args.dir, server.model() if model is None else Path(model).name)
        generate(server, folder, options)
    return folder


def _checked_model(model: str | None) -> str:
    """Return the checkpoint directory or Hugging Face id to serve.

    Raises:
        CommandError: The directory is not a checkpoint, or the model does not generate videos or
            images.
    """
    from vllm_omni.model_executor.checkpoint.hub import is_hub_id
    from vllm_omni.model_executor.models.registry import detect_family

    if model is not None and is_hub_id(model):
        return model
    path, _ = demo.find_world(None if model is None else Path(model))
    try:
        family = detect_family(path)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if family.capabilities is None and family.stream_info is None:
        raise CommandError(f"{family.title} generates no videos or images, so nothing is measured")
    return str(path)


@contextmanager
def _server(args: argparse.Namespace, model: str | None) -> "Iterator[EvaluatedServer]":
    """Yield the server that the user named, or run a new server for the duration of the `with`
    block.
    """
    from vllm_omni.evaluation.client import EvaluatedServer

    key = os.environ.get(_KEY_VARIABLE)
    if model is None:
        if not args.server.startswith(("http://", "https://")):
            raise CommandError(f"--server {args.server}: pass its address, http://HOST:PORT")
        yield EvaluatedServer(args.server, key)
        return
    demo.interrupt_on_signals()
    port, log = demo.free_port(0), args.dir / _LOG
    flags = shlex.split(args.serve_flags)
    width, height = map(int, args.size.split("x")) if args.size else (None, None)
    with demo.server(model, port, height, width, log, extra=flags) as process:
        demo.wait_until_healthy(process, args.start_timeout)
        yield EvaluatedServer(f"http://127.0.0.1:{port}", key)


def _replayed(args: argparse.Namespace) -> "RunFolder":
    """Replay the recordings and return the folder that contains the results."""
    from vllm_omni.evaluation.recorded import recorded_controls
    from vllm_omni.evaluation.run_folder import RunFolder
    from vllm_omni.session_files.recording import committed_chunks, read_recording

    missing = [path for path in args.recordings if not path.is_file()]
    if missing:
        raise CommandError(f"--recordings {missing[0]} is not a file")
    new_directory(args.dir)
    folder = RunFolder.create(args.dir, args.recordings[0].stem)
    for path in args.recordings:
        header, requests, _ = read_recording(path)
        chunks = [chunk for _, chunk in committed_chunks(requests)]
        prompt = (chunks[0].params.prompt if chunks else None) or ""
        video = folder.next_path(prompt, ".mp4")
        arguments = ["replay", str(path), "--out", str(video)]
        parser = argparse.ArgumentParser()
        replay.add_parser(parser.add_subparsers())
        replayed = parser.parse_args(arguments)
        if replayed.run(replayed):
            print(f"{path.name}: measured anyway")
        seed = chunks[0].params.seed
        folder.add(video, prompt=prompt, seed=seed, controls=recorded_controls(header, chunks))
    return folder
