# SPDX-License-Identifier: Apache-2.0
"""A session that is copied to another runner while it is running continues there bit for bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.snapshot_steps import Worker, text_chunk, world_chunk
from test_snapshots import CASES, DAILY, SIZES, SMALL

from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot_exchange import copy_exchange, run_exchange
from vllm_omni.tensors import file_io
from vllm_omni.tensors.digests import tensor_digests

STAGED_DAILY = ("world, ring and sinks", "game, windows of trunk, mouse and keyboard")
"""Cases in which `make test` also copies sessions through staging buffers.

Two cases suffice, because the staging buffers do not depend on the model.
tests/test_tensor_bytes.py tests them for every layout and dtype.
"""


@pytest.fixture
def pair(make_runner: Any, request: pytest.FixtureRequest) -> Callable[..., tuple[Worker, Worker]]:
    def make(family: str, model: dict[str, Any] | None = None, **omni: Any) -> Any:
        checkpoint = request.getfixturevalue(family)
        options = {"model": model or {}, **omni, **SIZES.get(family, {})}
        return tuple(Worker(make_runner(checkpoint, options)) for _ in range(2))

    return make


def copied_ahead(pair: Any, path: Path) -> tuple[Worker, Worker]:
    """Generate four chunks of session `a`, write the first version of its copy, and restore that
    version as session `b` on the second worker.
    """
    here, there = pair("lingbot_world", SMALL)
    for index in range(4):
        world_chunk(here, "a", index)
    here.copy("a", path, is_playing=True)
    there.restore("b", path)
    return here, there


@pytest.mark.parametrize(
    ("case", "staged"),
    [
        pytest.param(
            case,
            staged,
            id=f"{case}-{'staged' if staged else 'host'}",
            marks=[] if case in (STAGED_DAILY if staged else DAILY) else [pytest.mark.nightly],
        )
        for staged in (False, True)
        for case in CASES
    ],
)
def test_a_session_is_copied_while_it_plays(
    case: str, staged: bool, pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a session runs, the other runner restores a first version of its copy and applies two
    later versions.

    Chunks run between the versions. At the end, both sessions have the same state and generate the
    same chunks, and the file alone is a complete snapshot.
    """
    if staged:  # Copy tensors in host memory like those in device memory.
        monkeypatch.setattr(file_io, "_passes_staging", lambda tensor: True)
    family, model, chunk, chunks = CASES[case]
    here, there = pair(family, model)
    path = tmp_path / "a.safetensors"
    for index in range(chunks):
        chunk(here, "a", index)
    here.copy("a", path, is_playing=True)
    there.restore("b", path)
    chunk(here, "a", chunks)
    here.copy("a", path, is_playing=True)
    there.update("b", path)
    chunk(here, "a", chunks + 1, prompt="at night")
    header, _ = here.copy("a", path, is_playing=False)
    there.update("b", path)
    assert header.chunk_index == chunks + 2
    assert there.bits("b") == here.bits("a")
    there.restore("c", path)
    assert there.bits("c") == here.bits("a")
    assert there.runner.sessions.nbytes == 2 * here.runner.sessions.nbytes
    ours, *others = (
        chunk(worker, name, chunks + 2)
        for worker, name in ((here, "a"), (there, "b"), (there, "c"))
    )
    assert all(torch.equal(ours[name], theirs[name]) for theirs in others for name in ours)
    here.rpc("end_copy", (str(path),))


def test_a_tensor_changed_while_it_is_copied_is_sent_again(pair: Any, tmp_path: Path) -> None:
    """If a chunk runs while a version is being written, that version is incomplete, and a later
    version completes it.

    In this test, the chunk replaces the oldest frames of the window.
    """
    path = tmp_path / "a"
    here, there = copied_ahead(pair, path)
    index = 4

    def rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        nonlocal index
        if method == "write_copy":
            for _ in range(2):  # the first chunk writes where no finished chunk has written
                world_chunk(here, "a", index)
                index += 1
        return here.rpc(method, args)

    for _ in range(2):
        header, _ = run_exchange(copy_exchange("a", path, "0.test", is_playing=True), rpc)
        assert not header.is_complete
        there.update("b", path)
    header, _ = here.copy("a", path, is_playing=False)
    there.update("b", path)
    assert header.is_complete and there.bits("b") == here.bits("a")


