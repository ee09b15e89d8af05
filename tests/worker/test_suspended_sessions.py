# SPDX-License-Identifier: Apache-2.0
"""`omni.suspend_idle_s` with a real model: more live sessions than fit on the device."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.snapshot_steps import Worker, game_chunk, world_chunk

from vllm_omni.config import OmniConfig
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.sessions.session_files import SuspendedFiles
from vllm_omni.worker.diffusion.sessions.store import Suspension

NUM_SESSIONS = 4


def play_in_turn(chunk: Any, tight: Worker, roomy: Worker) -> None:
    """Generate three chunks of each session on both workers, alternating between sessions, and
    check that the workers' chunks are bit-identical.
    """
    for index in range(3):
        for number in range(NUM_SESSIONS):
            ours, theirs = (
                chunk(worker, f"s{number}", index, output="latents")["latents"]
                for worker in (tight, roomy)
            )
            assert torch.equal(ours, theirs), (index, number)


@pytest.mark.parametrize(
    ("family", "chunk"), [("lingbot_world", world_chunk), ("matrix_game", game_chunk)]
)
def test_sessions_take_turns_on_the_device(
    make_runner: Any, request: pytest.FixtureRequest, family: str, chunk: Any
) -> None:
    """Four sessions that alternate on a device with memory for two generate the same latents, bit
    for bit, as on a device with memory for all four.
    """
    checkpoint = request.getfixturevalue(family)
    roomy = Worker(make_runner(checkpoint, {}))
    params = DiffusionParams(session_id="s", prompt="a harbour", output="latents")
    nbytes = int(roomy.runner.model.session_nbytes(params))
    tight = Worker(
        make_runner(checkpoint, {"suspend_idle_s": 0, "max_suspended_bytes": 2 * nbytes})
    )
    tight.runner.sessions.max_bytes = 2 * nbytes
    play_in_turn(chunk, tight, roomy)
    stats = tight.runner.sessions.stats()
    assert (stats["sessions"], stats["suspended"]) == (NUM_SESSIONS, NUM_SESSIONS - 2)
    assert stats["bytes"] == stats["suspended_bytes"] == 2 * nbytes
    assert roomy.runner.sessions.stats()["suspended"] == 0


@pytest.mark.parametrize(
    ("check", "size"), [(OmniConfig.check_ranks, 2), (OmniConfig.check_stages, 2)]
)
def test_several_ranks_are_refused(check: Any, size: int) -> None:
    with pytest.raises(ValueError, match="suspend_idle_s requires a single rank"):
        check(OmniConfig(suspend_idle_s=1.0), size)


def test_windows_that_grow_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_growth"):
        OmniConfig(suspend_idle_s=1.0, kv_growth=True)


@pytest.fixture
def on_disk(make_runner: Any, lingbot_world: Any, tmp_path: Path) -> tuple[Worker, int]:
    """A worker with memory for one session on the device and one on the host, and the size of a
    session in bytes.

    The worker moves additional sessions to disk.
    """
    worker = Worker(make_runner(lingbot_world, {"suspend_idle_s": 0}))
    params = DiffusionParams(session_id="s", prompt="a harbour", output="latents")
    nbytes = int(worker.runner.model.session_nbytes(params))
    sessions = worker.runner.sessions
    sessions.suspension = Suspension(0.0, nbytes, worker.runner.device)
    sessions.max_bytes = nbytes
    sessions.files = SuspendedFiles(tmp_path / "disk", worker.snapshots)
    return worker, nbytes


def test_sessions_return_from_disk_bit_for_bit(
    on_disk: tuple[Worker, int], make_runner: Any, lingbot_world: Any, tmp_path: Path
) -> None:
    """Four sessions alternate on a worker with memory for one on the device and one on the host.
    Sessions that return from disk continue bit for bit.

    A copy restored from the snapshot of a session on disk is bit-identical to that session.
    """
    (tight, nbytes), roomy = on_disk, Worker(make_runner(lingbot_world, {}))
    play_in_turn(world_chunk, tight, roomy)
    stats = tight.runner.sessions.stats()
    names = ("sessions", "suspended", "on_disk", "bytes", "suspended_bytes")
    assert [stats[name] for name in names] == [NUM_SESSIONS, 1, 2, nbytes, nbytes]
    assert stats["chunks"] == {f"s{number}": 3 for number in range(NUM_SESSIONS)}
    assert stats["disk_bytes"] > 0
    assert list((tmp_path / "disk").iterdir()) == []  # the files have no directory entries
    tight.save("s0", tmp_path / "s0")
    roomy.restore("again", tmp_path / "s0")
    assert roomy.bits("again")[1] == roomy.bits("s0")[1]
    tight.runner.sessions.close_all()
    assert tight.runner.sessions.stats()["disk_bytes"] == 0


def test_a_damaged_file_fails_its_session_only(on_disk: tuple[Worker, int]) -> None:
    """A damaged file fails only its own session.

    Chunks of this session fail as long as the file is damaged, and none of its memory remains
    allocated on the device.
    """
    worker, _ = on_disk
    for number in range(3):
        world_chunk(worker, f"s{number}", 0, output="latents")
    sessions = worker.runner.sessions
    (stored,) = sessions._files()
    assert stored.session_id == "s0"
    size = stored.num_bytes
    before = os.pread(stored.file.fileno(), 1, size - 1)
    os.pwrite(stored.file.fileno(), bytes([before[0] ^ 1]), size - 1)
    for _ in range(2):
        with pytest.raises(RequestFailed, match="damaged on disk"):
            world_chunk(worker, "s0", 1, output="latents")
    stats = sessions.stats()
    assert (stats["bytes"], len(sessions)) == (0, 3)
    world_chunk(worker, "s1", 1, output="latents")
    os.pwrite(stored.file.fileno(), before, size - 1)
    world_chunk(worker, "s0", 1, output="latents")
    assert sessions.stats()["chunks"] == {"s0": 2, "s1": 2, "s2": 1}


def test_a_full_disk_refuses_what_does_not_fit(
    on_disk: tuple[Worker, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the disk is full, a new session that does not fit is refused, and every live session
    continues.
    """
    worker, _ = on_disk

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    for number in range(2):
        world_chunk(worker, f"s{number}", 0, output="latents")
    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", full)
        with pytest.raises(RequestFailed, match="capacity"):
            world_chunk(worker, "s2", 0, output="latents")
        world_chunk(worker, "s0", 1, output="latents")
        world_chunk(worker, "s1", 1, output="latents")
        assert worker.runner.sessions.stats()["on_disk"] == 0
    world_chunk(worker, "s2", 0, output="latents")
    assert worker.runner.sessions.stats()["on_disk"] == 1


def test_suspend_dir_must_be_a_directory_and_requires_suspend_idle_s(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"omni\.suspend_dir"):
        SuspendedFiles(tmp_path / "file", None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="requires suspend_idle_s"):
        OmniConfig(suspend_dir=str(tmp_path))
