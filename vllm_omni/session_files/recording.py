# SPDX-License-Identifier: Apache-2.0
"""Session recordings: the complete request of each chunk, and a digest of its frames.

A file consists of a magic line followed by records. A record consists of a length (8 bytes, little
endian) and an envelope (`outputs.py`). The first record names the model and its options. Every
other record contains the request for a chunk (parameters and arrays) and its outcome: the index and
digest of the chunk, or `None` if the request was cancelled. A cancelled chunk may still have been
committed; the index of the next chunk shows whether it was. If a file ends in the middle of a
record because the server died, the records before it are valid. This module does not depend on the
engine or on sockets.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
import torch

from vllm_omni.inputs import DiffusionParams, UsedLoras
from vllm_omni.outputs import RequestFailed, pack, unpack

MAGIC: Final = b"vllm_omni recording 1\n"
SUFFIX: Final = ".recording"
_MAX_RECORD_BYTES: Final = 1 << 30


class LoraSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """vLLM's LoRA arguments on a server started with `--enable-lora`."""

    max_loras: int
    """Value of `--max-loras`."""
    max_lora_rank: int
    """Value of `--max-lora-rank`."""
    max_cpu_loras: int | None
    """Value of `--max-cpu-loras`."""
    lora_dtype: str
    """Value of `--lora-dtype`, as a torch dtype name."""


class RecordingHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Model and options of the server that wrote a recording."""

    package_version: str
    """Version of this package that wrote the recording."""
    family: str
    """Name of the model family."""
    model: str
    """Checkpoint directory of the model."""
    additional_config: dict[str, Any]
    """Value of vLLM's `--additional-config`, unchanged."""
    dtype: str
    """Dtype of the model."""
    enforce_eager: bool
    """Value of vLLM's `--enforce-eager`."""
    tensor_parallel_size: int
    """Value of vLLM's `--tensor-parallel-size`."""
    pipeline_parallel_size: int
    """Value of vLLM's `--pipeline-parallel-size`."""
    quantization: str | None = None
    """Value of vLLM's `--quantization`."""
    kv_cache_dtype: str = "auto"
    """Value of vLLM's `--kv-cache-dtype`."""
    lora: LoraSettings | None = None
    """vLLM's LoRA arguments; None if the server was started without `--enable-lora`."""


class ChunkOutcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Recorded result of a chunk."""

    chunk_index: int
    """Index of the chunk in its session."""
    digest: str
    """Digest of the chunk's frames, as returned by `digest_of`."""
    num_frames: int
    """Number of frames in the chunk."""
    lora: UsedLoras = []
    """LoRA adapters that the chunk used."""


@dataclass(frozen=True)
class RecordedChunk:
    """One request of a recorded session, and its outcome."""

    params: DiffusionParams
    """Parameters of the request."""
    arrays: dict[str, np.ndarray]
    """Input arrays of the request, keyed by name."""
    outcome: ChunkOutcome | None
    """Result of the chunk; None if the request was cancelled."""


def digest_of(frames_THWC: np.ndarray) -> str:
    """Return a digest of the frames' shape, dtype and bytes."""
    digest = hashlib.blake2b(f"{frames_THWC.dtype} {frames_THWC.shape} ".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(frames_THWC).data)
    return digest.hexdigest()


def write_header(file: BinaryIO, header: RecordingHeader) -> None:
    file.write(MAGIC)
    _write(file, {"header": msgspec.to_builtins(header)}, {})


def write_chunk(file: BinaryIO, chunk: RecordedChunk) -> None:
    outcome = None if chunk.outcome is None else msgspec.to_builtins(chunk.outcome)
    _write(file, {"params": msgspec.to_builtins(chunk.params), "outcome": outcome}, chunk.arrays)


def _write(file: BinaryIO, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
    }
    envelope = pack(meta, tensors).numpy().tobytes()
    file.write(len(envelope).to_bytes(8, "little") + envelope)
    file.flush()


def read_recording(path: Path) -> tuple[RecordingHeader, list[RecordedChunk], bool]:
    """Read a recording.

    Returns:
        The header, the recorded chunks, and whether the file ends with a complete record.

    Raises:
        ValueError: The file is not a recording or is damaged. The message is one line.
    """
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(
                f"{path} is not a recording of this version (it should start with "
                f"{MAGIC.decode().strip()!r})"
            )
        records = _records(file, path)
        try:
            first = next(records, None)
            if first is None or "header" not in first[0]:
                raise ValueError("its header is missing")
            header = msgspec.convert(first[0]["header"], RecordingHeader)
            chunks, whole = [], True
            for meta, arrays in records:
                if meta is None:
                    whole = False
                    break
                outcome = (
                    None
                    if meta["outcome"] is None
                    else msgspec.convert(meta["outcome"], ChunkOutcome)
                )
                chunks.append(
                    RecordedChunk(msgspec.convert(meta["params"], DiffusionParams), arrays, outcome)
                )
        except (ValueError, KeyError, TypeError, RequestFailed, msgspec.ValidationError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return header, chunks, whole


def _records(file: BinaryIO, path: Path) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    """Yield the metadata and arrays of each record. For a truncated record, the metadata is
    None.
    """
    left = path.stat().st_size - file.tell()
    while left:
        size = int.from_bytes(file.read(8), "little")
        left -= 8
        if left < 0 or size > left:
            yield None, {}
            return
        if size > _MAX_RECORD_BYTES:
            raise ValueError(f"a record of {size} bytes")
        envelope = torch.frombuffer(bytearray(file.read(size)), dtype=torch.uint8)
        left -= size
        meta, tensors = unpack(envelope)
        yield meta, {name: tensor.numpy() for name, tensor in tensors.items()}


def committed_chunks(chunks: list[RecordedChunk]) -> Iterator[tuple[int, RecordedChunk]]:
    """Yield the chunk index and request of each committed chunk, in order.

    The chunk of a cancelled request is included if the index of a later chunk shows that it was
    committed.

    Raises:
        ValueError: Chunks are missing from the recording.
    """
    following: int | None = None  # index of the next committed chunk; the loop runs from the end
    retained: list[tuple[int, RecordedChunk]] = []
    for chunk in reversed(chunks):
        if chunk.outcome is not None:
            index = chunk.outcome.chunk_index
            if following is not None and index != following - 1:
                raise ValueError(f"chunk {following - 1} is missing from the recording")
        elif following is not None and following > 0 and not _known(chunks, following - 1):
            index = following - 1
        else:
            # The request was cancelled before its chunk was committed, or no later chunk shows that
            # the chunk was committed.
            continue
        retained.append((index, chunk))
        following = index
    if following not in (None, 0):
        raise ValueError(
            f"the recording starts at chunk {following}, not at the first chunk of the session"
        )
    return reversed(retained)


def _known(chunks: list[RecordedChunk], index: int) -> bool:
    return any(chunk.outcome is not None and chunk.outcome.chunk_index == index for chunk in chunks)
