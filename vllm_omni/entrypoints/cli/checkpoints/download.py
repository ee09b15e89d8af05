# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni download MODEL [OUT]`: download released weights from the Hugging Face Hub.

Weights with a restrictive licence are downloaded only with `--accept-license`. `huggingface_hub`
resumes downloads and verifies checksums. If the Hub cannot be reached, the command lists the
required files so that you can copy them from another machine.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.output_paths import check_directory
from vllm_omni.entrypoints.cli.parsers import add_command, download_list
from vllm_omni.model_executor.checkpoint.root_config import ROOT_CONFIG, write_root_config

_GB = 10**9


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "download",
        "fetch released weights from the Hugging Face hub",
        (
            "Fetch the released weights of a model into one directory, ready to serve. An "
            "interrupted download continues where it stopped. Hugging Face's own variables apply, "
            "for example HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE."
        ),
        [
            "vllm-omni download lingbot_world_v2_1_3b --dry-run",
            "vllm-omni download waypoint /srv/models/waypoint",
        ],
    )
    parser.add_argument("model", help=f"name of the weights: {download_list()}")
    parser.add_argument(
        "out", type=Path, nargs="?", help="directory to write (default: the model's name)"
    )
    parser.add_argument(
        "--accept-license", action="store_true", help="accept the licence that the weights name"
    )
    parser.add_argument("--dry-run", action="store_true", help="only list the files and their size")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_omni.model_executor.checkpoint.hub import hub_source
    from vllm_omni.model_executor.models.registry import get_family

    try:
        source = hub_source(get_family(args.model).name, args.model)
    except ValueError as error:
        raise CommandError(str(error)) from error
    out = args.out or Path(args.model)
    print(f"{args.model}: {source.gigabytes:.0f} GB")
    for part in source.components:
        print(
            f"  {part.gigabytes:5.1f} GB  https://huggingface.co/{part.repo} -> {out / part.folder}"
        )
        print(f"{'':12}{', '.join(part.patterns)}")
    if source.licence is not None:
        print(f"licence of the weights: {source.licence}")
    if args.dry_run:
        return 0
    if source.licence is not None and not args.accept_license:
        raise CommandError(
            "no file was fetched; if you accept the licence, pass --accept-license "
            f"({source.licence})"
        )
    check_directory("OUT", out)
    _check_disk(out, source.gigabytes)
    for part in source.components:
        _fetch(part.repo, list(part.patterns), out / part.folder)
    for name in source.complete(out):
        print(f"wrote {name}: the repository has none")
    try:
        write_root_config(out)
    except OSError as error:
        raise CommandError(f"cannot write {out / ROOT_CONFIG}: {error.strerror}") from error
    print(f"done; serve it with: vllm serve {out} --omni")
    return 0


def _check_disk(out: Path, gigabytes: float) -> None:
    existing = next(path for path in [out.absolute(), *out.absolute().parents] if path.exists())
    have = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / _GB
    free = shutil.disk_usage(existing).free / _GB
    if free < gigabytes - have:
        raise CommandError(
            f"{gigabytes - have:.0f} GB are still missing, but {existing} has {free:.0f} GB free; "
            "name another directory"
        )


def _fetch(repo: str, patterns: list[str], folder: Path) -> None:
    """Download the repository files that match the patterns, skipping files that are already
    complete.

    Raises:
        CommandError: The Hub refused the download or could not be reached.
    """
    from vllm_omni.model_executor.checkpoint.hub import fetch

    try:
        fetch(repo, patterns, local_dir=folder)
    except ValueError as error:
        advice = (
            "Run the same command again to resume, or bring the files listed above from another "
            "machine into"
        )
        raise CommandError(f"{error}. {advice} {folder}") from error
