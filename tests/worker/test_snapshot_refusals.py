# SPDX-License-Identifier: Apache-2.0
"""The snapshot format, and files that cannot be restored.

Every such file is refused with a reason, and no session remains.
"""

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.snapshot_steps import Worker, rewrite
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save_file

from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot import UNSEEN, ParallelLayout, read_header

_WORKERS: dict[str, Worker] = {}


@pytest.fixture
def worker(make_runner: Any, null_world: Path) -> Worker:
    """The worker that this module's tests share, with no open sessions."""
    if "worker" not in _WORKERS:
        _WORKERS["worker"] = Worker(make_runner(null_world))
    _WORKERS["worker"].runner.sessions.close_all()
    return _WORKERS["worker"]


@pytest.fixture
def snapshot(worker: Worker, tmp_path: Path) -> Path:
    """The snapshot of a session with two chunks. The session itself has been closed."""
    for index in range(2):
        worker.chunk("a", prompt="a field" if index == 0 else None, seed=5 if index == 0 else None)
    worker.save("a", tmp_path / "a", owner={"session_id": "client"})
    worker.runner.sessions.close("a")
    return tmp_path / "a"


def refusal(worker: Worker, path: Path) -> RequestFailed:
    """Try to restore a file that must be refused, check that no session remains, and return the
    error.
    """
    with pytest.raises(RequestFailed) as failure:
        worker.restore("b", path)
    assert len(worker.runner.sessions) == 0
    assert str(path) not in failure.value.message
    return failure.value


def test_a_snapshot_is_a_safetensors_file(worker: Worker, snapshot: Path) -> None:
    """A snapshot is a safetensors file that the safetensors library can read. Only the user that
    owns the file may access it.

    The file's header describes its content and the session's owner.
    """
    header = read_header(snapshot)
    assert (header.format_version, header.model.family, header.chunk_index) == (1, "null_world", 2)
    assert header.owner == {"session_id": "client"}
    assert header.ranks[0].scalars == {"chunk_index": 2, "prompt": "a field", "seed": 5}
    assert set(load(snapshot.read_bytes())) == {"rank0.memory"}
    assert snapshot.stat().st_mode & 0o777 == 0o600
    assert header.model.parallel == ParallelLayout(1, 1, False)


@pytest.mark.parametrize("retained", [0, 7, 100, 0.5, -1])
def test_a_truncated_file_is_refused(worker: Worker, snapshot: Path, retained: float) -> None:
    """A file is refused if it is truncated within its length field, header or tensors, or by one
    byte.
    """
    content = snapshot.read_bytes()
    size = (
        int(len(content) * retained)
        if isinstance(retained, float)
        else retained
        if retained >= 0
        else len(content) + retained
    )
    snapshot.write_bytes(content[:size])
    assert refusal(worker, snapshot).code == "invalid_snapshot"


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 64, b"\0" * 4096, b"PK\3\4" + bytes(100), pickle.dumps({"a": 1})]
)
def test_another_file_is_refused_and_never_unpickled(
    worker: Worker, tmp_path: Path, content: bytes
) -> None:
    """Files of noise or zeros, an archive and a pickle are all refused, and the pickle is never
    unpickled.
    """
    path = tmp_path / "foreign"
    path.write_bytes(content)
    assert refusal(worker, path).code == "invalid_snapshot"


def test_a_longer_file_and_other_safetensors_are_refused(
    worker: Worker, snapshot: Path, tmp_path: Path
) -> None:
    """A snapshot with extra bytes after its tensors is refused, and so is a weight file."""
    snapshot.write_bytes(snapshot.read_bytes() + b"\0")
    assert refusal(worker, snapshot).code == "invalid_snapshot"
    save_file({"weight": torch.zeros(3)}, tmp_path / "weights")
    failure = refusal(worker, tmp_path / "weights")
    assert failure.code == "invalid_snapshot"
    assert "not a snapshot of a session" in failure.message


