# SPDX-License-Identifier: Apache-2.0
"""Score a trained world by comparing generated walks with the rendered ground truth.

The walks are not part of the training data, and the real engine generates them.

    python -m training.tiny_world.score --model DIR --seed 1 --walks 24 --chunks 100 --json

The script prints one JSON object (logs go to stderr). In all measures, a chunk is three latent
frames (12 video frames), regardless of the model's own chunks. Each list contains one value per
chunk, averaged over the walks:

    psnr, ssim
        PSNR and SSIM of the latent frames; each latent frame is weighted by the number of video
        frames that it represents (4, or 1 for the first one)
    sharpness
        mean horizontal difference divided by that of the ground truth
    style
        share of walks whose mean colour is closer to that of the same views rendered in their own
        style than to that of those views in any other style. The same views are used because the
        styles' mean colours over all views would misclassify a fifth of the ground truth
    turn
        `l` or `j` held for 20 latent frames: the median turn of a latent frame divided by the
        commanded turn, and the number of turns in the wrong direction
    step
        `w` held for 8 latent frames: the median distance walked divided by the commanded distance
    switch
        share of walks whose style is recognised as that of their new prompt, in the first and
        second chunk after the switch
    level
        mean level of the last tenth of the chunks minus the mean of the style, with pixel values
        in [-1, 1]
    loop
        two latent frames of rest, 6 turning away, 6 turning back, rest: PSNR of the last chunk
        against the last frame of the first chunk
    seconds_per_chunk
        the engine's elapsed time (summed over all engines), and the time that each stage takes

With --players, the script instead measures the scenarios in `players.py`, which are walks as people
play them. With --uploads, it measures how the world continues images that do not come from the
renderer (`uploads.py`).

The prompts, keys, start positions and noise of a walk depend only on the seed.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
from PIL import Image

from training.tiny_world import measure
from training.tiny_world.controls import distances_walked
from training.tiny_world.play import LATENTS_A_CHUNK, EngineWorld, Played, SeveralEngines, World
from training.tiny_world.players import SCENARIOS, score_players
from training.tiny_world.prompts import PROMPTS
from training.tiny_world.render import FOCAL, Renderer
from training.tiny_world.truth import HELD_OUT, Truth
from training.tiny_world.uploads import score_uploads
from training.tiny_world.village import STYLES
from training.tiny_world.walks import STEP_M, free_places, key_bits, random_walks, scripted_walks
from vllm_omni.evaluation import likeness
from vllm_omni.evaluation.camera_motion import pixels_at_centre, turns
from vllm_omni.evaluation.likeness import unit
from vllm_omni.worlds.movement import YAW_DEGREES

TURN_LATENTS, STEP_LATENTS, AWAY_LATENTS = 20, 8, 6
SWITCH_AT, SWITCH_LATENTS = 6, 12
DRILLS = ("turn", "step", "switch", "loop")
_STEP_RANGE, _STEP_GRID = 1.5, 0.125
"""Range and spacing of the positions with which a frame is compared. The range is a multiple of the
commanded distance, and the spacing is in metres.
"""


# -- which walks -----------------------------------------------------------------------------------


def wandering(number: int, chunks: int, seed: int) -> list[Played]:
    """Return walks with random keys. The styles alternate between walks, and each walk's prompts
    are drawn from those of its style.
    """
    walks = random_walks(number, LATENTS_A_CHUNK * chunks, seed + HELD_OUT)
    generator = torch.Generator().manual_seed(seed + HELD_OUT + 1)
    return [
        Played(
            _place(walks.positions[index, 0]),
            float(walks.yaw[index, 0]),
            tuple(walks.held(index)),
            index % len(STYLES),
            {0: _prompt(index % len(STYLES), generator)},
            seed * 1000 + index,
        )
        for index in range(number)
    ]


def turning(number: int, seed: int) -> list[Played]:
    """Return walks that hold `l` or `j`."""
    keys = [(key,) * (1 + TURN_LATENTS) for key in ("l", "j")]
    return _drill(number, seed, 2, lambda index: keys[index % 2])


def stepping(number: int, seed: int) -> list[Played]:
    """Return walks that hold `w` where the way is free for 1.5 times the commanded distance."""
    far = math.ceil(STEP_LATENTS * _STEP_RANGE)
    keys = torch.full((64 * number, 1 + far), key_bits("w"), dtype=torch.uint8)
    starts, yaw = free_places(64 * number, torch.Generator().manual_seed(seed + HELD_OUT + 3))
    ends = scripted_walks(starts, yaw, keys).positions[:, -1]
    free = ((ends - starts).norm(dim=1) > far * STEP_M * 0.999).nonzero()[:number, 0]
    assert len(free) == number, "a way in six is free for so far"
    return _drill(number, seed, 3, lambda _: ("w",) * (1 + STEP_LATENTS), (starts[free], yaw[free]))


def switching(number: int, seed: int) -> list[Played]:
    """Return walks with random keys that switch to a prompt of another style after two chunks."""
    wanders = wandering(number, SWITCH_LATENTS // LATENTS_A_CHUNK, seed + 4)
    generator = torch.Generator().manual_seed(seed + HELD_OUT + 4)
    out = []
    for index, walk in enumerate(wanders):
        prompts = {**walk.prompts, SWITCH_AT: _prompt(switched_to(index), generator)}
        out.append(
            Played(walk.start, walk.yaw, walk.keys, walk.style, prompts, walk.seed + 400_000)
        )
    return out


def switched_to(index: int) -> int:
    """Return the style in which a switching walk ends. The result alternates between the two other
    styles.
    """
    return (index + 1 + index // len(STYLES) % 2) % len(STYLES)


def looping(number: int, seed: int) -> list[Played]:
    """Return walks that rest, turn away, turn back and rest again."""
    rest = ("",) * LATENTS_A_CHUNK
    ways = [
        (*rest, *away * AWAY_LATENTS, *back * AWAY_LATENTS, *rest) for away, back in ("lj", "jl")
    ]
    return _drill(number, seed, 5, lambda index: ways[index % 2])


def _drill(
    number: int,
    seed: int,
    kind: int,
    keys: Callable[[int], tuple[str, ...]],
    positions: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> list[Played]:
    generator = torch.Generator().manual_seed(seed + HELD_OUT + 100 * kind)
    starts, yaw = free_places(number, generator) if positions is None else positions
    return [
        Played(
            _place(starts[index]),
            float(yaw[index]),
            keys(index),
            index % len(STYLES),
            {0: _prompt(index % len(STYLES), generator)},
            seed * 1000 + kind * 100_000 + index,
        )
        for index in range(number)
    ]


def _place(position_2: torch.Tensor) -> tuple[float, float]:
    x, z = position_2.tolist()
    return x, z


def _prompt(style: int, generator: torch.Generator) -> str:
    prompts = PROMPTS[STYLES[style]]
    return prompts[int(torch.randint(len(prompts), (1,), generator=generator))]


def _turn(keys: str) -> float:
    """Return the angle, in radians to the right, by which these keys turn the camera in a latent
    frame.
    """
    return math.radians(YAW_DEGREES) * (("l" in keys) - ("j" in keys))


# -- measures --------------------------------------------------------------------------------------


def latent_frames(videos: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the video frames at latent frames, [N, L, H, W, 3]: the last frame of each group of
    four. All videos must have the same length.
    """
    return torch.stack([video[::4] for video in videos])


