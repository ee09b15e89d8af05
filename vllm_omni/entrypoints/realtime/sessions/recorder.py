# SPDX-License-Identifier: Apache-2.0
"""`SessionRecorder`: records every session that starts on this server, for later replay.

The file format is defined in `vllm_omni/session_files/recording.py`. A single thread computes
digests and writes files in order while the engine keeps running. If the thread falls behind, chunks
wait for it. A session restored from a snapshot is not recorded. A branch's recording starts with a
copy of its parent's recording.
"""

import asyncio
import contextlib
import datetime
import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import msgspec
import numpy as np

from vllm_omni.inputs import DiffusionParams, UsedLoras
from vllm_omni.session_files.recording import (
    SUFFIX,
    ChunkOutcome,
    LoraSettings,
    RecordedChunk,
    RecordingHeader,
    digest_of,
    write_chunk,
    write_header,
)
from vllm_omni.session_files.snapshot_exchange import package_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.lora import LoRAConfig

logger = logging.getLogger("vllm." + __name__)

_MOST_PENDING: Final = 8


class SessionRecorder:
    """Records sessions to files that only their owner can read.

    Args:
        folder: Directory for the recordings. If the directory does not exist, it is created.
        header: Configuration of the served model.
    """

    def __init__(self, folder: Path, header: RecordingHeader) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder, self._header = folder, header
        self._paths: dict[str, Path] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="omni-recorder")
        self._pending: set[Future[None]] = set()
        self._ended: set[Path] = set()
        """Paths of recordings that ended early due to a write error. The set is accessed only on
        the writer thread.
        """

    async def finished(
        self,
        params: DiffusionParams,
        arrays: dict[str, np.ndarray],
        meta: dict[str, Any],
        frames_THWC: np.ndarray,
    ) -> None:
        """Record a finished chunk. The call waits only if too many writes are pending."""

        def outcome() -> ChunkOutcome:
            return ChunkOutcome(
                chunk_index=int(meta["chunk_index"]),
                digest=digest_of(frames_THWC),
                num_frames=len(frames_THWC),
                lora=msgspec.convert(meta.get("lora", []), UsedLoras),
            )

        writing = self._submit(params, arrays, outcome)
        if writing is not None and len(self._pending) > _MOST_PENDING:
            await asyncio.wrap_future(writing)

    def cancelled(self, params: DiffusionParams, arrays: dict[str, np.ndarray]) -> None:
        """Record a chunk that was cancelled or whose outcome is unknown."""
        self._submit(params, arrays, lambda: None)

    def forked(self, session_id: str, fork_to: str) -> None:
        """Start a branch's recording."""
        source = self._paths.get(session_id)
        if source is not None:
            target = self._paths[fork_to] = self._new_path(fork_to)
            self._track(self._writer.submit(self._copy, source, target))

    def closed(self, session_id: str) -> None:
        self._paths.pop(session_id, None)

    def flush(self) -> None:
        """Wait until all pending records have been written."""
        self._writer.submit(lambda: None).result()

    def _submit(
        self, params: DiffusionParams, arrays: dict[str, np.ndarray], outcome: Any
    ) -> "Future[None] | None":
        path = self._paths.get(params.session_id)
        if path is None:
            if params.chunk_index != 0:
                return None  # the session did not start on this server
            path = self._paths[params.session_id] = self._new_path(params.session_id)
            self._track(self._writer.submit(self._start, path))
        return self._track(self._writer.submit(self._append, path, params, arrays, outcome))

    def _track(self, writing: "Future[None]") -> "Future[None]":
        self._pending.add(writing)
        writing.add_done_callback(self._done)
        return writing

    def _done(self, writing: "Future[None]") -> None:
        self._pending.discard(writing)
        if (error := writing.exception()) is not None:
            logger.warning("a recording is incomplete, because it could not be written: %s", error)

    def _new_path(self, session_id: str) -> Path:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        return self._folder / f"{now}_{session_id.replace(':', '_')}{SUFFIX}"

    # -- on the writer's thread --------------------------------------------------------------------

    def _start(self, path: Path) -> None:
        with self._ending_on_failure(path, 0), _new_file(path) as file:
            write_header(file, self._header)

    def _append(
        self, path: Path, params: DiffusionParams, arrays: dict[str, np.ndarray], outcome: Any
    ) -> None:
        if path in self._ended:
            return
        with self._ending_on_failure(path, path.stat().st_size), path.open("ab") as file:
            write_chunk(file, RecordedChunk(params, arrays, outcome()))

    def _copy(self, source: Path, target: Path) -> None:
        if source in self._ended:
            self._ended.add(target)
            return
        with (
            self._ending_on_failure(target, 0),
            source.open("rb") as old,
            _new_file(target) as file,
        ):
            shutil.copyfileobj(old, file)

    @contextlib.contextmanager
    def _ending_on_failure(self, path: Path, whole_bytes: int) -> Iterator[None]:
        """End a recording if writing to it fails. Only complete records are retained, and an empty
        recording is removed.
        """
        try:
            yield
        except OSError:
            self._ended.add(path)
            if whole_bytes:
                os.truncate(path, whole_bytes)
            else:
                path.unlink(missing_ok=True)
            raise


def _new_file(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb")


def recording_header(vllm_config: "VllmConfig") -> RecordingHeader:
    """Return the served model's configuration, which a replay requires."""
    config, parallel = vllm_config.model_config, vllm_config.parallel_config
    additional = vllm_config.additional_config
    return RecordingHeader(
        package_version=package_version(),
        family=config.hf_config.omni_family,
        model=str(Path(config.model).absolute()),
        additional_config=dict(additional) if isinstance(additional, dict) else {},
        dtype=str(config.dtype).removeprefix("torch."),
        enforce_eager=bool(config.enforce_eager),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        quantization=None
        if getattr(config.hf_config, "quantization_config", None)
        else config.quantization,
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
        lora=_lora_settings(vllm_config.lora_config),
    )


def _lora_settings(config: "LoRAConfig | None") -> LoraSettings | None:
    if config is None:
        return None
    return LoraSettings(
        max_loras=config.max_loras,
        max_lora_rank=config.max_lora_rank,
        max_cpu_loras=config.max_cpu_loras,
        lora_dtype=str(config.lora_dtype).removeprefix("torch."),
    )
