# SPDX-License-Identifier: Apache-2.0
"""`MediaStore`: stores video jobs' finished files and records in a directory that several processes
can share.

A record is a small JSON file that is replaced atomically. A job's files are stored next to its
record, under the same id. Only the process that created a job writes its record. To end a job that
another process owns, a process writes a request file that the owning process polls for. Each
process holds a file lock while it runs, so other processes can detect that a job has failed because
its process is dead. This module generates the file names; clients never choose them. The number,
size and age of finished jobs are limited, and the oldest jobs are removed first.

File operations block, and each transfers between a few hundred bytes and a few MB. If many records
are read, call these operations on a worker thread.
"""

import base64
import contextlib
import hashlib
import logging
import multiprocessing
import multiprocessing.util
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final, Literal

import msgspec

from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.realtime.connection.connection import ANONYMOUS
from vllm_omni.entrypoints.staging_directory import hold_lock, is_locked

logger = logging.getLogger("vllm." + __name__)

Status = Literal["queued", "in_progress", "completed", "failed"]
Ending = Literal["cancel", "delete"]

_ID: Final = re.compile(r"^(video|file)_([A-Za-z0-9-]{1,63}\.)?[A-Za-z0-9_-]{22}\Z")
_PREFIX: Final = "vllm-omni-media-"
_LEFTOVER_AGE_S: Final = 60.0
_SUFFIXES: Final = ("json", "mp4", "webp", "jpg", "png", "jpeg", "ending")


class JobRecord(msgspec.Struct, kw_only=True):
    """A stored video job."""

    id: str
    """Job id."""
    owner: str
    """Process that runs the job."""
    model: str
    """Model name."""
    prompt: str
    """Prompt of the video."""
    size: str
    """Size of the video: `WIDTHxHEIGHT` in pixels."""
    seconds: str
    """Length of the video in seconds, as a string."""
    fps: float
    """Frame rate of the video in frames per second."""
    num_frames: int
    """Number of pixel frames in the video."""
    seed: int
    """Noise seed."""
    created_s: float
    """Unix time in seconds when the job was created. The time includes fractions of a second
    because lists are sorted by it.
    """
    status: Status = "queued"
    """Job state."""
    progress: int = 0
    """Progress in percent, 0 to 100."""
    completed_s: float | None = None
    """Unix time in seconds when the job completed or failed. None: the job has not ended."""
    expires_s: float | None = None
    """Unix time in seconds when the job and its files are removed. None: the job has not ended."""
    error: dict[str, str] | None = None
    """`code` and `message` of the failure. None: the job has not failed."""
    inference_time_s: float | None = None
    """Time in seconds that the generation took. None: the generation is not complete."""
    world_poses: list[list[float]] | None = None
    """World pose of each latent frame: x_m, z_m, heading_degrees, pitch_degrees.

    None: the poses are unknown.
    """
    file_bytes: int = 0
    """Total size in bytes of the job's files."""
    principal: str = ANONYMOUS
    """Client that created the job (`access.owner_of`). Other clients cannot access the job."""

    @property
    def is_terminal(self) -> bool:
        return self.status in ("completed", "failed")


