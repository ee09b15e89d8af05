# SPDX-License-Identifier: Apache-2.0
"""A program that tests run leaves its output, and nothing else, however it ends."""

import subprocess
import sys

import pytest
from helpers.programs import has_ended, run_program
from helpers.waits import wait_until

CHILD = "setsid sleep 60 & echo child $!; wait"
RANK = """
import time
from helpers.programs import limited_rank
limited_rank()
def never_returns():
    time.sleep(60)
never_returns()
"""


def test_its_output_comes_back() -> None:
    program = (
        "import os, sys; print(os.environ['WORD'], flush=True); print('seen too', file=sys.stderr)"
    )
    assert (
        run_program([sys.executable, "-c", program], {"WORD": "seen"}, limit_s=60)
        == "seen\nseen too\n"
    )


def test_a_status_fails_the_test_and_the_output_is_shown() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"ended with status 3(?s:.*)a reason"):
        run_program(
            [sys.executable, "-c", "print('a reason'); raise SystemExit(3)"], {}, limit_s=60
        )


def test_one_that_does_not_end_is_ended_with_what_it_started() -> None:
    """Ranks of torchrun have sessions of their own, so that no signal to a group reaches them
    all.
    """
    with pytest.raises(
        pytest.fail.Exception, match=r"had not ended after 2 s(?s:.*)child \d+"
    ) as failed:
        run_program(["sh", "-c", CHILD], {}, limit_s=2)
    child = int(str(failed.value).rsplit("child ", 1)[1].split()[0])
    assert has_ended(child)


def test_a_rank_says_where_it_waits_before_the_limit() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"ended with status 1(?s:.*)in never_returns"):
        run_program([sys.executable, "-c", RANK], {"TESTS_RANK_LIMIT_S": "2"}, limit_s=60)


def test_a_process_has_ended_before_and_after_it_is_waited_for() -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert not has_ended(process.pid)
    process.kill()
    wait_until(lambda: has_ended(process.pid))
    process.wait()
    assert has_ended(process.pid)
