# SPDX-License-Identifier: Apache-2.0
"""The media store: bounds, expiry, private names, jobs whose process has died, several processes
on one directory.
"""

import contextlib
import errno
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.waits import seconds, stay_until_killed
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.videos.file import VideoFile
from vllm_omni.entrypoints.openai.videos.store import JobRecord, MediaStore


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "media"


def store_at(root: Path, **limits: Any) -> MediaStore:
    return MediaStore(MediaLimits(media_dir=str(root), **limits))


def record(store: MediaStore, age_s: float = 0.0, **fields: Any) -> JobRecord:
    made = JobRecord(
        id=store.new_id(),
        owner=store.owner,
        model="m",
        prompt="p",
        size="64x48",
        seconds="1",
        fps=16.0,
        num_frames=17,
        seed=0,
        created_s=time.time() - age_s,
        **fields,
    )
    store.write(made)
    return made


def finished(store: MediaStore, age_s: float = 0.0, nbytes: int = 0) -> JobRecord:
    made = record(
        store,
        age_s,
        status="completed",
        progress=100,
        expires_s=time.time() - age_s + 3600,
        file_bytes=nbytes,
    )
    store.path(made.id, "mp4").write_bytes(bytes(nbytes))
    return made


def test_a_record_comes_back_as_it_was(root: Path) -> None:
    """From disk, also in another process's store."""
    store = store_at(root)
    made = record(store, status="in_progress", progress=40)
    assert store.read_record(made.id) == made
    assert store_at(root).read_record(made.id) == made


def test_what_a_client_stored_is_there_for_no_other(root: Path) -> None:
    """Its jobs are in nobody else's list, and a file's id says nothing of the file's name."""
    store = store_at(root)
    mine, theirs = record(store, principal="a"), record(store, principal="b")
    assert (
        store.read_record(mine.id, "a") == mine
        and store.read_record(mine.id, "b") is None
        and store.read_record(mine.id) is None
    )
    assert store.records("a") == [mine] and store.records("b") == [theirs] and store.records() == []
    image = store.add_file(b"data", "png", "a")
    found = store.find_file(image, "a")
    assert found is not None and found.read_bytes() == b"data"
    assert store.find_file(image, "b") is None and store.find_file(image) is None
    assert store.find_file(found.stem, "a") is None and store.find_file(found.stem) is None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "video_x",
        "../../etc/passwd",
        "video_" + "a" * 23,
        "video_" + "/" * 22,
        "video_" + "a" * 22 + "\n",
    ],
)
def test_names_come_from_the_store_alone(root: Path, name: str) -> None:
    """Whatever a client sends as an id is looked up only if it has the form of one."""
    store = store_at(root)
    assert store.read_record(name) is None
    assert store.find_file(name) is None
    with pytest.raises(AssertionError):
        store.path(name, "mp4")


def test_finished_jobs_are_bounded_by_count_and_bytes_oldest_first(root: Path) -> None:
    """What still runs is never touched."""
    store = store_at(root, max_videos=3, max_media_bytes=250)
    running = record(store, age_s=1000, status="in_progress")
    made = [finished(store, age_s=100 - number, nbytes=10) for number in range(5)]
    store.prune()
    assert [retained.id for retained in store.records()] == [
        running.id,
        *(job.id for job in made[2:]),
    ]
    large = finished(store, nbytes=245)
    store.prune()
    assert [retained.id for retained in store.records()] == [running.id, large.id]
    assert not store.path(made[4].id, "mp4").exists()
    assert store.nbytes() == 245


def test_what_has_expired_goes(root: Path) -> None:
    """Jobs by their own date, pictures by their age."""
    store = store_at(root, media_ttl_s=3600)
    old, new = finished(store, age_s=4000), finished(store, age_s=10)
    image = store.add_file(b"data", "png")
    file = store.find_file(image)
    assert file is not None
    os.utime(file, (time.time() - 4000,) * 2)
    assert store.find_file(image) is None
    store.prune()
    assert [retained.id for retained in store.records()] == [new.id]
    assert not file.exists() and not store.path(old.id, "json").exists()


def _run_a_job(root: str, made: Any) -> None:
    store = MediaStore(MediaLimits(media_dir=root))
    made.put(record(store, status="in_progress", progress=30).id)
    stay_until_killed()


def test_a_job_whose_process_was_killed_has_failed(root: Path) -> None:
    """While it lives its job runs; after kill -9 everybody sees `failed` with a reason, and a
    new server keeps it.
    """
    context = multiprocessing.get_context("spawn")
    made: Any = context.Queue()
    process = context.Process(target=_run_a_job, args=(str(root), made))
    process.start()
    job_id = made.get(timeout=seconds(60))
    store = store_at(root)
    alive = store.read_record(job_id)
    assert alive is not None and alive.status == "in_progress"
    process.kill()
    process.join()
    dead = store.read_record(job_id)
    assert dead is not None and dead.error is not None
    assert (dead.status, dead.error["code"], dead.progress) == ("failed", "server_stopped", 30)


def test_another_process_requests_the_owner_to_end_a_job(root: Path) -> None:
    """A job being deleted is gone for everybody at once; the owner finds the request; leftovers
    are pruned.
    """
    owner, other = store_at(root), store_at(root)
    made = record(owner, status="in_progress")
    other.request_stop(made.id, "delete")
    assert owner.stop_requested(made.id) == "delete"
    assert owner.read_record(made.id) is None and other.read_record(made.id) is None
    made.status = "completed"
    owner.write(made)  # finished in the same moment
    other.prune()
    assert not list(root.glob(f"{made.id}*"))


