# SPDX-License-Identifier: Apache-2.0
"""What engines get from `quick_spawn` is what the start method `spawn` promises."""

import gc
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

import psutil
import pytest
import quick_spawn
import setproctitle
import torch
from helpers.waits import seconds

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="with CUDA, processes are spawned as ever"
)

memory = "as imported"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `conftest.py` leaves processes as they are."""
    monkeypatch.setattr(SpawnProcess, "_Popen", SpawnProcess._Popen)  # put back afterwards
    quick_spawn.install()


def report(responses: Connection, depth: int) -> None:
    """Send what this process is, then what a process that it starts is."""
    setproctitle.setproctitle(f"rank {depth}")
    title = " ".join(psutil.Process().cmdline()).strip()
    responses.send(
        (
            os.getpid(),
            title,
            memory,
            os.environ.get("VLLM_OMNI_MOMENT"),
            "vllm.config" in sys.modules,
        )
    )
    if depth:
        os.environ["VLLM_OMNI_MOMENT"] = "later"
        start(responses, depth - 1).join()


def start(responses: Connection, depth: int) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=report, args=(responses, depth))
    process.start()
    return process


def test_a_process_shares_nothing_but_the_environment_of_the_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does one that it starts; each has its own title (by which tests find workers), and
    nothing to import.
    """
    monkeypatch.setattr(sys.modules[__name__], "memory", "changed")
    monkeypatch.setenv("VLLM_OMNI_MOMENT", "now")
    receiver, sender = multiprocessing.Pipe()
    process = start(sender, 1)
    process.join(seconds(60))
    assert process.exitcode == 0
    (first, *rest), (second, *others) = receiver.recv(), receiver.recv()
    assert len({os.getpid(), first, second}) == 3
    assert rest == ["rank 1", "as imported", "now", True]
    assert others == ["rank 0", "as imported", "later", True]


def count_frozen(responses: Connection) -> None:
    responses.send((gc.get_freeze_count(), len(gc.get_objects())))


def test_what_was_imported_is_left_out_of_garbage_collections() -> None:
    """vLLM collects five times in the life of an engine: without this an engine of the tests
    costs twice as much.
    """
    receiver, sender = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=count_frozen, args=(sender,)).start()
    frozen, looked_through = receiver.recv()
    assert frozen > 5 * looked_through


def wait_for_ever() -> None:
    multiprocessing.Event().wait()


def test_how_a_process_ended_is_known() -> None:
    """`kill -9` is seen by whoever started it, as the status and at once."""
    process = multiprocessing.get_context("spawn").Process(target=wait_for_ever)
    process.start()
    process.kill()
    process.join(seconds(10))
    assert process.exitcode == -9