def against_truth(made_NLHW3: torch.Tensor, truth_NLHW3: torch.Tensor) -> dict[str, list[float]]:
    """Return PSNR, SSIM and sharpness for each chunk, averaged over walks.

    Sharpness is the ratio of the sums over all walks, because a per-walk ratio is meaningless if
    the ground truth is a blank wall.
    """
    out: dict[str, list[float]] = {"psnr": [], "ssim": [], "sharpness": []}
    for start in range(0, made_NLHW3.shape[1], LATENTS_A_CHUNK):
        made, truth = (
            unit(frames[:, start : start + LATENTS_A_CHUNK]) for frames in (made_NLHW3, truth_NLHW3)
        )
        weight = torch.full((made.shape[1],), 4.0, device=made.device)
        if start == 0:
            weight[0] = 1.0
        weight /= weight.sum()
        out["psnr"].append(_mean(likeness.decibels(likeness.squared_error(made, truth) @ weight)))
        out["ssim"].append(_mean(likeness.ssim(made, truth) @ weight))
        edges_made, edges_truth = likeness.edges(made).sum(), likeness.edges(truth).sum()
        out["sharpness"].append(_mean(edges_made / edges_truth.clamp(min=1e-6)))
    return out


def style_shares(
    frames_NLHW3: torch.Tensor, style_N: torch.Tensor, palette_NLS3: torch.Tensor
) -> list[float]:
    """For each chunk, return the share of walks with a mean colour that is closest to the palette
    of their own style.
    """
    shares = []
    for part, colours in zip(
        frames_NLHW3.split(LATENTS_A_CHUNK, dim=1),
        palette_NLS3.split(LATENTS_A_CHUNK, dim=1),
        strict=True,
    ):
        named = measure.named_style(measure.mean_colour(unit(part)), colours.mean(dim=1))
        shares.append(_mean((named == style_N).float()))
    return shares