class MediaStore:
    """Files and records of one API server process.

    Args:
        limits: Limits on the directory's contents.
        server_name: Value of `omni.server_name`, which becomes part of new ids.
    """

    def __init__(self, limits: MediaLimits, server_name: str | None = None) -> None:
        self._limits = limits
        self._id_prefix = "" if server_name is None else f"{server_name}."
        self.root = _open_directory(limits.media_dir)
        self.owner = secrets.token_hex(8)
        own = self.root / f"{self.owner}.owner"
        self._lock = hold_lock(own)
        self._unwritten: dict[str, JobRecord] = {}
        self._remove_parts()
        # Unlike an `atexit` handler, this finalizer also runs when API server processes started by
        # vLLM exit.
        self._finalizer = multiprocessing.util.Finalize(
            self, _release, (self._lock, own, limits), exitpriority=10
        )

    def close(self) -> None:
        """Release the directory. Idempotent.

        If the directory was created for this server, the last process to close it removes it.
        """
        self._finalizer()

    # -- records -----------------------------------------------------------------------------------

    def new_id(self, kind: Literal["video", "file"] = "video") -> str:
        return f"{kind}_{self._id_prefix}{secrets.token_urlsafe(16)}"

    def path(self, media_id: str, suffix: str) -> Path:
        assert _ID.match(media_id) and suffix in _SUFFIXES
        return self.root / f"{media_id}.{suffix}"

    def write(self, record: JobRecord) -> None:
        """Write a record.

        Raises:
            OSError: The record could not be written. The record on disk is unchanged.
        """
        self._put(record.id, "json", msgspec.json.encode(record))
        self._unwritten.pop(record.id, None)

    def write_when_possible(self, record: JobRecord) -> None:
        """Write a record. If writing fails, the record is held in memory, and the write is retried
        at the next read.
        """
        try:
            self.write(record)
        except OSError as error:
            if record.id not in self._unwritten:
                logger.warning("the record of %s stays in memory: %s", record.id, error.strerror)
            self._unwritten[record.id] = record

    def _put(self, media_id: str, suffix: str, data: bytes) -> None:
        """Replace a file atomically.

        Raises:
            OSError: The file could not be replaced and is unchanged.
        """
        part = self.root / f"{media_id}.{self.owner}.part"
        try:
            part.write_bytes(data)
            part.replace(self.path(media_id, suffix))
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _remove_parts(self) -> None:
        """Remove incomplete files and lock files that killed servers have left behind."""
        for part in self.root.glob("*.part"):
            owner = part.name.split(".")[-2]
            if owner != self.owner and not is_locked(self.root / f"{owner}.owner"):
                _remove(part)
        for path in self.root.glob("*.owner"):
            if not is_locked(path):
                _remove(path)

    def read_record(self, media_id: str, principal: str = ANONYMOUS) -> JobRecord | None:
        """Return a job's record, or None if the client has no job with this id or the job is being
        deleted.
        """
        record = self._load(media_id)
        is_hidden = (
            record is None
            or record.principal != principal
            or self.stop_requested(media_id) == "delete"
        )
        return None if is_hidden else record

    def _load(self, media_id: str) -> JobRecord | None:
        if not _ID.match(media_id):
            return None
        if media_id in self._unwritten:
            self.write_when_possible(self._unwritten[media_id])
        if media_id in self._unwritten:
            return self._unwritten[media_id]
        try:
            record = msgspec.json.decode(self.path(media_id, "json").read_bytes(), type=JobRecord)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError):
            return None
        if not record.is_terminal and not self._is_alive(record.owner):
            record.status, record.completed_s = "failed", time.time()
            record.expires_s = record.completed_s + self._limits.media_ttl_s
            record.error = {
                "code": "server_stopped",
                "message": "the server process that ran this job has stopped",
            }
            self.write_when_possible(record)
        return record

    def records(self, principal: str = ANONYMOUS) -> list[JobRecord]:
        """Return all of a client's records, oldest first."""
        paths = self.root.glob("video_*.json")
        found = [
            record
            for path in paths
            if (record := self.read_record(path.stem, principal)) is not None
        ]
        return sorted(found, key=lambda record: (record.created_s, record.id))

    def delete(self, media_id: str) -> None:
        """Remove a record and its files. Idempotent."""
        self._unwritten.pop(media_id, None)
        for suffix in _SUFFIXES:
            self.path(media_id, suffix).unlink(missing_ok=True)

    def _delete_if_possible(self, media_id: str) -> None:
        try:
            self.delete(media_id)
        except OSError as error:
            logger.warning("%s of %s cannot be removed: %s", media_id, self.root, error.strerror)

    def _is_alive(self, owner: str) -> bool:
        """Return whether the process that created a job is alive."""
        return owner == self.owner or is_locked(self.root / f"{owner}.owner")

    # -- ending a job of another process -----------------------------------------------------------

    def request_stop(self, media_id: str, ending: Ending) -> None:
        """Write a file that asks the process that owns an unfinished job to end the job."""
        self.path(media_id, "ending").write_text(ending)

    def stop_requested(self, media_id: str) -> Ending | None:
        try:
            text = self.path(media_id, "ending").read_text()
        except OSError:
            return None
        return "delete" if text == "delete" else "cancel"

    # -- files -------------------------------------------------------------------------------------

    def add_file(self, data: bytes, suffix: str, principal: str = ANONYMOUS) -> str:
        """Store a client's file until it expires.

        Returns:
            A new id that cannot be guessed.
        """
        self.prune()
        media_id = self.new_id("file")
        self._put(_stored_id(media_id, principal), suffix, data)
        return media_id

    def find_file(self, media_id: str, principal: str = ANONYMOUS) -> Path | None:
        """Return the path of a stored file, or None if the client has no file with this id or the
        file has expired.
        """
        if not _ID.match(media_id) or not media_id.startswith("file_"):
            return None
        for suffix in ("png", "jpeg", "webp"):
            path = self.path(_stored_id(media_id, principal), suffix)
            with contextlib.suppress(OSError):
                if path.stat().st_mtime + self._limits.media_ttl_s > time.time():
                    return path
        return None

    def nbytes(self) -> int:
        return sum(size for size, _ in self._media_files())

    def _media_files(self) -> Iterator[tuple[int, Path]]:
        for path in self.root.iterdir():
            with contextlib.suppress(OSError):
                if path.suffix not in (".json", ".owner", ".ending"):
                    yield path.stat().st_size, path

    def prune(self) -> None:
        """Remove expired jobs and files, finished jobs whose deletion was requested, and then the
        oldest finished jobs and files until the limits are met.
        """
        now = time.time()
        retained = []
        for path in self.root.glob("video_*.json"):
            record = self._load(path.stem)
            if record is None or not record.is_terminal:
                continue
            expired = record.expires_s is not None and record.expires_s <= now
            if expired or self.stop_requested(record.id) == "delete":
                self._delete_if_possible(record.id)
            else:
                retained.append((record.created_s, record.id, record.file_bytes))
        for path in self.root.glob("file_*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if status.st_mtime + self._limits.media_ttl_s <= now:
                    path.unlink()
                else:
                    retained.append((status.st_mtime, path.stem, status.st_size))
        retained.sort()
        excess_bytes = sum(size for _, _, size in retained) - self._limits.max_media_bytes
        excess_jobs = (
            sum(media_id.startswith("video_") for _, media_id, _ in retained)
            - self._limits.max_videos
        )
        for _, media_id, size in retained:
            is_job = media_id.startswith("video_")
            if excess_bytes > 0 or (is_job and excess_jobs > 0):
                self._delete_if_possible(media_id)
                excess_bytes -= size
                excess_jobs -= is_job


def _stored_id(media_id: str, principal: str) -> str:
    """Return the name of a client's file on disk.

    The name is derived from the id and the client, so other clients cannot find the file.
    """
    digest = hashlib.blake2b(f"{principal}/{media_id}".encode(), digest_size=16).digest()
    return f"file_{base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def _remove(path: Path) -> None:
    """Remove a file. A failure is logged rather than raised."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", path, error.strerror)


def _open_directory(configured: str) -> Path:
    """Return the configured directory, or create a private one for this server.

    All API server processes of one `vllm serve` use the same private directory, because the
    directory's name contains the process id of their common parent.
    """
    if configured:
        root = Path(configured)
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        return root
    _remove_leftovers(Path(tempfile.gettempdir()))
    parent = multiprocessing.parent_process()
    if parent is None:
        return Path(tempfile.mkdtemp(prefix=_PREFIX))
    root = Path(tempfile.gettempdir()) / f"{_PREFIX}{os.getuid()}-{parent.pid}"
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    if not _is_private(root):
        raise PermissionError(
            f"{root} exists and is not a private directory of this user; set VLLM_OMNI_MEDIA_DIR"
        )
    return root


def _is_private(root: Path) -> bool:
    status = root.lstat()
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
    )


def _remove_leftovers(parent: Path) -> None:
    """Remove private directories that killed servers have left behind. No process holds a lock in
    such a directory.
    """
    for root in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            # The owner of a new directory may be about to lock it.
            is_new = time.time() - root.lstat().st_mtime < _LEFTOVER_AGE_S
            if (
                _is_private(root)
                and not is_new
                and not any(is_locked(path) for path in root.glob("*.owner"))
            ):
                shutil.rmtree(root, ignore_errors=True)


def _release(lock: IO[Any], own: Path, limits: MediaLimits) -> None:
    root = own.parent
    lock.close()
    own.unlink(missing_ok=True)
    if not limits.media_dir and not any(root.glob("*.owner")):
        shutil.rmtree(root, ignore_errors=True)
