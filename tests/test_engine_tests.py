# SPDX-License-Identifier: Apache-2.0
"""`make check` starts no engine and no browser."""

import multiprocessing
import os
import re
import subprocess
import sys
from pathlib import Path

import engine_tests
import pytest
from helpers.waits import seconds


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> None:
    process = multiprocessing.process.BaseProcess
    monkeypatch.setattr(process, "start", process.start)  # put back afterwards
    engine_tests.refuse_engines()


def test_an_engine_that_was_not_announced_fails_its_test(refused: None) -> None:
    """vLLM names the processes; others start as ever."""
    context = multiprocessing.get_context("fork")
    for name in ("EngineCore", "EngineCore_DP1"):
        with pytest.raises(AssertionError, match="without the marker `engine`"):
            context.Process(target=os._exit, args=(0,), name=name).start()
    other = context.Process(target=os._exit, args=(3,), name="rank 0")
    other.start()
    other.join(seconds(30))
    assert other.exitcode == 3


FOLDER = {
    "tests/engine/test_by_folder.py": "def test_it(): pass",
    "helper.py": "def running_engine(): pass",
    "conftest.py": "import pytest\n@pytest.fixture\ndef null_engine(): pass\n@pytest.fixture\ndef "
    "browser(): pass",
    "test_by_import.py": "from helper import running_engine\ndef test_it(): pass",
    "test_by_fixture.py": "def test_it(null_engine): pass\ndef test_other(): pass",
    "test_by_browser.py": "import pytest\n@pytest.fixture\ndef page(browser): pass\ndef "
    "test_it(page): pass",
    "test_by_hand.py": "import pytest\n@pytest.mark.engine\ndef test_it(): pass\ndef "
    "test_other(): pass",
    "test_unannounced.py": (
        "import multiprocessing, os\n"
        "def test_it(): multiprocessing.Process(target=os._exit, args=(0,), "
        "name='EngineCore').start()"
    ),
    "pytest.ini": "[pytest]\nmarkers =\n  engine\n  browser",
}


def test_who_starts_an_engine_is_left_out(tmp_path: Path) -> None:
    """By folder, by import, by fixture, by hand; through pytest's command line."""
    for name, text in FOLDER.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "engine_tests", "-p", "no:cacheprovider", "-v"]
    command += ["-m", "not engine and not browser"]
    environ = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(Path(engine_tests.__file__).parent),
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
    ran = dict(re.findall(r"^(\S+::\S+) (PASSED|FAILED)", done.stdout, re.M))
    assert ran == {
        "test_by_fixture.py::test_other": "PASSED",
        "test_by_hand.py::test_other": "PASSED",
        "test_unannounced.py::test_it": "FAILED",
    }, done.stdout + done.stderr
    assert "without the marker `engine`" in done.stdout
