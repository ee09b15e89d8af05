# SPDX-License-Identifier: Apache-2.0
"""Tests that share an engine or a server are handed to one process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import two_processes
from helpers.waits import seconds
from two_processes import SECONDS_FILE, TOGETHER, UNKNOWN_S, longest_first, unit_of

SHARED_OVER_FILES = ("null_engine", "served")


def test_files_that_share_an_engine_stay_together(request: pytest.FixtureRequest) -> None:
    """Of all files of this run."""
    for item in request.session.items:
        for fixture in SHARED_OVER_FILES:
            package = "/engine/" if fixture == "null_engine" else "/realtime/"
            if fixture in getattr(item, "fixturenames", ()) and package in item.nodeid:
                assert unit_of(item.nodeid) == fixture, f"add the file to TOGETHER: {item.nodeid}"


def test_other_files_are_units_separate() -> None:
    assert unit_of("tests/test_inputs.py::test_one[a::b]") == "tests/test_inputs.py"
    assert set(TOGETHER.values()) == {*SHARED_OVER_FILES}


def test_the_files_exist(request: pytest.FixtureRequest) -> None:
    assert [name for name in TOGETHER if not (request.config.rootpath / name).is_file()] == []


def test_the_longest_units_start_first() -> None:
    """Files that share a server count together; one that nobody has measured is no small one."""
    shared = [file for file, unit in TOGETHER.items() if unit == "served"][:2]
    seconds = {"a.py": 2.0, "b.py": UNKNOWN_S + 1, **dict.fromkeys(shared, UNKNOWN_S)}
    nodeids = [
        "a.py::test_1",
        "new.py::test_1",
        f"{shared[0]}::test_1",
        "b.py::test_1",
        f"{shared[1]}::test_1",
    ]
    assert longest_first(nodeids, seconds) == ["served", "b.py", "new.py", "a.py"]


def test_a_process_runs_the_longest_first(tmp_path: Path) -> None:
    """Through pytest's command line, with one process and measured seconds; without processes
    order is as ever.
    """
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text(
            "def test_1(): pass\ndef test_2(): pass\ndef test_3(): pass\n"
        )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    folder = tmp_path / "plugin"
    folder.mkdir()
    (folder / "two_processes.py").write_text(Path(two_processes.__file__).read_text())
    measured = {"test_a.py": 2.0, "test_b.py": 1.0, "test_c.py": 4.0, "test_d.py": 3.0}
    (folder / SECONDS_FILE.name).write_text(json.dumps(measured))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-p",
        "two_processes",
        "-p",
        "no:cacheprovider",
        "-v",
    ]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environ = own | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(folder)}
    for processes, order in (("1", "cdab"), ("0", "abcd")):
        done = subprocess.run(
            [*command, "-n", processes],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=seconds(60),
            check=False,
        )
        ran = re.findall(
            r"PASSED.* test_(.)\.py::test_1|^test_(.)\.py::test_1 PASSED", done.stdout, re.M
        )
        assert "".join(one or other for one, other in ran) == order, done.stdout + done.stderr