def test_a_private_directory_goes_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of servers that were killed are removed by the next one; nobody else's are
    touched.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    dead, fresh, open_to_all = (
        tmp_path / f"vllm-omni-media-{name}" for name in ("dead", "fresh", "open")
    )
    for path in (dead, fresh, open_to_all):
        path.mkdir(mode=0o700)
    open_to_all.chmod(0o755)
    for path in (dead, open_to_all):
        os.utime(path, (time.time() - 1000,) * 2)
    store = MediaStore(MediaLimits())
    assert store.root.stat().st_mode & 0o777 == 0o700
    assert not dead.exists() and fresh.exists() and open_to_all.exists()
    os.utime(store.root, (time.time() - 1000,) * 2)
    second = MediaStore(MediaLimits())
    assert store.root.exists()  # old, but its owner lives
    for each in (store, second):
        each.close()
        assert not each.root.exists()


def test_a_video_is_written_part_by_part_with_its_stills(tmp_path: Path) -> None:
    """Three files; the sprite sheet shows frames from all over the video; abandoned ones leave
    nothing.
    """
    frames = np.stack([np.full((48, 64, 3), number * 4, np.uint8) for number in range(40)])
    file = VideoFile(tmp_path / "video_a", 16.0, 40)
    file.write_frames(frames[:9])
    file.write_frames(frames[9:])
    nbytes = file.finish()
    assert nbytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    back, fps = decode_mp4((tmp_path / "video_a.mp4").read_bytes())
    assert back.shape == frames.shape and fps == 16.0
    sheet = np.asarray(Image.open(tmp_path / "video_a.jpg"))
    assert sheet[-30, -30, 0] > 120 and sheet[20, 20, 0] < 20
    other = VideoFile(tmp_path / "video_b", 16.0, 40)
    other.write_frames(frames[:9])
    other.abandon()
    assert not list(tmp_path.glob("video_b*"))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a disk")
    mounted = tmp_path / "disk"
    mounted.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)], check=True)
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def fill(disk: Path) -> None:
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


_NOISE = np.random.default_rng(0).integers(0, 255, (60, 96, 160, 3), dtype=np.uint8)
_WRITE = """
import sys
from pathlib import Path
import numpy as np
from vllm_omni.entrypoints.openai.videos.file import VideoFile
frames, stem, fill_at = np.load(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
file = VideoFile(stem, 16.0, len(frames))
try:
    for number in range(len(frames)):
        if number == fill_at:
            sys.stdout.write("fill\\n"); sys.stdout.flush(); sys.stdin.readline()
        file.write_frames(frames[number : number + 1])
    if fill_at == len(frames):
        sys.stdout.write("fill\\n"); sys.stdout.flush(); sys.stdin.readline()
    file.finish()
except OSError as error:
    file.abandon()
    print(error.errno, flush=True)
open_files = [path.resolve() for path in Path("/proc/self/fd").iterdir() if path.exists()]
print(sum(stem.name in path.name for path in open_files))
"""


@pytest.mark.parametrize("fill_at", [0, 30, 60])
def test_a_disk_that_fills_up_under_a_video_is_an_oserror(
    disk: Path, tmp_path: Path, fill_at: int
) -> None:
    """Before the first frame, in between, before the end: no crash (a process of its own), no
    file, none left open.
    """
    np.save(tmp_path / "frames.npy", _NOISE)
    command = [
        sys.executable,
        "-c",
        _WRITE,
        str(tmp_path / "frames.npy"),
        str(disk / "video"),
        str(fill_at),
    ]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None and writer.stdout.readline() == "fill\n"
    fill(disk)
    said, _ = writer.communicate("go\n", timeout=seconds(60))
    assert (writer.returncode, said.split()) == (0, [str(errno.ENOSPC), "0"])
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_record_that_the_disk_does_not_take_is_retained_and_written_later(disk: Path) -> None:
    """Its clients must see the end; a new job or picture is refused without a trace."""
    store = MediaStore(MediaLimits(media_dir=str(disk)))
    made = record(store, status="in_progress")
    names = sorted(path.name for path in disk.iterdir())
    fill(disk)
    made.status, made.error = "failed", {"code": "storage_full", "message": "full"}
    store.write_when_possible(made)
    with pytest.raises(OSError, match="No space left"):
        store.add_file(b"a picture", "png")
    with pytest.raises(OSError, match="No space left"):
        record(store)
    assert store.read_record(made.id) == made
    assert sorted(path.name for path in disk.iterdir()) == sorted([*names, "filler"])
    (disk / "filler").unlink()
    assert store.read_record(made.id) == made
    assert MediaStore(MediaLimits(media_dir=str(disk))).read_record(made.id) == made


def test_the_next_server_removes_what_a_killed_one_had_not_finished(root: Path) -> None:
    """And its lock; what a living one is writing stays."""
    living = store_at(root)
    (root / f"video_{'a' * 22}.{living.owner}.part").write_bytes(b"half")
    (root / f"video_{'b' * 22}.0123456789abcdef.part").write_bytes(b"half")
    (root / "0123456789abcdef.owner").write_bytes(b"")
    store_at(root).close()
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [f"{living.owner}.owner", f"video_{'a' * 22}.{living.owner}.part"]
    )


def test_an_entry_that_cannot_be_removed_stays_and_ends_nothing(root: Path) -> None:
    """Directories under the names of files: the store starts, prunes what it can and takes new
    files.
    """
    store = store_at(root)
    old, older = finished(store, age_s=7200), finished(store, age_s=9000)
    for name in (
        "left.part",
        f"video_{'b' * 22}.0123456789abcdef.part",
        "0123456789abcdef.owner",
        f"{older.id}.webp",
    ):
        (root / name).mkdir()
    store_at(root).prune()
    assert store.read_record(old.id) is None and (root / f"{older.id}.webp").is_dir()
    assert store.find_file(store.add_file(b"x", "png")) is not None