def turn_score(videos: Sequence[torch.Tensor], walks: Sequence[Played]) -> dict[str, Any]:
    """Compare each latent frame's turn with the commanded one. In the result, `ratio` is the median
    ratio, and `pixels` is the median movement at the middle of the image.
    """
    ratios, signs = [], 0
    for video, walk in zip(videos, walks, strict=True):
        commanded = torch.tensor([math.degrees(_turn(keys)) for keys in walk.keys[1:]])
        found = turns(video[::4], FOCAL)
        ratios.append(found / commanded)
        signs += int((found * commanded <= 0).sum())
    ratio = torch.cat(ratios)
    width = videos[0].shape[2]
    commanded_pixels = pixels_at_centre(torch.tensor(YAW_DEGREES), width, FOCAL)
    return {
        "ratio": _median(ratio),
        "worst_walk": max((_median(row) for row in ratios), key=lambda value: abs(value - 1.0)),
        "pixels": _median(pixels_at_centre(ratio * YAW_DEGREES, width, FOCAL)),
        "commanded_pixels": round(float(commanded_pixels), 3),
        "wrong_sign": signs,
        "latents": len(ratio),
    }


def step_score(
    videos: Sequence[torch.Tensor], walks: Sequence[Played], renderer: Renderer
) -> dict[str, Any]:
    """For each latent frame, divide the distance that the camera has walked by the distance
    commanded so far. Return the median ratio over all frames and for each latent frame.
    """
    rows = []
    distances = torch.arange(0, STEP_LATENTS * STEP_M * _STEP_RANGE + 1e-6, _STEP_GRID)
    for video, walk in zip(videos, walks, strict=True):
        ahead = torch.tensor([math.sin(walk.yaw), math.cos(walk.yaw)])
        positions = torch.tensor(walk.start) + distances[:, None] * ahead
        yaw = torch.full((len(positions),), walk.yaw)
        along = renderer.render(
            positions, yaw, torch.zeros_like(yaw), torch.full((len(positions),), walk.style)
        )
        found = distances_walked(video[4::4], along, distances)
        rows.append(found / (STEP_M * torch.arange(1, len(found) + 1)))
    ratio = torch.stack(rows)
    return {
        "ratio": _median(ratio.flatten()),
        "by_latent": [_median(column) for column in ratio.unbind(1)],
        "metres_a_latent": round(STEP_M * _median(ratio.flatten()), 4),
        "walks": len(rows),
    }


