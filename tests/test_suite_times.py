# SPDX-License-Identifier: Apache-2.0
"""The suite's own times are those of the tests."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import suite_times
from helpers.waits import seconds, stay_until_killed, wait_until
from suite_times import ProcessorTime

WORK = (
    "import time\n"
    "def work(seconds):\n"
    "    end = time.process_time() + seconds\n"
    "    while time.process_time() < end: pass\n"
)
TESTS = (
    "import subprocess, sys, time\n"
    f"WORK = {WORK!r}\n"
    "def test_sleeps(): time.sleep(0.4)\n"
    "def test_works(): subprocess.run([sys.executable, '-c', WORK + 'work(0.4)'], check=True)\n"
)


def test_both_clocks_are_written_and_the_slowest_shown(tmp_path: Path) -> None:
    """A test that waits has no processor time; one whose child computes has the child's."""
    (tmp_path / "test_two.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "suite_times",
        "-p",
        "no:cacheprovider",
        "--times",
        "times.json",
    ]
    environ = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(Path(suite_times.__file__).parent),
    }
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    times = json.loads((tmp_path / "times.json").read_text())
    sleeps, works = times["test_two.py::test_sleeps"], times["test_two.py::test_works"]
    assert sleeps[0] >= 0.4 and sleeps[1] < 0.3
    assert works[1] >= 0.39
    assert "slowest files" in done.stdout and "test_two.py::test_sleeps" in done.stdout


def compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_a_process_counts_once_whether_it_lives_or_has_ended() -> None:
    """Before and after it was waited for; with one that nobody waits for, the total does not
    fall.
    """
    clock = ProcessorTime(os.getpid())
    context = multiprocessing.get_context("fork")
    process = context.Process(target=lambda: (compute(0.3), stay_until_killed()))
    process.start()
    wait_until(lambda: clock.seconds() >= 0.3, 30, every_s=0.05)
    alive = clock.seconds()
    process.kill()
    process.join()
    assert alive <= clock.seconds() < alive + 0.25
