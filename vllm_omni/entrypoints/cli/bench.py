# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni bench`: run benchmarks, repeat recorded benchmarks, or compare two results.

        vllm-omni bench                          list the benchmarks
        # run one; `--json` before NAME prints only the result
        vllm-omni bench NAME [arguments]
        vllm-omni bench compare A.json B.json    compare two results
        vllm-omni bench --check                  repeat recorded benchmarks on this machine

Benchmark scripts come from the checkout that contains the package or the working directory. If
there is no checkout, they come from the wheel. Scripts that import other code from the repository,
such as the training code, work only in a checkout.
"""

import argparse
import ast
import json
import math
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.parsers import add_command

_CHECKOUT = Path(__file__).resolve().parents[3]
_INSTALLED = Path(sysconfig.get_path("data")) / "share" / "vllm-worlds" / "benchmarks"
"""Directory to which the wheel installs the benchmarks (`data-files` in pyproject.toml)."""
_LOWER_IS_BETTER = ("_ms", "_s", "overhead", "_bytes", "bytes")
_HIGHER_IS_BETTER = ("fps", "_per_s", "per_second", "sessions")
_ABOUT = ("date", "command", "hardware", "versions", "fast_paths")
"""Keys that describe how a result was measured. The comparison lists them separately from the
metrics.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "bench",
        "run a benchmark, check this machine against results, or compare two results",
        (
            "Without a name, list the benchmarks. With a name, run that benchmark with the "
            "arguments "
            "that follow; its own arguments are shown by `vllm-omni bench NAME --help`. `compare` "
            "prints every number of two results side by side. `--check` repeats recorded results "
            "on this machine, which takes minutes, and says how they compare; the status is 1 if "
            "one of the same hardware is slower than its range."
        ),
        [
            "vllm-omni bench",
            "vllm-omni bench engine_overhead --help",
            "vllm-omni bench compare before.json after.json --threshold 5",
            "vllm-omni bench --check",
        ],
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result, or the comparison, as JSON only"
    )
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="PERCENT",
        help="compare: end with status 1 if something is worse by more",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="repeat recorded results that fit this machine, or those named",
    )
    parser.add_argument("name", nargs="?", help="a benchmark, or `compare`; none: list them")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the benchmark's own; `compare`: two files"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.name == "compare":
        return _compare(args.arguments, args.json, args.threshold)
    folder = _folder()
    if args.check:
        from vllm_omni.entrypoints.cli import bench_check

        names = [] if args.name is None else [args.name, *args.arguments]
        return bench_check.run(folder, names, args.json)
    scripts = dict(_scripts(folder))
    if args.name is None:
        width = max(map(len, scripts))
        for name, title in scripts.items():
            print(f"{name:{width}}  {title}")
        return 0
    if args.name not in scripts:
        raise CommandError(
            f"there is no benchmark {args.name!r}; there are: {', '.join(scripts)}, and `compare`"
        )
    command = [sys.executable, str(folder / f"{args.name}.py"), *args.arguments]
    if not args.json:
        return subprocess.run(command, check=False).returncode
    return _run_for_json(command)


def _run_for_json(command: list[str]) -> int:
    """Run a benchmark with its output on stderr, and print its result file to stdout."""
    with tempfile.TemporaryDirectory() as out:
        status = subprocess.run([*command, "--out", out], stdout=sys.stderr, check=False).returncode
        results = sorted(Path(out).glob("*.json"))
        for result in results:
            print(result.read_text().rstrip())
    if status == 0 and not results:
        raise CommandError("the benchmark wrote no result; was --no-save or --help passed?")
    return status


def _folder() -> Path:
    """Return the `benchmarks/` directory of the checkout that contains this package or the working
    directory, or the wheel's directory if there is no checkout.
    """
    for folder in (_CHECKOUT / "benchmarks", Path.cwd() / "benchmarks", _INSTALLED):
        if (folder / "common.py").is_file():
            return folder
    raise CommandError(
        "this installation has no benchmarks: run this in a checkout, or install the wheel"
    )


