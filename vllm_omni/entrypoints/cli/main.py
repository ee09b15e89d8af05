# SPDX-License-Identifier: Apache-2.0
"""The `vllm-omni` command, which stock vLLM also calls if its arguments include `--omni`.

Each subcommand is a module that imports heavy modules only when it runs, so `vllm-omni --version`
and `--help` import neither torch nor vLLM (tests/entrypoints/cli/test_main.py).
"""

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from vllm_omni.entrypoints.cli import bench, demo, doctor, evaluate, plan, rebalance, replay, serve
from vllm_omni.entrypoints.cli.checkpoints import download, make_tiny, make_world, verify
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_worlds import DISTRIBUTION

_SUBCOMMANDS = (
    demo,
    evaluate,
    verify,
    make_world,
    make_tiny,
    download,
    doctor,
    bench,
    rebalance,
    replay,
    plan,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with status 0 for success, 1 for a negative result, or 2 for invalid
    input.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        sys.exit(_dispatch(arguments))
    except CommandError as error:
        print(f"vllm-omni: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _dispatch(argv: list[str]) -> int:
    if "--omni" in argv:
        rest = [argument for argument in argv if argument != "--omni"]
        return serve.run(rest[1:]) if rest[:1] == ["serve"] else _run_stock(rest)
    if argv[:1] == ["serve"]:  # vLLM's own parser reads the rest
        return serve.run(argv[1:])
    parser = make_parser()
    args = parser.parse_args(argv)
    if "run" not in args:
        parser.print_help()
        return 2
    return int(args.run(args))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-omni",
        description="Video world models on stock vLLM. `vllm-omni COMMAND --help` describes a "
        "command.",
        epilog="examples:\n  vllm-omni demo\n  vllm-omni make-world my_world\n  vllm serve "
        "my_world --omni",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=_versions())
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    subparsers.add_parser(
        "serve", help="the same as `vllm serve MODEL --omni`; accepts every flag of `vllm serve`"
    )
    for module in _SUBCOMMANDS:
        module.add_parser(subparsers)
    return parser


def _versions() -> str:
    versions = []
    for name in (DISTRIBUTION, "vllm", "torch"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    return ", ".join(versions)


def _run_stock(argv: list[str]) -> int:
    """Run a stock vLLM command other than `serve` unchanged, because `--omni` applies only to
    `serve`.
    """
    from vllm.entrypoints.cli.main import main as vllm_main

    name = argv[0] if argv else "(none)"
    print(
        f"vllm-omni: --omni has no effect on the vllm command {name!r}; running it unchanged",
        file=sys.stderr,
    )
    sys.argv = [sys.argv[0], *argv]
    vllm_main()
    return 0


if __name__ == "__main__":
    main()
