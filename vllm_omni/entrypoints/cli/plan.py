# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan MODEL --gpu H200 --n 4`: which split to serve a streaming model with, predicted from shapes."""

import argparse
from typing import Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.parsers import add_command


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "plan",
        "predict speed, memory and the best split over several GPUs",
        (
            "Predict frames per second, first frame, memory and sessions of a streaming model for "
            "every split over the GPUs, from its shapes and the GPU's rates. Needs no GPU and no "
            "weights."
        ),
        [
            "vllm-omni plan lingbot_world --gpu H200 --n 4",
            "vllm-omni plan my_world --sessions 4",
            "vllm-omni plan all --gpu H100",
        ],
    )
    parser.add_argument(
        "model",
        help="lingbot_world, lingbot_world_v2_1_3b, causal_wan_1_3b, causal_wan_14b, matrix_game, a causal Wan's or a "
        "Waypoint's download name, a checkpoint directory, or `all`: which sizes fit which card in which precision",
    )
    parser.add_argument("--gpu", default="H200", help="kind of GPU: H200 or H100 (default: H200)")
    parser.add_argument("--n", type=int, default=1, help="GPUs to use at most (default: 1)")
    parser.add_argument("--sessions", type=int, default=1, help="live sessions at once (default: 1)")
    parser.add_argument("--height", type=int, help="pixels (default: the model's)")
    parser.add_argument("--width", type=int, help="pixels (default: the model's)")
    parser.add_argument("--window", type=int, help="latent frames a chunk sees (default: the model's)")
    parser.add_argument("--latent-frames", type=int, help="of a chunk, four frames each (default: 3)")
    parser.add_argument("--video-input", action="store_true", help="each chunk brings its video (causal Wan)")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="as vLLM's (default: auto)")
    parser.add_argument(
        "--quantization", choices=("fp8", "nvfp4"), help="of the weights; their memory is counted (default: none)"
    )
    parser.add_argument(
        "--text-encoder",
        choices=("host", "gpu"),
        help="where it is (default: the host for LingBot World, else the GPU)",
    )
    parser.add_argument("--max-loras", type=int, help="LoRA adapters in the GPU's memory (default: none)")
    parser.add_argument("--max-lora-rank", type=int, default=16, help="their largest rank (default: 16, as vLLM's)")
    parser.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether forwards are launched as CUDA graphs, omni.model.cuda_graphs",
    )
    parser.add_argument(
        "--host-launch-ms",
        type=float,
        help="the host's time to launch a layer (default: 1.4; 1.1 to 2.7 seen)",
    )
    parser.add_argument("--matched-steps", type=int, help="noise-matched cache with so many steps (causal Wan)")
    parser.add_argument("--chunks-in-flight", type=int, help="of one noise-matched stream (default: as many as steps)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_omni.planning.cards import CARDS
    from vllm_omni.planning.models import model_of, size_names
    from vllm_omni.planning.report import WEIGHT_ITEMSIZES, fits_text, plan_text

    if args.gpu not in CARDS:
        raise CommandError(f"--gpu {args.gpu}: measured are {', '.join(CARDS)}")
    for name in ("n", "sessions"):
        if not 1 <= getattr(args, name) <= 64:
            raise CommandError(f"--{name} must be from 1 to 64, got {getattr(args, name)}")
    sizes = {"height": args.height, "width": args.width, "window": args.window}
    changes = {name: value for name, value in sizes.items() if value is not None}
    if any(value < 1 for value in changes.values()) or any(changes.get(side, 16) % 16 for side in ("height", "width")):
        raise CommandError("--height and --width must be positive multiples of 16, --window at least 1")
    if args.latent_frames is not None:
        if not 1 <= args.latent_frames <= 32:
            raise CommandError(f"--latent-frames must be from 1 to 32, got {args.latent_frames}")
        changes["chunk"] = changes["first_chunk"] = args.latent_frames
    if args.video_input:
        changes["video_input"] = True
    if args.kv_cache_dtype == "fp8":
        changes["kv_itemsize"] = 1
    if args.quantization is not None:
        changes["weight_itemsize"] = WEIGHT_ITEMSIZES[args.quantization]
    if args.text_encoder is not None:
        changes["text_on_cpu"] = args.text_encoder == "host"
    if args.max_loras is not None:
        if not (1 <= args.max_loras <= 64 and 1 <= args.max_lora_rank <= 512):
            raise CommandError("--max-loras must be from 1 to 64, --max-lora-rank from 1 to 512")
        changes |= {"adapters": args.max_loras, "adapter_rank": args.max_lora_rank}
    changes |= _cache(args)
    card = CARDS[args.gpu]
    if args.host_launch_ms is not None:
        if not 0.05 <= args.host_launch_ms <= 100:
            raise CommandError(f"--host-launch-ms must be from 0.05 to 100, got {args.host_launch_ms:g}")
        card = card.beside_host(args.host_launch_ms / (1e3 * card.launch_s))
    if args.model == "all":
        print(fits_text([model_of(name, **sized(changes)) for name in size_names()], card))
        return 0
    try:
        print(plan_text(model_of(args.model, **changes), card, args.n, args.sessions))
    except ValueError as error:
        raise CommandError(str(error)) from error
    return 0


def sized(changes: dict[str, Any]) -> dict[str, Any]:
    """The settings among `changes` that all models take. Precision and place of the text encoder are rows."""
    return {name: value for name, value in changes.items() if name in ("height", "width", "window")}


def _cache(args: argparse.Namespace) -> dict[str, Any]:
    """How the stream is served, as fields of `StreamModel`. Raises CommandError."""
    facts: dict[str, Any] = {"cuda_graphs": args.cuda_graphs}
    if args.matched_steps is None:
        if args.chunks_in_flight is not None:
            raise CommandError("--chunks-in-flight needs --matched-steps: with the strict cache a chunk runs alone")
        return facts
    in_flight = args.matched_steps if args.chunks_in_flight is None else args.chunks_in_flight
    if not (1 <= args.matched_steps <= 64 and 1 <= in_flight <= 64):
        raise CommandError("--matched-steps and --chunks-in-flight must be from 1 to 64")
    return {**facts, "denoise": args.matched_steps, "clean": 0, "in_flight": in_flight}
