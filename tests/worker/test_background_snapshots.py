# SPDX-License-Identifier: Apache-2.0
"""Tests of periodic snapshots on a single rank.

The session is copied between two steps and written to a file in the background. The file is
byte-identical to that of an ordinary snapshot.
"""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.snapshot_steps import Worker, text_chunk, video_chunk, world_chunk
from helpers.waits import seconds

from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot_exchange import WorkerCall, live_save_exchange
from vllm_omni.worker.diffusion.sessions import background_snapshots as module

SMALL = {"window_frames": 7, "sink_frames": 2}


@pytest.mark.parametrize(
    ("family", "chunk", "options"),
    [
        ("null_world", text_chunk, {}),
        ("lingbot_world", world_chunk, SMALL),
        ("causal_wan", video_chunk, SMALL),
    ],
)
def test_a_periodic_snapshot_equals_a_snapshot(
    family: str,
    chunk: Any,
    options: dict[str, Any],
    make_runner: Any,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """For every tensor layout, a periodic snapshot is bit-identical to an ordinary snapshot. Only
    the file's owner may read it.
    """
    worker = Worker(make_runner(request.getfixturevalue(family), {"model": options}))
    for index in range(3):
        chunk(worker, "a", index)
    header = worker.save("a", tmp_path / "snapshot")
    checkpointed, cost_s = worker.save_live("a", tmp_path / "checkpoint")
    assert checkpointed == header
    assert cost_s > 0
    assert (tmp_path / "checkpoint").read_bytes() == (tmp_path / "snapshot").read_bytes()
    assert (tmp_path / "checkpoint").stat().st_mode & 0o777 == 0o600


def test_chunks_generated_during_the_write_are_not_in_the_file(
    null_world: Path, make_runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file contains the session as it was when it was copied, although the engine generates
    more chunks while the thread is writing.
    """
    may_write, write_bytes = threading.Event(), module.write_bytes

    def slow(*args: Any) -> None:
        assert may_write.wait(seconds(20))
        write_bytes(*args)

    monkeypatch.setattr(module, "write_bytes", slow)
    worker = Worker(make_runner(null_world))
    text_chunk(worker, "a", 0)
    before = worker.bits("a")
    exchange = live_save_exchange("a", tmp_path / "a", "0.test")
    call: WorkerCall | None = next(exchange)
    for _ in range(3):  # the write is staged, then started, but not yet finished
        assert call is not None
        call = exchange.send(worker.rpc(call.method, call.args))
    assert call is not None and call.method == "snapshot_written"
    text_chunk(worker, "a", 1)
    with pytest.raises(RequestFailed, match="busy"):
        worker.save_live("a", tmp_path / "second")
    may_write.set()
    while call is not None:
        try:
            call = exchange.send(worker.rpc(call.method, call.args))
        except StopIteration as end:
            call, header = None, end.value[0]
    assert header.chunk_index == 1
    worker.restore("b", tmp_path / "a")
    assert worker.bits("b") == before
    assert worker.bits("a") != before


def test_a_failed_write_raises_and_leaves_no_file(
    null_world: Path, make_runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown session or a full disk raises a typed error and leaves no file.

    The next periodic snapshot succeeds.
    """
    worker = Worker(make_runner(null_world))
    with pytest.raises(RequestFailed, match="unknown_session"):
        worker.save_live("absent", tmp_path / "a")
    text_chunk(worker, "a", 0)

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("vllm_omni.session_files.snapshot_writing.os.fsync", full)
        with pytest.raises(RequestFailed, match="storage_full"):
            worker.save_live("a", tmp_path / "a")
    assert list(tmp_path.glob("a")) == []
    worker.save_live("a", tmp_path / "a")
    worker.restore("b", tmp_path / "a")


def test_the_staging_buffer_is_reused(null_world: Path, make_runner: Any, tmp_path: Path) -> None:
    """The staging buffer is reused and is as large as the largest session copied so far.

    Allocating new memory pages each time would take longer than the copy itself.
    """
    worker = Worker(make_runner(null_world))
    held = []
    for number, size in enumerate((16, 32, 16, 32)):
        worker.chunk(
            "s" + str(number), prompt="a", seed=1, height=size, width=size, actions=[[]] * 3
        )
        worker.save_live("s" + str(number), tmp_path / str(number))
        held.append(worker.background._memory)
    assert held[3] is held[2] is held[1] and len(held[1]) > len(held[0])


def test_unaligned_tensors_are_copied(null_world: Path, make_runner: Any, tmp_path: Path) -> None:
    """Tensors at unaligned addresses are copied correctly. In this test, three uint8 values precede
    float values.
    """
    background = Worker(make_runner(null_world)).background
    odd, floats = torch.tensor([1, 2, 3], dtype=torch.uint8), torch.arange(6.0).view(2, 3)
    background._copy({"odd": odd, "empty": torch.empty(0), "floats": floats.T})
    assert background._memory[:3].tolist() == [1, 2, 3]
    assert (
        background._memory[3:27].clone().view(torch.float32).tolist() == floats.T.flatten().tolist()
    )


def test_a_write_costs_processor_time_only_on_a_cpu(
    null_world: Path, make_runner: Any, tmp_path: Path
) -> None:
    """On a CPU, the reported cost of a write is the writer thread's CPU time, which does not
    include waiting for the disk. On a GPU, the reported cost is zero.
    """
    background, path = Worker(make_runner(null_world)).background, tmp_path / "a"
    background._copy({"bytes": torch.ones(1 << 20, dtype=torch.uint8)})
    path.write_bytes(bytes(1 << 20))
    started_s = time.thread_time()
    spent_s = background._write(path, [0, 1 << 20], 0)
    assert 0 < spent_s <= time.thread_time() - started_s
    assert path.read_bytes() == b"\1" * (1 << 20)
    background._device = torch.device("cuda")
    assert background._write(path, [0, 1 << 20], 0) == 0
