# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan MODEL --gpu H200 --n 4`: which split to serve a streaming model with, predicted from shapes."""

import argparse
from typing import Any

from vllm_omni.entrypoints.cli.errors import CommandError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("plan", help="predict speed, memory and the best split over several GPUs")
    parser.add_argument("model", help="lingbot_world, causal_wan_1_3b, causal_wan_14b, or a checkpoint directory")
    parser.add_argument("--gpu", default="H200", help="kind of GPU; only H200 is measured (default: H200)")
    parser.add_argument("--n", type=int, default=1, help="GPUs to use at most (default: 1)")
    parser.add_argument("--sessions", type=int, default=1, help="live sessions at once (default: 1)")
    parser.add_argument("--height", type=int, help="pixels (default: 480)")
    parser.add_argument("--width", type=int, help="pixels (default: 832)")
    parser.add_argument("--window", type=int, help="latent frames a chunk sees (default: the model's)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_omni.planning.cards import CARDS
    from vllm_omni.planning.models import model_of
    from vllm_omni.planning.report import plan_text

    if args.gpu not in CARDS:
        raise CommandError(f"--gpu {args.gpu}: measured are {', '.join(CARDS)}")
    for name in ("n", "sessions"):
        if not 1 <= getattr(args, name) <= 64:
            raise CommandError(f"--{name} must be from 1 to 64, got {getattr(args, name)}")
    sizes = {"height": args.height, "width": args.width, "window": args.window}
    changes = {name: value for name, value in sizes.items() if value is not None}
    if any(value < 1 for value in changes.values()) or any(changes.get(side, 16) % 16 for side in ("height", "width")):
        raise CommandError("--height and --width must be positive multiples of 16, --window at least 1")
    try:
        print(plan_text(model_of(args.model, **changes), CARDS[args.gpu], args.n, args.sessions))
    except ValueError as error:
        raise CommandError(str(error)) from error
    return 0
