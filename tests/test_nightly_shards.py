# SPDX-License-Identifier: Apache-2.0
"""Every nightly test is in one shard, all shards together are all of them, and none takes much
longer than another.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import nightly_shards
import pytest
from helpers.waits import seconds
from nightly_shards import NIGHTLY_NAMES, Shards, known_seconds, parse_shard

COUNT = 8
"""As many as `.ci/run` has."""

SECONDS = {
    **{f"a.py::test_engine[{size}]": 60.0 for size in range(12)},
    **{f"b.py::test_route[{route}]": 1.0 for route in range(20)},
    "c.py::test_one": 30.0,
}


@pytest.fixture
def nightly(request: pytest.FixtureRequest) -> list[str]:
    """The nightly tests of this run's files, those that were measured, and some that nobody
    knows.
    """
    collected = request.config.stash[NIGHTLY_NAMES]
    return [
        *dict.fromkeys(
            [*collected, *known_seconds(), *(f"tests/new_{n}.py::test_new" for n in range(100))]
        )
    ]


def test_every_nightly_test_is_in_exactly_one_shard(nightly: list[str]) -> None:
    """And each shard has some."""
    shards = Shards(known_seconds(), COUNT)
    sizes = Counter(shards.of(name) for name in nightly)
    assert sorted(sizes) == list(range(1, COUNT + 1))
    assert sizes.total() == len(nightly)


@pytest.mark.parametrize("known", [SECONDS, known_seconds()], ids=["example", "measured"])
def test_what_is_measured_is_dealt_out_evenly(known: dict[str, float]) -> None:
    """The longest shard takes at most a quarter more than the mean, or as much more as one test
    needs.
    """
    seconds = Shards(known, COUNT).seconds
    mean = sum(known.values()) / COUNT
    assert sum(seconds) == pytest.approx(sum(known.values()))
    assert max(seconds) <= mean + max(0.25 * mean, *known.values(), 0.0), seconds


def test_tests_of_one_server_stay_together_and_long_files_are_split() -> None:
    shards = Shards(SECONDS, COUNT)
    assert len({shards.of(f"a.py::test_engine[{size}]") for size in range(12)}) == COUNT
    assert len({shards.of(f"b.py::test_route[{route}]") for route in range(20)}) == 1


def test_an_unknown_test_does_not_move_the_others() -> None:
    """Its shard is its name's; one of a file that is dealt out whole goes with the file."""
    first, second = Shards(SECONDS, COUNT), Shards(SECONDS, COUNT)
    assert [first.of(f"new_{n}.py::test") for n in range(50)] == [
        second.of(f"new_{n}.py::test") for n in range(50)
    ]
    assert len({first.of(f"new_{n}.py::test") for n in range(200)}) == COUNT
    assert first.of("b.py::test_new_route") == first.of("b.py::test_route[0]")


@pytest.mark.parametrize("text", ["0/8", "9/8", "3", "3/", "a/8", "-1/8", "3/8/1"])
def test_a_shard_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="K from 1 to N"):
        parse_shard(text)


FOLDER = {
    "test_a.py": """
        import pytest
        @pytest.mark.nightly
        @pytest.mark.parametrize("n", range(9))
        def test_many(n): pass
        def test_daily(): assert False
    """,
    "test_b.py": """
        import pytest
        pytestmark = pytest.mark.nightly
        def test_one(): pass
        def test_two(): pytest.skip("needs a spoon")
    """,
}


def run_shard(folder: Path, shard: str) -> tuple[int, str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "nightly_shards",
        "-p",
        "no:cacheprovider",
        "-v",
        "--shard",
        shard,
    ]
    environ = os.environ | {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(Path(nightly_shards.__file__).parent),
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_shards_run_all_nightly_tests_once_and_no_other(tmp_path: Path) -> None:
    """Through pytest's command line; a test that was skipped is named with its reason."""
    for name, text in FOLDER.items():
        (tmp_path / name).write_text("\n".join(line[8:] for line in text.splitlines()))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = nightly\n")
    ran: Counter[str] = Counter()
    reported = ""
    for shard in range(1, 4):
        _, output = run_shard(tmp_path, f"{shard}/3")
        ran.update(re.findall(r"^(\S+::\S+) (?:PASSED|SKIPPED|FAILED)", output, re.M))
        assert re.search(rf"^nightly shard {shard}/3: \d+ of 11 nightly tests$", output, re.M), (
            output
        )
        reported += output
    assert ran == Counter(
        [
            "test_b.py::test_one",
            "test_b.py::test_two",
            *(f"test_a.py::test_many[{n}]" for n in range(9)),
        ]
    )
    assert "NOT RUN: 1 nightly tests" in reported
    assert "test_b.py::test_two: needs a spoon" in reported
    code, output = run_shard(tmp_path, "4/3")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "a shard is K/N" in output
