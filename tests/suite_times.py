# SPDX-License-Identifier: Apache-2.0
"""What the suite costs: `pytest --times FILE` writes each test's seconds, by the clock and of the
processors.

Processor time is that of pytest's whole tree of processes, engines included. On a busy machine it
is the steadier of the two; a test that only waits has none. A fixture's start counts for the first
test that asks for it and its end for the last, so files compare better than tests. Held by
test_suite_times.py.
"""

import contextlib
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

SHOWN = 40
PROPERTY = "suite_times"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_TICKS = slice(11, 15)  # fields of /proc/PID/stat behind the name: utime, stime, cutime, cstime
_MOST_BYTES = 1 << 16

Seconds = dict[str, tuple[float, float]]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--times",
        type=Path,
        metavar="FILE",
        help=f"write each test's seconds, and show the slowest {SHOWN}",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--times")) is not None:
        config.pluginmanager.register(Times(path, config))


class Times:
    """Takes both clocks around every test, its fixtures included; a report carries them to
    whoever collects reports.
    """

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self._path = path
        self._config = config
        self._seconds: Seconds = {}
        self._processors = ProcessorTime(os.getpid())
        self._started = (0.0, 0.0)

    def _now(self) -> tuple[float, float]:
        return time.monotonic(), self._processors.seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        # else tests run in other processes
        if not self._config.pluginmanager.hasplugin("dsession"):
            self._started = self._now()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            now = self._now()
            report.user_properties.append(
                (PROPERTY, (now[0] - self._started[0], now[1] - self._started[1]))
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, seconds in report.user_properties:
            if name == PROPERTY:
                self._seconds[report.nodeid] = tuple(seconds)  # type: ignore[assignment]  # a list, from a worker

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = {
            name: [round(seconds, 2) for seconds in pair] for name, pair in self._seconds.items()
        }
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
    """The slowest by either clock: what is among the first by one may wait, or be one of many
    threads.
    """
    wall, processor = ({name: pair[index] for name, pair in seconds.items()} for index in (0, 1))
    yield ""
    yield (
        f"slowest {title}: wall s, processor s (all: {sum(wall.values()):.0f}, "
        f"{sum(processor.values()):.0f})"
    )
    slowest = {name for clock in (wall, processor) for name, _ in Counter(clock).most_common(SHOWN)}
    for name in sorted(slowest, key=lambda name: -max(seconds[name])):
        yield f"{wall[name]:8.1f} {processor[name]:8.1f}  {name}"


@dataclass(frozen=True)
class _Process:
    parent: int
    own: int
    waited_for: int
    """Ticks of its ended children, and of theirs."""


class ProcessorTime:
    """Seconds that a process and its descendants have computed since this was made; it never falls.

    A process that has ended was counted as long as it was seen. What it did afterwards counts if
    its parent lives and has waited for it, as the parent's; the rest of an orphan's last test is
    lost.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._ticks = 0
        self._seen = process_tree(root)

    def seconds(self) -> float:
        before, now = self._seen, process_tree(self._root)
        nothing = _Process(0, 0, 0)
        gained = 0
        for pid, process in now.items():
            last = before.get(pid, nothing)
            gained += process.own - last.own + process.waited_for - last.waited_for
        for pid, process in before.items():
            if pid not in now and process.parent in now:
                gained -= process.own + process.waited_for  # in its parent's ticks again
        self._ticks += max(0, gained)
        self._seen = now
        return self._ticks / _TICKS_PER_S


def process_tree(root: int) -> dict[int, _Process]:
    """From the root down: a look at all of the machine's, twice a test, took a twentieth of the
    suite's time.
    """
    processes: dict[int, _Process] = {}
    frontier = [(root, 0)]
    while frontier:
        pid, parent = frontier.pop()
        try:
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            threads = os.listdir(f"/proc/{pid}/task")
        except OSError:  # it has just ended
            continue
        user, system, waited_user, waited_system = map(int, fields[_TICKS])
        processes[pid] = _Process(parent, user + system, waited_user + waited_system)
        for thread in threads:
            with contextlib.suppress(OSError):
                frontier += [
                    (int(child), pid)
                    for child in _read(f"/proc/{pid}/task/{thread}/children").split()
                ]
    return processes


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)