def test_only_what_has_changed_is_written(pair: Any, tmp_path: Path) -> None:
    """A later version writes only the data that has changed. Frames that stay in the window keep
    their position in the file, so they are not written again.
    """
    here, _ = pair("lingbot_world", SMALL)
    path = tmp_path / "a"
    for index in range(4):
        world_chunk(here, "a", index)
    _, everything = here.copy("a", path, is_playing=True)
    assert here.copy("a", path, is_playing=True)[1] == 0
    world_chunk(here, "a", 4)
    _, changed = here.copy("a", path, is_playing=False)
    frame = here.runner.sessions.get("a").tensors()["kv.frame0"].nbytes
    kept = [name for name in here.bits("a")[1] if name.startswith("kv.frame")]
    assert 0 < changed <= everything - (len(kept) - 3) * frame


@torch.inference_mode()
def test_damage_is_noticed(pair: Any, tmp_path: Path) -> None:
    """If the copy's data is damaged in memory, it is read again from the file. If the file itself
    is damaged, the copy is closed.
    """
    path = tmp_path / "a"
    here, there = copied_ahead(pair, path)

    def damage() -> None:
        there.runner.sessions.get("b").tensors()["kv.frame0"].view(torch.uint8)[0, 0, 0, 0, 0] ^= 1

    damage()
    here.copy("a", path, is_playing=False)
    there.update("b", path)
    assert there.bits("b") == here.bits("a")
    damage()
    stored = path.read_bytes()
    frame = here.bits("a")[1]["kv.frame0"]
    path.write_bytes(stored.replace(frame, bytes([frame[0] ^ 3]) + frame[1:]))
    with pytest.raises(RequestFailed, match="damaged"):
        there.update("b", path)
    assert "b" not in there.runner.sessions


@pytest.mark.parametrize("version", [1, 2])
def test_a_full_disk_leaves_no_file(
    version: int, pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = pair("null_world")
    path = tmp_path / "a"
    text_chunk(here, "a", 0)
    if version == 2:
        here.copy("a", path, is_playing=True)
        here.rpc("end_copy", (str(path),))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", full)
        with pytest.raises(RequestFailed, match="storage_full"):
            here.copy("a", path, is_playing=True)
    assert not path.exists()
    here.copy("a", path, is_playing=False)
    before = here.bits("a")
    here.restore("b", path)
    assert here.bits("b") == before


def test_a_session_that_was_started_anew_is_not_updated(pair: Any, tmp_path: Path) -> None:
    here, there = pair("null_world")
    path = tmp_path / "a"
    text_chunk(here, "a", 0)
    here.copy("a", path, is_playing=True)
    there.restore("b", path)
    here.runner.sessions.close("a")
    text_chunk(here, "a", 0, height=16, width=16)
    here.copy("a", path, is_playing=False)
    with pytest.raises(RequestFailed, match="started anew"):
        there.update("b", path)
    assert "b" not in there.runner.sessions


def test_a_chunk_between_the_two_calls_is_noticed(pair: Any, tmp_path: Path) -> None:
    """Writing the last version takes two calls. If a chunk runs between them, the copy fails,
    because the last version must be consistent.
    """
    here, _ = pair("null_world")
    text_chunk(here, "a", 0)
    exchange = copy_exchange("a", tmp_path / "a", "0.test", is_playing=False)

    def rpc(method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "write_copy":
            text_chunk(here, "a", 1)
        return here.rpc(method, args)

    with pytest.raises(RequestFailed, match="session_busy"):
        run_exchange(exchange, rpc)


def test_digests_depend_on_the_elements_only() -> None:
    """A digest depends only on a tensor's elements, not on strides or memory formats. It changes if
    any bit changes.
    """
    frames = torch.randn(3, 2, 600, 2, 8).to(torch.bfloat16)
    window = frames[:, :, 100:500]
    image = torch.randn(1, 16, 4, 30, 40)
    digests = tensor_digests(
        {
            "window": window,
            "copy": window.contiguous(),
            "image": image,
            "channels last": image.to(memory_format=torch.channels_last_3d),
            "empty": torch.empty(0),
        }
    )
    assert digests["window"] == digests["copy"]
    assert digests["image"] == digests["channels last"]
    changed = window.clone()
    changed.view(torch.int16)[2, 1, 399, 1, 7] ^= 1
    swapped = torch.cat((window[1:2], window[:1], window[2:]))
    values = {**digests, **tensor_digests({"changed": changed, "swapped": swapped})}
    assert len(set(values.values())) == 5
