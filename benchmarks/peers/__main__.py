# SPDX-License-Identifier: Apache-2.0
"""Time other engines and this project side by side on one GPU, with random weights.

python -m benchmarks.peers prepare                        # their wheels, into .peers
python -m benchmarks.peers run sglang_best ours_bf16 --out DIR
python -m benchmarks.peers table DIR

README.md in this folder lists the parts of the comparison, explains what is replaced, and discusses
how fair the comparison is.
"""

import argparse
from pathlib import Path

from benchmarks.peers.parts import OURS, PACKAGES, PARTS
from benchmarks.peers.prepare import pack, prepare, unpack
from benchmarks.peers.run import PartRunner
from benchmarks.peers.table import TableError, load, table_text

PEERS = tuple(name for name in PACKAGES if name != "common")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(".peers"),
        help="Python paths of the peers (default: %(default)s, which git ignores)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare", help="download the packages of the peers")
    command.add_argument("peers", nargs="*", choices=(*PEERS, []), help="default: all")
    command.add_argument(
        "--python-version", default="3.12", help="of the host that measures (default: %(default)s)"
    )
    command.add_argument(
        "--pack", type=int, metavar="MIB", help="also write an archive in pieces of that size"
    )
    commands.add_parser("unpack", help="unpack the pieces of `prepare --pack` on another host")
    command = commands.add_parser("run", help="measure parts, each in a process of its own")
    command.add_argument("parts", nargs="+", choices=tuple(PARTS))
    command.add_argument("--out", type=Path, required=True, help="folder of the results")
    command.add_argument("--seconds", type=int, help="time limit of a part (default: its own)")
    command.add_argument("--again", action="store_true", help="repeat parts that have a result")
    command.add_argument(
        "--python", help="interpreter of the peers, with PyTorch (default: this one)"
    )
    command.add_argument("--commit", help="commit of this project (default: asks git)")
    command.add_argument("--tiny", action="store_true", help="narrow models on the CPU: a dry run")
    command = commands.add_parser("table", help="print the Markdown table of results")
    command.add_argument("folders", type=Path, nargs="+", help="one folder per start")
    return parser


def main() -> int:
    args = make_parser().parse_args()
    peers = list(getattr(args, "peers", None) or PEERS)
    if args.command == "prepare":
        prepare(peers, args.folder, args.python_version)
        if args.pack:
            pack(peers, args.folder, args.pack)
    elif args.command == "unpack":
        unpack(args.folder)
    elif args.command == "run":
        missing = {PARTS[name].package for name in args.parts} - {OURS}
        missing = {name for name in missing if not (args.folder / name).is_dir()}
        if missing:
            raise SystemExit(
                f"{args.folder} lacks {', '.join(sorted(missing))}: run `python -m benchmarks.peers"
                f" prepare {' '.join(sorted(missing))}`"
            )
        runner = PartRunner(args.out, args.folder, args.python, args.commit, args.tiny)
        measured = [runner.run(name, args.seconds, args.again) for name in args.parts]
        return int(not all(measured))
    else:
        try:
            print(table_text(load(args.folders)), end="")
        except TableError as error:
            raise SystemExit(str(error)) from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