def switch_score(videos: Sequence[torch.Tensor], palette_NLS3: torch.Tensor) -> dict[str, Any]:
    """Return the share of walks whose style is recognised as the new prompt's, for each chunk from
    the first one with the new prompt on.
    """
    frames = latent_frames(videos)[:, SWITCH_AT:]
    target = torch.tensor([switched_to(index) for index in range(len(videos))])
    return {
        "share": style_shares(frames, target, palette_NLS3[:, SWITCH_AT:]),
        "walks": len(videos),
    }


def loop_score(videos: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return the PSNR of the last chunk's frames against the last frame of the first chunk. The
    camera has the same pose in both.
    """
    rows = []
    for video in videos:
        first = video[4 * (LATENTS_A_CHUNK - 1)]
        last = video[-4 * (LATENTS_A_CHUNK - 1) :]  # the chunk's first frames still turn
        rows.append(likeness.decibels((unit(last) - unit(first)).square().mean()))
    return {
        "psnr": _mean(torch.stack(rows)),
        "worst": round(float(torch.stack(rows).min()), 3),
        "walks": len(rows),
    }


def level_score(
    made_NLHW3: torch.Tensor,
    truth_NLHW3: torch.Tensor,
    style_N: torch.Tensor,
    means_S3: torch.Tensor,
) -> dict[str, Any]:
    """Return the mean level of the last tenth of the chunks minus the style's mean, with pixel
    values in [-1, 1], and the same difference for the ground truth.

    The walks of a style are averaged, because levels differ between positions and a single walk
    therefore says little.
    """
    chunks = made_NLHW3.shape[1] // LATENTS_A_CHUNK
    first = min(math.floor(0.9 * chunks), chunks - 1)
    out: dict[str, Any] = {
        "chunks": [first + 1, chunks],
        "difference": {},
        "difference_of_truth": {},
    }
    for style, name in enumerate(STYLES):
        own = style_N == style
        for key, frames in (("difference", made_NLHW3), ("difference_of_truth", truth_NLHW3)):
            if bool(own.any()):
                level = unit(frames[own, LATENTS_A_CHUNK * first :]).mean()
                out[key][name] = round(2 * float(level - means_S3[style].mean()), 4)
    out["largest"] = max((abs(value) for value in out["difference"].values()), default=0.0)
    return out


def _mean(values: torch.Tensor) -> float:
    return round(float(values.mean()), 4)


def _median(values: torch.Tensor) -> float:
    return round(float(values.median()), 4)


# -- everything together ---------------------------------------------------------------------------


def score(
    world: World,
    truth: Truth,
    *,
    seed: int,
    walks: int,
    chunks: int,
    drills: Sequence[str] = DRILLS,
    strip: Path | None = None,
) -> dict[str, Any]:
    """Measure a world. `drills` holds the names of the drills in `DRILLS` to measure in addition to
    random walks, and `strip` is the path of the image to write.
    """
    wander = wandering(walks, chunks, seed)
    made = latent_frames(world.play(wander, truth.starts(wander)))
    should, device = truth.frames(wander), truth.renderer.device
    style = torch.tensor([walk.style for walk in wander])
    out: dict[str, Any] = {
        "seed": seed,
        "walks": walks,
        "chunks": chunks,
        **against_truth(made.to(device), should.to(device)),
        "style": style_shares(made, style, truth.colours(wander)),
        "level": level_score(made, should, style, truth.style_means()),
    }
    if strip is not None:
        write_strip(strip, made, should)
    makers = {"turn": turning, "step": stepping, "switch": switching, "loop": looping}
    for name in drills:
        drilled = makers[name](walks, seed)
        videos = world.play(drilled, truth.starts(drilled))
        if name == "turn":
            out[name] = turn_score(videos, drilled)
        elif name == "step":
            out[name] = step_score(videos, drilled, truth.renderer)
        elif name == "switch":
            out[name] = switch_score(videos, truth.colours(drilled))
        else:
            out[name] = loop_score(videos)
    return out


def write_strip(
    path: Path, made_NLHW3: torch.Tensor, truth_NLHW3: torch.Tensor, *, walks: int = 3
) -> None:
    """Write an image with two rows per walk, the ground truth above the generated frames. The
    columns are the last frames of those chunks among 1, 2, 5, 10, 20, 50 and 100 that exist.
    """
    chunks = made_NLHW3.shape[1] // LATENTS_A_CHUNK
    latents = [
        LATENTS_A_CHUNK * chunk - 1 for chunk in (1, 2, 5, 10, 20, 50, 100) if chunk <= chunks
    ]
    rows = []
    for index in range(min(walks, len(made_NLHW3))):
        for frames in (truth_NLHW3, made_NLHW3):
            rows.append(torch.cat([frames[index, latent] for latent in latents], dim=1))
    Image.fromarray(torch.cat(rows).numpy()).save(path)


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options for `omni.model` that the arguments select. `--model-options` overrides
    them.
    """
    options: dict[str, Any] = {"decoder": args.decoder} if args.decoder else {}
    if args.steps:
        options["denoise_indices"] = steps_of(args.model, args.steps)
    if args.window is not None:
        options["window_frames"] = args.window
    if args.sink is not None:
        options["sink_frames"] = args.sink
    return options | args.model_options


def steps_of(model: Path, steps: int) -> list[int]:
    """Return `steps` evenly spaced denoise steps of the checkpoint, including the first one."""
    from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
    from vllm_omni.model_executor.models.lingbot_world.config import DENOISE_INDICES

    indices = DENOISE_INDICES[find_layout(model).version]
    if len(indices) % steps:
        raise SystemExit(f"--steps must divide the model's {len(indices)}, got {steps}")
    return list(indices[:: len(indices) // steps])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--walks", type=int, default=24)
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--strip", type=Path, help="write frames, truth above made, as a .png")
    parser.add_argument("--drills", nargs="*", choices=DRILLS, default=DRILLS, help="default: all")
    parser.add_argument(
        "--players",
        nargs="*",
        choices=tuple(SCENARIOS),
        metavar="NAME",
        help="only these scenarios; no name: all",
    )
    parser.add_argument(
        "--player-walks", type=int, help="of each scenario; default: its own number"
    )
    parser.add_argument(
        "--player-seconds", type=int, help="of play, at most; default: each scenario's own length"
    )
    parser.add_argument("--uploads", action="store_true", help="only images from elsewhere")
    parser.add_argument("--batch", type=int, default=8, help="sessions at once, of each engine")
    parser.add_argument(
        "--engines", type=int, default=1, help="walks are shared out to so many engines"
    )
    parser.add_argument("--decoder", choices=("wan", "tiny"))
    parser.add_argument("--steps", type=int, choices=(1, 2, 4), help="denoise steps")
    parser.add_argument("--window", type=int, help="latent frames a chunk sees")
    parser.add_argument("--sink", type=int, help="first latent frames kept for ever")
    parser.add_argument("--quantization", help="as vLLM's")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="as vLLM's"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: the checkpoint's"
    )
    parser.add_argument("--model-options", type=json.loads, default={}, help="JSON for omni.model")
    parser.add_argument(
        "--omni", type=json.loads, default={}, help="JSON for the rest of additional_config.omni"
    )
    parser.add_argument(
        "--snapshot-every", type=int, help="save, close and restore sessions after so many chunks"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--size", type=int, nargs=2, default=(96, 160), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.6,
        help="the renderer works on the same device",
    )
    parser.add_argument(
        "--eager", action="store_true", help="compile neither the renderer nor the model"
    )
    return parser


def make_truth(args: argparse.Namespace) -> Truth:
    """Return the ground truth with which worlds of the selected size are compared."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    at_once = 32 if device == "cuda" else 8
    return Truth(Renderer(device, *args.size, compiled=not args.eager, frames_per_call=at_once))


def run(args: argparse.Namespace, truth: Truth) -> dict[str, Any]:
    """Score the world that the arguments select."""
    world, shape = make_world(args, truth.renderer.device.type)
    options = {name: getattr(args, name) for name in ("seed", "walks", "chunks", "drills", "strip")}
    try:
        result = score(world, truth, **options)
    finally:
        world.close()
    return {"model": args.model.name, **shape, **result, "seconds_per_chunk": world.times.summary()}


def run_players(args: argparse.Namespace, truth: Truth) -> dict[str, Any]:
    """Measure the scenarios that the arguments select."""
    world, shape = make_world(args, truth.renderer.device.type)
    options = {"names": args.players, "walks": args.player_walks, "seconds": args.player_seconds}
    try:
        result = score_players(world, truth.renderer, seed=args.seed, **options)
    finally:
        world.close()
    return {"model": args.model.name, **shape, **result, "seconds_per_chunk": world.times.summary()}


def make_world(
    args: argparse.Namespace, device: str
) -> tuple[EngineWorld | SeveralEngines, dict[str, Any]]:
    """Start the engine that the arguments select. Return the engine, and its description for the
    result.
    """
    engine: dict[str, Any] = {
        "tensor_parallel_size": args.tensor_parallel_size,
        "enforce_eager": args.eager,
        "snapshot_every": args.snapshot_every,
    }
    if args.dtype:
        engine["dtype"] = args.dtype
    if args.quantization is not None:
        engine["quantization"] = args.quantization
    if args.kv_cache_dtype != "auto":
        engine["kv_cache_dtype"] = args.kv_cache_dtype
    if device == "cuda":
        engine["gpu_memory_utilization"] = args.gpu_memory_utilization
        if args.tensor_parallel_size > torch.cuda.device_count():
            engine |= {
                "worker_cls": "vllm_omni.worker.SharedGPUWorker",
                "distributed_executor_backend": "mp",
            }
    # All sessions share one forward pass.
    together = {"max_requests_per_step": args.batch, "batch_invariant": False}
    omni = {**together, **args.omni, "model": model_options(args)}
    engine |= {"omni": omni, "batch": args.batch}
    shape = {
        "size": list(args.size),
        "device": device,
        "dtype": args.dtype,
        "engines": args.engines,
        "omni": omni,
    }
    if args.engines > 1:
        return SeveralEngines(args.engines, args.model, tuple(args.size), **engine), shape
    return EngineWorld(args.model, tuple(args.size), **engine), shape


def run_uploads(args: argparse.Namespace, truth: Truth) -> dict[str, Any]:
    """Measure how the world continues the images in `uploads.py`."""
    world, shape = make_world(args, truth.renderer.device.type)
    try:
        result = score_uploads(world, tuple(args.size), truth.style_means(), seed=args.seed)
    finally:
        world.close()
    return {"model": args.model.name, **shape, **result}


def table(result: dict[str, Any]) -> str:
    """Format the result as a human-readable table."""
    lines = [f"{'chunk':>6} {'psnr':>7} {'ssim':>6} {'sharp':>6} {'style':>6}"]
    for index in range(result["chunks"]):
        row = [result[name][index] for name in ("psnr", "ssim", "sharpness", "style")]
        lines.append(f"{index + 1:>6} {row[0]:>7.2f} {row[1]:>6.3f} {row[2]:>6.3f} {row[3]:>6.2f}")
    lines += [
        f"{name}: {result[name]}"
        for name in ("level", *DRILLS, "seconds_per_chunk")
        if name in result
    ]
    return "\n".join(lines)


def own_stdout() -> TextIO:
    """Return a stream to standard output that is reserved for the result. From now on, vLLM and its
    processes, which would otherwise log to standard output, write to stderr.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def main() -> None:
    args = make_parser().parse_args()
    out = own_stdout()
    if args.players is not None:
        print(json.dumps(run_players(args, make_truth(args))), file=out, flush=True)
        return
    if args.uploads:
        print(json.dumps(run_uploads(args, make_truth(args))), file=out, flush=True)
        return
    result = run(args, make_truth(args))
    print(json.dumps(result) if args.json else table(result), file=out, flush=True)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
