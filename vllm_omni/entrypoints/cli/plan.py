# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan MODEL --gpu H200 --n 4`: show how many sessions fit on the GPUs, and the measured
speeds.
"""

import argparse
from typing import TYPE_CHECKING, Any, Final, get_args

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.parsers import add_command
from vllm_omni.model_executor.presets import DEFAULT_PRESET, PresetName

if TYPE_CHECKING:
    from vllm_omni.planning.stream_model import StreamModel

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for `--max-lora-rank`. They are repeated here, because `plan` does not
import vLLM."""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "plan",
        "memory and sessions of a model for every split over several GPUs",
        (
            "Compute memory and sessions of a streaming model for every split over the GPUs from "
            "its shapes, and print the measured speed of its network. Needs no GPU and no weights."
        ),
        [
            "vllm-omni plan lingbot_world --gpu H200 --n 4",
            "vllm-omni plan my_world --sessions 4",
            "vllm-omni plan lingbot_world_v2_1_3b --preset small",
            "vllm-omni plan all",
        ],
    )
    parser.add_argument(
        "model",
        help="lingbot_world, lingbot_world_v2_1_3b, causal_wan_1_3b, causal_wan_14b, matrix_game, "
        "a causal Wan's or a "
        "Waypoint's download name, a checkpoint directory, or `all`: which sizes fit which GPU in "
        "which precision",
    )
    parser.add_argument("--gpu", default="H200", help="kind of GPU, H200 or H100 (default: H200)")
    parser.add_argument("--n", type=int, default=1, help="largest number of GPUs (default: 1)")
    parser.add_argument("--sessions", type=int, default=1, help="live sessions (default: 1)")
    parser.add_argument(
        "--preset",
        choices=get_args(PresetName),
        default=DEFAULT_PRESET,
        help=f"`omni.model.preset`, which other flags override (default: {DEFAULT_PRESET})",
    )
    parser.add_argument("--height", type=int, help="pixels (default: the model's)")
    parser.add_argument("--width", type=int, help="pixels (default: the model's)")
    parser.add_argument(
        "--window", type=int, help="latent frames in the K/V window (default: the model's)"
    )
    parser.add_argument(
        "--latent-frames",
        type=int,
        help="latent frames per chunk, of four frames each (default: 3)",
    )
    parser.add_argument(
        "--video-input", action="store_true", help="each chunk has an input video (causal Wan)"
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8", "fp8_e4m3"),
        default="auto",
        help="as vLLM's (default: auto)",
    )
    parser.add_argument(
        "--quantization",
        choices=("fp8", "nvfp4"),
        help="quantization of the weights (default: none)",
    )
    parser.add_argument(
        "--text-encoder",
        choices=("host", "gpu"),
        help="device of the text encoder (default: the GPU)",
    )
    parser.add_argument("--max-loras", type=int, help="slots of LoRA adapters (default: none)")
    parser.add_argument(
        "--max-lora-rank",
        type=int,
        choices=LORA_RANKS,
        default=16,
        help="largest rank of an adapter (default: 16, as in vLLM)",
    )
    parser.add_argument(
        "--matched-steps", type=int, help="denoise steps of a noise-matched cache (causal Wan)"
    )
    parser.add_argument(
        "--chunks-in-flight",
        type=int,
        help="chunks in flight of a noise-matched stream (default: as many as steps)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_omni.planning.memory import GPU_BYTES
    from vllm_omni.planning.models import model_of, size_names
    from vllm_omni.planning.report import WEIGHT_ITEMSIZES, ServedDefaults, fits_text, plan_text

    if args.gpu not in GPU_BYTES:
        raise CommandError(f"--gpu must be one of {', '.join(GPU_BYTES)}, got {args.gpu}")
    for name in ("n", "sessions"):
        if not 1 <= getattr(args, name) <= 64:
            raise CommandError(f"--{name} must be from 1 to 64, got {getattr(args, name)}")
    sizes = {"height": args.height, "width": args.width, "window": args.window}
    changes = {name: value for name, value in sizes.items() if value is not None}
    if any(value < 1 for value in changes.values()) or any(
        changes.get(side, 16) % 16 for side in ("height", "width")
    ):
        raise CommandError(
            "--height and --width must be positive multiples of 16, --window at least 1"
        )
    if args.latent_frames is not None:
        if not 1 <= args.latent_frames <= 32:
            raise CommandError(f"--latent-frames must be from 1 to 32, got {args.latent_frames}")
        changes["chunk"] = args.latent_frames
    if args.video_input:
        changes["video_input"] = True
    if args.kv_cache_dtype != "auto":
        changes["kv_itemsize"] = 1
    if args.quantization is not None:
        changes["weight_itemsize"] = WEIGHT_ITEMSIZES[args.quantization]
    if args.text_encoder is not None:
        changes["text_on_cpu"] = args.text_encoder == "host"
    if args.max_loras is not None:
        if not 1 <= args.max_loras <= 64:
            raise CommandError(f"--max-loras must be from 1 to 64, got {args.max_loras}")
        changes |= {"adapters": args.max_loras, "adapter_rank": args.max_lora_rank}
    changes |= _cache(args)
    if args.model == "all" and args.preset != DEFAULT_PRESET:
        raise CommandError("`plan all` lists every precision: name one model with --preset")
    try:
        if args.model == "all":
            print(fits_text([_sized(model_of(name), changes) for name in size_names()]))
            return 0
        model = model_of(args.model, args.preset, **changes)
        defaults = ServedDefaults(
            model_of(args.model, args.preset), schedule_steps=model_of(args.model).denoise
        )
        print(plan_text(model, defaults, args.gpu, args.n, args.sessions))
    except ValueError as error:
        raise CommandError(str(error)) from error
    return 0


def _sized(model: "StreamModel", changes: dict[str, Any]) -> "StreamModel":
    """Return a model of `plan all` with the user's video size and window.

    `plan all` ignores all other settings, because it prints one row for each precision and device
    of the text encoder. A model with a fixed token grid keeps its own size and window.
    """
    from vllm_omni.planning.models import model_of

    sizes = {name: changes[name] for name in ("height", "width", "window") if name in changes}
    return model if model.grid_tokens else model_of(model.name, **sizes)


def _cache(args: argparse.Namespace) -> dict[str, Any]:
    """Return the K/V cache options as fields of `StreamModel`. Raises CommandError if they are
    invalid.
    """
    if args.matched_steps is None:
        if args.chunks_in_flight is not None:
            raise CommandError(
                "--chunks-in-flight needs --matched-steps: with the strict cache a chunk runs alone"
            )
        return {}
    in_flight = args.matched_steps if args.chunks_in_flight is None else args.chunks_in_flight
    if not (1 <= args.matched_steps <= 64 and 1 <= in_flight <= 64):
        raise CommandError("--matched-steps and --chunks-in-flight must be from 1 to 64")
    return {"denoise": args.matched_steps, "noise_matched": True, "in_flight": in_flight}
