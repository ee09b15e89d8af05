# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni make-tiny MODEL OUT`: create a tiny random checkpoint in the layout of a released
one.
"""

import argparse
from pathlib import Path
from typing import Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.output_paths import new_directory
from vllm_omni.entrypoints.cli.parsers import add_command, family_list
from vllm_omni.model_executor.checkpoint.root_config import write_root_config


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "make-tiny",
        "write a tiny random checkpoint in a real layout",
        (
            "Write a checkpoint with random weights and few small layers in the layout of the "
            "released one, in a second and without a download. It is served like the released one. "
            "Its videos show noise."
        ),
        [
            "vllm-omni make-tiny lingbot_world my_tiny_world",
            "vllm-omni make-tiny causal_wan my_tiny_wan --layout diffusers --seed 7",
        ],
    )
    parser.add_argument("model", help=f"model family: {family_list()}")
    parser.add_argument("out", type=Path, help="directory to write; must be empty or absent")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random weights (default: 0)"
    )
    parser.add_argument(
        "--layout", help="checkpoint layout; an unknown one is refused with a list of the layouts"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    write_tiny(args.model, args.out, args.seed, args.layout)
    print(f"wrote {args.out}; serve it with: vllm serve {args.out} --omni")
    return 0


def write_tiny(model: str, out: Path, seed: int = 0, layout: str | None = None) -> None:
    """Write a tiny random checkpoint.

    Args:
        model: Name of the model family.
        out: Directory to write the checkpoint to.
        seed: Seed for the random weights.
        layout: Checkpoint layout. Default: the first layout that the model family lists.

    Raises:
        CommandError: An argument is invalid.
    """
    from vllm_omni.model_executor.models.registry import get_family

    try:
        family = get_family(model)
    except ValueError as error:
        raise CommandError(str(error)) from error
    layout = layout or family.layouts[0]
    if layout not in family.layouts:
        raise CommandError(
            f"unknown layout {layout!r} for {family.name}; allowed: {', '.join(family.layouts)}"
        )
    if not 0 <= seed < 2**63:
        raise CommandError(f"--seed must be from 0 to 2**63 - 1, got {seed}")
    new_directory(out)
    family.make_tiny(out, seed, layout)
    write_root_config(out)