def _scripts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the first docstring line of every script that writes a result."""
    for path in sorted(folder.glob("*.py")):
        source = path.read_text()
        if path.stem != "common" and "add_output_arguments(" in source:
            yield path.stem, (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


# -- comparison ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MetricChange:
    """A metric that both results contain."""

    name: str
    """Dotted name of the metric."""
    before: float
    """Value in the first result."""
    after: float
    """Value in the second result."""
    worse: bool | None
    """Whether the second value is worse. None: the name does not indicate whether lower or higher
    is better.
    """

    @property
    def percent(self) -> float | None:
        return None if self.before == 0 else 100 * (self.after - self.before) / abs(self.before)


def _compare(arguments: list[str], as_json: bool, threshold: float | None) -> int:
    # The flags of `vllm-omni bench` may also follow `compare`.
    parser = argparse.ArgumentParser(prog="vllm-omni bench compare")
    parser.add_argument("files", nargs="*")
    parser.add_argument("--json", action="store_true", default=as_json)
    parser.add_argument("--threshold", type=float, default=threshold)
    args = parser.parse_args(arguments)
    as_json, threshold, files = args.json, args.threshold, args.files
    if len(files) != 2:
        raise CommandError(
            f"compare takes two result files, got {len(files)}: vllm-omni bench compare "
            "A.json B.json"
        )
    before, after = (_read(Path(file)) for file in files)
    changes, missing = compare(before, after)
    if not changes:
        raise CommandError(
            "the two results have no number in common; are they of the same benchmark?"
        )
    differing = [key for key in _ABOUT[1:] if before.get(key) != after.get(key)]
    if as_json:
        rows = [
            {
                "name": c.name,
                "before": c.before,
                "after": c.after,
                "percent": c.percent,
                "worse": c.worse,
            }
            for c in changes
        ]
        print(
            json.dumps({"changes": rows, "only_in_one": missing, "differing": differing}, indent=2)
        )
    else:
        _print(changes, missing, differing)
    over = [
        change
        for change in changes
        if threshold is not None
        and change.worse
        and (change.percent is None or abs(change.percent) > threshold)
    ]
    for change in over:
        print(f"worse by more than {threshold:g} %: {change.name}", file=sys.stderr)
    return 1 if over else 0


def compare(before: dict[str, Any], after: dict[str, Any]) -> tuple[list[MetricChange], list[str]]:
    """Return the metrics that both results contain, in order, and the names of the metrics that
    only one result contains.
    """
    old, new = dict(_numbers(before)), dict(_numbers(after))
    changes = [
        MetricChange(name, value, new[name], _worse(name, value, new[name]))
        for name, value in old.items()
        if name in new
    ]
    return changes, sorted(set(old) ^ set(new))


def _numbers(document: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in document.items():
        if key not in _ABOUT:
            yield from _leaves(value, key)


def _leaves(value: Any, name: str) -> Iterator[tuple[str, float]]:
    """Yield the dotted name and the value of every number nested in `value`.

    A table row's name is built from the string values in that row.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            texts = (
                [text for text in inner.values() if isinstance(text, str)]
                if isinstance(inner, dict)
                else []
            )
            yield from _leaves(inner, f"{name}[{', '.join(texts) or index}]")
    elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        yield name, float(value)


def _worse(name: str, before: float, after: float) -> bool | None:
    """Return whether a metric is worse in the second result.

    The components of the dotted name are checked from last to first. The first one that is known
    decides whether lower or higher is better. For example, `wall_ms.p50` is a time, so lower is
    better.
    """
    if before == after:
        return False
    for part in reversed(name.replace("]", "").split(".")):
        if part.endswith(_HIGHER_IS_BETTER):
            return after < before
        if part.endswith(_LOWER_IS_BETTER):
            return after > before
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CommandError(f"{path} cannot be read as a result ({error})") from error
    if not isinstance(document, dict):
        raise CommandError(f"{path} is no result: it must hold a JSON object")
    return document


def _print(changes: list[MetricChange], missing: list[str], differing: list[str]) -> None:
    width = max(len(change.name) for change in changes)
    print(f"{'':{width}} {'before':>12} {'after':>12} {'change':>9}")
    for change in changes:
        percent = "" if change.percent is None else f"{change.percent:+.1f} %"
        mark = {True: "  worse", False: "", None: ""}[change.worse]
        print(
            f"{change.name:{width}} {change.before:12.6g} {change.after:12.6g} {percent:>9}{mark}"
        )
    if missing:
        print(f"\nonly in one of them: {', '.join(missing)}")
    if differing:
        print(f"\nthe two differ in {' and '.join(differing)}: the numbers may not be comparable")
