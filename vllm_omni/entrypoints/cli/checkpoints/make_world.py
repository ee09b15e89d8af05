# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni make-world OUT`: copy this package's trained world to a checkpoint directory."""

import argparse
import shutil
from pathlib import Path
from typing import Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.output_paths import new_directory
from vllm_omni.entrypoints.cli.parsers import add_command
from vllm_omni.model_executor.checkpoint.root_config import write_root_config


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "make-world",
        "write the small trained world that comes with the package",
        (
            "Write the trained demo world, a village at 160x96, as a checkpoint directory with "
            "start images and prompts."
        ),
        [
            "vllm-omni make-world my_world",
            "vllm serve my_world --omni",
        ],
    )
    parser.add_argument("out", type=Path, help="directory to write; must be empty or absent")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    num_bytes = write_world(args.out)
    print(
        f"wrote {args.out} ({num_bytes / 1e6:.1f} MB); serve it with: vllm serve {args.out} --omni"
    )
    return 0


def write_world(out: Path) -> int:
    """Copy the trained world to `out` and return the checkpoint size in bytes.

    Raises:
        CommandError: The trained world cannot be read, or the directory cannot be used.
    """
    from vllm_omni.worlds import village_checkpoint

    try:
        source = village_checkpoint()
    except ValueError as error:
        raise CommandError(str(error)) from error
    new_directory(out)
    try:
        shutil.copytree(source, out, dirs_exist_ok=True, copy_function=shutil.copyfile)
        write_root_config(out)
    except (OSError, shutil.Error) as error:
        raise CommandError(f"cannot write {out}: {error}") from error
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