@pytest.mark.parametrize(
    ("change", "code", "reason"),
    [
        (lambda h, t: h.update(format_version=2), "snapshot_version", "format version 2"),
        (lambda h, t: h.update(format_version="1"), "snapshot_version", "reads version 1"),
        (
            lambda h, t: h["model"].update(family="another_world"),
            "foreign_snapshot",
            "another_world",
        ),
        (lambda h, t: h["model"].update(config="0" * 64), "foreign_snapshot", "configuration"),
        (
            lambda h, t: h["model"]["parallel"].update(tensor=2),
            "foreign_snapshot",
            "tensor parallel 2",
        ),
        (
            lambda h, t: h["model"]["parallel"].update(decode=True),
            "foreign_snapshot",
            "VAE decode in parallel",
        ),
        (lambda h, t: h["ranks"][0].update(weights="0" * 64), "foreign_snapshot", "weights"),
        (lambda h, t: h.update(ranks=[]), "invalid_snapshot", "rank 0"),
        (lambda h, t: h.update(more=1), "invalid_snapshot", "more"),
        (lambda h, t: h.pop("opening"), "invalid_snapshot", "opening"),
        (
            lambda h, t: h["opening"].update(op="close"),
            "invalid_snapshot",
            "the snapshot's first request has unknown fields ['op']",
        ),
        (
            lambda h, t: h["opening"].update(height=4096, width=4096),
            "unsupported_size",
            "4096x4096",
        ),
        (
            lambda h, t: h["opening"].update(height=-1),
            "invalid_snapshot",
            "the snapshot's first request: ",
        ),
        (lambda h, t: h["opening"].update(height=16), "invalid_snapshot", "memory"),
        (lambda h, t: h.update(chunk_index=0), "invalid_snapshot", "chunk_index"),
        (
            lambda h, t: h.update(chunk_index=7),
            "invalid_snapshot",
            "the snapshot's parts belong to different chunks",
        ),
        (
            lambda h, t: h["ranks"][0]["scalars"].update(chunk_index="2"),
            "invalid_snapshot",
            "chunk_index",
        ),
        (lambda h, t: h["ranks"][0]["scalars"].update(extra=1), "invalid_snapshot", "extra"),
        (
            lambda h, t: t.update({"rank0.more": torch.zeros(1)}),
            "invalid_snapshot",
            "unknown tensors ['more']",
        ),
        (lambda h, t: t.pop("rank0.memory"), "invalid_snapshot", "lacks the tensor memory"),
        (lambda h, t: t.update({"rank0.memory": torch.zeros(1)}), "invalid_snapshot", "memory"),
        (
            lambda h, t: t.update({"rank0.memory": t["rank0.memory"].half()}),
            "invalid_snapshot",
            "float16",
        ),
    ],
)
def test_an_incompatible_snapshot_is_refused_with_the_reason(
    worker: Worker, snapshot: Path, change: Any, code: str, reason: str
) -> None:
    """An incompatible snapshot is refused, and the error states what does not match: the version,
    model, weights, parallel layout, size or a tensor.
    """
    rewrite(snapshot, change)
    failure = refusal(worker, snapshot)
    assert failure.code == code
    assert reason in failure.message


