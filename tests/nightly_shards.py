# SPDX-License-Identifier: Apache-2.0
"""Nightly tests in shards: `pytest --shard 3/8` runs those of the third of eight and nothing else.

A test's shard follows from its name, the number of shards and the seconds in
`nightly_seconds.json`, never from what else was selected, so a shard is the same everywhere. Files
known by their seconds are dealt out whole, the slowest first, each to the shard with the least so
far; a file that would fill more than `SPLIT_ABOVE` of a shard is dealt out test by test. A test
whose seconds are not known goes where the digest of its name says. To measure again: `make nightly
PYTEST_ARGS="--times FILE"`, then `python tests/nightly_shards.py FILE`.
Held by test_nightly_shards.py.
"""

import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

SECONDS_FILE = Path(__file__).with_name("nightly_seconds.json")
# a file with one server for many tests takes less; those with an engine per test take more
SPLIT_ABOVE = 0.25

NIGHTLY_NAMES = pytest.StashKey[list[str]]()
"""Names of all nightly tests that were collected, whether they run or not."""


class Shards:
    """Which of `count` shards, from 1 on, a test belongs to. seconds: what is known, by the
    tests' names.
    """

    def __init__(self, seconds: Mapping[str, float], count: int) -> None:
        self._count = count
        limit_s = SPLIT_ABOVE * sum(seconds.values()) / count
        self._split = {file for file, total_s in _by_file(seconds).items() if total_s > limit_s}
        units: dict[str, float] = defaultdict(float)
        for name, value in seconds.items():
            units[self._unit(name)] += value
        self.seconds = [0.0] * count
        self._shard: dict[str, int] = {}
        for unit in sorted(units, key=lambda unit: (-units[unit], unit)):
            least = self.seconds.index(min(self.seconds))
            self.seconds[least] += units[unit]
            self._shard[unit] = least + 1

    def of(self, name: str) -> int:
        unit = self._unit(name)
        return (
            self._shard.get(unit)
            or 1 + int(hashlib.sha256(unit.encode()).hexdigest(), 16) % self._count
        )

    def _unit(self, name: str) -> str:
        file = name.split("::")[0]
        return name if file in self._split else file


def _by_file(seconds: Mapping[str, float]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for name, value in seconds.items():
        totals[name.split("::")[0]] += value
    return totals


def known_seconds() -> dict[str, float]:
    return json.loads(SECONDS_FILE.read_text())


def parse_shard(text: str) -> tuple[int, int]:
    """`3/8` as 3 and 8."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"a shard is K/N with K from 1 to N, such as 3/8; got {text!r}")
    return int(found[1]), int(found[2])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shard", metavar="K/N", help="run the nightly tests of the Kth of N shards, and no others"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    nightly = [item for item in items if item.get_closest_marker("nightly") is not None]
    config.stash[NIGHTLY_NAMES] = [item.nodeid for item in nightly]
    if (text := config.getoption("--shard")) is None:
        return
    try:
        wanted, count = parse_shard(text)
    except ValueError as error:
        raise pytest.UsageError(f"--shard: {error}") from None
    shards = Shards(known_seconds(), count)
    retained = [item for item in nightly if shards.of(item.nodeid) == wanted]
    chosen = set(retained)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = retained


def pytest_report_collectionfinish(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    if (text := config.getoption("--shard")) is None:
        return []
    return [
        f"nightly shard {text}: {len(items)} of {len(config.stash[NIGHTLY_NAMES])} nightly tests"
    ]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """A nightly test that this machine cannot run is named: nobody should believe that it
    passed.
    """
    skipped = terminalreporter.getreports("skipped")
    if config.getoption("--shard") is None or not skipped:
        return
    terminalreporter.section(
        f"NOT RUN: {len(skipped)} nightly tests, for what this machine lacks", red=True
    )
    for report in skipped:
        _, _, reason = report.longrepr
        terminalreporter.write_line(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")


def update(files: Iterable[Path]) -> None:
    """Take over the seconds of nightly tests, by the clock; what is not in `files` stays as it
    is.
    """
    seconds = known_seconds()
    for file in files:
        seconds |= {
            name: round(wall_s, 1) for name, (wall_s, _) in json.loads(file.read_text()).items()
        }
    SECONDS_FILE.write_text(
        json.dumps(seconds, indent=0, sort_keys=True, ensure_ascii=False) + "\n"
    )


if __name__ == "__main__":
    update(map(Path, sys.argv[1:]))
