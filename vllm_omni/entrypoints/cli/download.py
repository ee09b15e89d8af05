# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni download MODEL [OUT]`: fetch a family's released weights from the hub, resumable, into one directory.

Weights under a licence that not everybody may use are fetched with `--accept-license` only.
Resume, progress and checksums are `huggingface_hub`'s. When the hub cannot be reached the command says exactly which
files belong where, so that they can be brought by other means. Held by tests/entrypoints/cli/test_download.py.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.model_executor.root_config import ROOT_CONFIG, write_root_config

_GB = 10**9


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("download", help="fetch released weights from the Hugging Face hub")
    parser.add_argument("model", help="model family, for example lingbot_world_fast")
    parser.add_argument("out", type=Path, nargs="?", help="directory to write (default: the model's name)")
    parser.add_argument("--accept-license", action="store_true", help="accept the licence that the weights name")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be fetched")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from vllm_omni.model_executor.hub import hub_source
    from vllm_omni.model_executor.models.registry import get_family

    try:
        source = hub_source(get_family(args.model).name, args.model)
    except ValueError as error:
        raise CommandError(str(error)) from error
    out = args.out or Path(args.model)
    print(f"{args.model}: {source.gigabytes:.0f} GB")
    for piece in source.pieces:
        print(f"  {piece.gigabytes:5.1f} GB  https://huggingface.co/{piece.repo} -> {out / piece.folder}")
        print(f"{'':12}{', '.join(piece.patterns)}")
    if source.licence is not None:
        print(f"licence of the weights: {source.licence}")
    if args.dry_run:
        return 0
    if source.licence is not None and not args.accept_license:
        raise CommandError(f"nothing was fetched; if you accept the licence, pass --accept-license ({source.licence})")
    _check_disk(out, source.gigabytes)
    for piece in source.pieces:
        _fetch(piece.repo, list(piece.patterns), out / piece.folder)
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
            f"{gigabytes - have:.0f} GB are still to come and {existing} has {free:.0f} GB free; name another directory"
        )


def _fetch(repo: str, patterns: list[str], folder: Path) -> None:
    """Fetch matching files; files already there in full are kept. Raises CommandError when the hub says no."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        snapshot_download(repo, allow_patterns=patterns, local_dir=folder)
    except GatedRepoError as error:
        raise CommandError(
            f"{repo} is gated: accept its terms on https://huggingface.co/{repo}, then `hf auth login` and try again"
        ) from error
    except RepositoryNotFoundError as error:
        raise CommandError(f"the hub has no repository {repo}, or your token may not read it") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
        raise CommandError(
            f"{repo} could not be fetched. Run the same command again to resume, or bring the files listed above from "
            f"another machine into {folder}"
        ) from error
