# SPDX-License-Identifier: Apache-2.0
"""What the suite costs: `pytest --times FILE` writes each test's seconds, by the clock and of the processors.

Processor time is that of pytest's whole tree of processes, engines included: of those alive and of those that ended and
were waited for. On a busy machine it is the steadier of the two; a test that only waits has none. A fixture's start
counts for the first test that asks for it and its end for the last, so files compare better than tests.
"""

import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SHOWN = 40
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PARENT, _TICKS = 1, slice(11, 15)  # fields of /proc/PID/stat behind the name: utime, stime, cutime, cstime

Seconds = dict[str, tuple[float, float]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times", type=Path, metavar="FILE", help=f"write each test's seconds, and show the slowest {SHOWN}"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--times")) is not None:
        config.pluginmanager.register(Times(path))


class Times:
    """Takes both clocks around every test, its fixtures included."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: Seconds = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        wall_s, processor_s = time.monotonic(), tree_processor_s(os.getpid())
        try:
            return (yield)
        finally:
            self._seconds[item.nodeid] = (time.monotonic() - wall_s, tree_processor_s(os.getpid()) - processor_s)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = {name: [round(seconds, 2) for seconds in pair] for name, pair in self._seconds.items()}
        self._path.write_text(json.dumps(rows, indent=0, sort_keys=True) + "\n")
        for title, seconds in (("files", by_file(self._seconds)), ("tests", self._seconds)):
            for line in table(title, seconds):
                terminalreporter.write_line(line)


def by_file(seconds: Seconds) -> Seconds:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, pair in seconds.items():
        for index, value in enumerate(pair):
            sums[name.split("::")[0]][index] += value
    return {name: (wall, processor) for name, (wall, processor) in sums.items()}


def table(title: str, seconds: Seconds) -> Iterator[str]:
    """The slowest by either clock: what is among the first by one may wait, or be one of many threads."""
    wall, processor = ({name: pair[index] for name, pair in seconds.items()} for index in (0, 1))
    yield ""
    yield f"slowest {title}: wall s, processor s (all: {sum(wall.values()):.0f}, {sum(processor.values()):.0f})"
    slowest = {name for clock in (wall, processor) for name, _ in Counter(clock).most_common(SHOWN)}
    for name in sorted(slowest, key=lambda name: -max(seconds[name])):
        yield f"{wall[name]:8.1f} {processor[name]:8.1f}  {name}"


def tree_processor_s(root: int) -> float:
    """Seconds that `root`, its descendants, and those of them that have ended and were waited for have computed."""
    parents, ticks = {}, {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = Path(entry.path, "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)] = int(fields[_PARENT])
            ticks[int(entry.name)] = sum(map(int, fields[_TICKS]))
    tree, frontier = {root}, {root}
    while frontier:
        frontier = {pid for pid, parent in parents.items() if parent in frontier}
        tree |= frontier
    return sum(ticks.get(pid, 0) for pid in tree) / _TICKS_PER_S
