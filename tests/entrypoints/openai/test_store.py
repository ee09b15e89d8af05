# SPDX-License-Identifier: Apache-2.0
"""The media store: limits, expiry, access by client, jobs of dead processes, and several processes
that share one directory.
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


def test_ids_contain_the_name_of_the_server(root: Path) -> None:
    """An id contains the name of its server, so a reverse proxy can route requests by id. Servers
    with and without names may share a directory.
    """
    named = MediaStore(MediaLimits(media_dir=str(root)), "rack-7")
    made = record(named)
    assert made.id.startswith("video_rack-7.") and named.path(made.id, "mp4").parent == root
    stem = named.path(made.id, "mp4").with_suffix("")
    video = VideoFile(stem, 16.0, 1)
    video.write_frames(np.zeros((1, 48, 64, 3), np.uint8))
    video.finish()
    assert sorted(path.name for path in root.glob("*.mp4")) == [f"{made.id}.mp4"]
    other = store_at(root)
    assert [found.id for found in other.records()] == [made.id]
    file_id = named.add_file(b"x", "png")
    assert file_id.startswith("file_rack-7.") and other.find_file(file_id) is not None
    named.delete(made.id)
    assert not list(root.glob("video_*"))


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


def test_a_record_survives_a_round_trip(root: Path) -> None:
    """A record read back from disk, even by another process's store, equals the record written."""
    store = store_at(root)
    made = record(store, status="in_progress", progress=40)
    assert store.read_record(made.id) == made
    assert store_at(root).read_record(made.id) == made


def test_records_and_files_belong_to_their_client(root: Path) -> None:
    """A client with a different key cannot read or list a job, and a file cannot be found by its
    name on disk.
    """
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
def test_only_ids_of_the_store_are_looked_up(root: Path, name: str) -> None:
    """An id sent by a client is looked up only if it has the form of a store id."""
    store = store_at(root)
    assert store.read_record(name) is None
    assert store.find_file(name) is None
    with pytest.raises(AssertionError):
        store.path(name, "mp4")


def test_finished_jobs_are_bounded_by_count_and_bytes_oldest_first(root: Path) -> None:
    """When finished jobs exceed the limit on their number or size, the oldest are deleted first.
    Running jobs are never deleted.
    """
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


def test_expired_jobs_and_images_are_deleted(root: Path) -> None:
    """Jobs are deleted after their expiry time, and images are deleted when they reach a maximum
    age.
    """
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


def test_a_job_of_a_killed_process_has_failed(root: Path) -> None:
    """After a `kill -9`, the jobs of the killed process have the status `failed` with a reason,
    even in the store of a new server.
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


def test_another_process_can_end_a_job(root: Path) -> None:
    """When another process deletes a job, the job becomes invisible immediately, the process that
    runs the job receives the request to end it, and leftover files are pruned.
    """
    owner, other = store_at(root), store_at(root)
    made = record(owner, status="in_progress")
    other.request_stop(made.id, "delete")
    assert owner.stop_requested(made.id) == "delete"
    assert owner.read_record(made.id) is None and other.read_record(made.id) is None
    made.status = "completed"
    owner.write(made)  # the job finishes at the same moment
    other.prune()
    assert not list(root.glob(f"{made.id}*"))


def test_a_private_directory_is_deleted_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next server deletes the private directories of killed servers but no other
    directories.
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
    assert store.root.exists()  # the directory is old, but its owner is alive
    for each in (store, second):
        each.close()
        assert not each.root.exists()


def test_a_video_is_written_part_by_part_with_its_stills(tmp_path: Path) -> None:
    """A video is written as three files, its sprite sheet covers the whole video, and an abandoned
    video leaves no file.
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
    """Return the directory where a 1 MiB disk is mounted."""
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
def test_a_full_disk_during_a_video_is_an_oserror(disk: Path, tmp_path: Path, fill_at: int) -> None:
    """If the disk becomes full before the first frame, between frames or before the end, an OSError
    is raised, the encoding process does not crash, and no file is left behind or kept open.
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


def test_a_record_on_a_full_disk_is_written_later(disk: Path) -> None:
    """If the disk is full, the record of a finished job is written later but can already be read,
    because clients must see that the job has ended. A new job or image is refused and leaves no
    files behind.
    """
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


def test_the_next_server_deletes_unfinished_files_of_a_killed_one(root: Path) -> None:
    """The next server deletes the unfinished files and the lock of a killed server, but keeps the
    files of a live one.
    """
    living = store_at(root)
    (root / f"video_{'a' * 22}.{living.owner}.part").write_bytes(b"half")
    (root / f"video_{'b' * 22}.0123456789abcdef.part").write_bytes(b"half")
    (root / "0123456789abcdef.owner").write_bytes(b"")
    store_at(root).close()
    assert sorted(path.name for path in root.iterdir()) == sorted(
        [f"{living.owner}.owner", f"video_{'a' * 22}.{living.owner}.part"]
    )


def test_an_entry_that_cannot_be_deleted_is_skipped(root: Path) -> None:
    """A directory that has the name of a file cannot be deleted as a file. It prevents neither
    startup, pruning nor the creation of new files.
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