def test_a_worker_checks_the_header_against_the_file(worker: Worker, snapshot: Path) -> None:
    """A worker checks the header against the file before it allocates memory.

    The file may have shrunk since the front end read it, or the worker's machine may have a
    different file at that path.
    """
    whole = snapshot.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    for broken in (
        whole[:-1],
        whole[: 8 + length],
        whole[: length // 2],
        (1 << 62).to_bytes(8, "little") + whole[8:],
    ):
        snapshot.write_bytes(broken)
        (response,) = worker.rpc("restore_session", ("b", str(snapshot)))
        assert response["error"][0] == "invalid_snapshot", response
        assert len(worker.runner.sessions) == 0


def test_a_session_above_the_byte_limit_is_refused(
    worker: Worker, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot larger than `max_session_bytes` is refused; one of exactly that size is accepted.
    The front end compares the file size with the limit.
    """
    worker.restore("b", snapshot)
    nbytes = worker.runner.sessions.nbytes
    worker.runner.sessions.close("b")
    monkeypatch.setattr(worker.runner.sessions, "max_bytes", nbytes)
    worker.restore("b", snapshot)
    worker.runner.sessions.close("b")
    monkeypatch.setattr(worker.runner.sessions, "max_bytes", 10)
    failure = refusal(worker, snapshot)
    assert failure.code == "snapshot_too_large"
    assert failure.message == f"the session needs {nbytes} bytes; all sessions here may hold 10"
    with pytest.raises(RequestFailed, match="may hold 10 bytes"):
        read_header(snapshot, max_bytes=10)


def test_a_file_that_is_invisible_to_a_worker_is_refused(worker: Worker, tmp_path: Path) -> None:
    """If a worker cannot open a file, the file is refused, and the error says that all machines
    must share the directory.

    A possible cause is a front end that runs on another machine.
    """
    (response,) = worker.rpc("restore_session", ("b", str(tmp_path / "elsewhere")))
    assert response == {"error": ["snapshot_storage", UNSEEN]}


def test_a_live_session_is_not_overwritten(worker: Worker, snapshot: Path) -> None:
    """Restoring a snapshot under a live session's id is refused, and the live session stays
    open.
    """
    worker.restore("b", snapshot)
    with pytest.raises(RequestFailed) as failure:
        worker.restore("b", snapshot)
    assert str(failure.value) == "session_exists: a session of this id is live here"
    assert "b" in worker.runner.sessions


def test_a_full_server_refuses_and_a_file_is_not_overwritten(
    worker: Worker, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`max_sessions` also applies when a snapshot is restored. Saving a snapshot never replaces a
    file.
    """
    monkeypatch.setattr(worker.runner.sessions, "max_sessions", 1)
    worker.restore("b", snapshot)
    with pytest.raises(RequestFailed) as failure:
        worker.restore("c", snapshot)
    assert failure.value.code == "capacity"
    with pytest.raises(FileExistsError):
        worker.save("b", snapshot)
    assert read_header(snapshot).chunk_index == 2


def test_a_session_that_changes_during_a_save_is_busy(
    worker: Worker, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a chunk ends after the session's header is built but before its data is written, saving
    fails with `session_busy` and leaves no file.
    """
    worker.restore("b", snapshot)
    write = worker.snapshots.write

    def late(*args: Any) -> Any:
        worker.chunk("b")
        return write(*args)

    monkeypatch.setattr(worker.snapshots, "write", late)
    with pytest.raises(RequestFailed) as failure:
        worker.save("b", tmp_path / "torn")
    assert failure.value.code == "session_busy"
    assert not (tmp_path / "torn").exists()


def test_a_full_disk_is_an_error_and_no_file_is_left(
    worker: Worker, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full, saving a session raises an error and leaves no file. If the disk is full
    from the start, the error is raised before anything is copied.
    """
    worker.restore("b", snapshot)

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    room = os.statvfs(tmp_path)
    free = os.statvfs_result((*room[:3], 0, 0, *room[5:]))
    for name, replacement in (("fstatvfs", lambda descriptor: free), ("pwritev", full)):
        with monkeypatch.context() as patched:
            patched.setattr(os, name, replacement)
            with pytest.raises(RequestFailed, match="no room for a snapshot") as failure:
                worker.save("b", tmp_path / "large")
        assert failure.value.code == "storage_full"
        assert not (tmp_path / "large").exists()


def test_damage_to_the_header_is_refused_or_harmless(
    worker: Worker, snapshot: Path, tmp_path: Path
) -> None:
    """If a byte in a snapshot's header is changed, restoring the snapshot either succeeds or fails
    with a `RequestFailed` whose code is not `engine_error`.
    """
    content = snapshot.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")

    codes = set()

    @settings(max_examples=150, deadline=None)
    @given(st.integers(0, head - 1), st.integers(0, 255))
    def damage(position: int, value: int) -> None:
        path = tmp_path / "damaged"
        path.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
        codes.add(restored_or_refused(worker, path))
        worker.runner.sessions.close_all()

    damage()
    assert "engine_error" not in codes
    assert "invalid_snapshot" in codes


def restored_or_refused(worker: Worker, path: Path) -> str:
    try:
        worker.restore("b", path)
    except RequestFailed as failure:
        return failure.code
    return "restored"
