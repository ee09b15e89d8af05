# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni verify MODEL --golden DIR`: compare a model's tensors with those recorded from its
original implementation.
"""

import argparse
from pathlib import Path
from typing import Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.parsers import add_command
from vllm_omni.testing.parity import FAMILIES


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "verify",
        "compare a model with recorded golden tensors",
        (
            "Run each recorded scenario of a golden directory through this package's model and "
            "compare every stage with the tensors of the original implementation. The exit status "
            "is 1 if a stage is outside its tolerance."
        ),
        [
            "vllm-omni verify waypoint --golden tests/golden/waypoint",
            "vllm-omni verify lance --golden tests/golden/lance --json",
        ],
    )
    parser.add_argument("model", help=f"model family: {', '.join(FAMILIES)}")
    parser.add_argument("--golden", type=Path, required=True, help="directory of golden files")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Return 0 if every scenario stayed within its tolerances, otherwise 1."""
    from vllm_omni.model_executor.models.registry import get_family
    from vllm_omni.testing import parity

    name = args.model
    if name not in parity.FAMILIES:  # `name` may be an alias
        try:
            name = get_family(name).name
        except ValueError as error:
            raise CommandError(str(error)) from error
    if name not in parity.FAMILIES:
        raise CommandError(f"{name} has no golden comparison")
    if not args.golden.is_dir():
        raise CommandError(
            f"--golden {args.golden} is not a directory; pass a directory of recorded golden files"
        )
    report = parity.verify(name, args.golden)
    print(report.to_json() if args.json else report.to_text())
    return 0 if report.ok else 1
