# SPDX-License-Identifier: Apache-2.0
"""Recordings of sessions: each chunk's complete request, and a digest of its frames.

A file is a magic line, then records: a length (8 bytes, little endian) and an envelope of `outputs.py`. The first
record says which model and options it is of; each further one holds a chunk's request (its parameters, its arrays) and
its outcome: the chunk's number and digest, or `None` for a chunk that was cancelled. That one may have been finished
all the same, which shows in the number of the next one. A file that ends within a record (the server died) is good up
to that point. Knows no engine and no sockets. Held by tests/test_recording.py.
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
    """The flags of vLLM's that bring `--enable-lora`. lora_dtype: as torch names it."""

    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_dtype: str


class RecordingHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """model: the directory that was served. additional_config: vLLM's option as it was. dtype: the model's.

    quantization, kv_cache_dtype: as vLLM's flags. lora: None = without `--enable-lora`.
    """

    package_version: str
    family: str
    model: str
    additional_config: dict[str, Any]
    dtype: str
    enforce_eager: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    lora: LoraSettings | None = None


class Outcome(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """lora: the adapters that the chunk was made with."""

    chunk_index: int
    digest: str
    num_frames: int
    lora: UsedLoras = []


@dataclass(frozen=True)
class RecordedChunk:
    """One request of a session and its outcome; None: it was cancelled."""

    params: DiffusionParams
    arrays: dict[str, np.ndarray]
    outcome: Outcome | None


def digest_of(frames_THWC: np.ndarray) -> str:
    """Names frames by shape, dtype and every byte."""
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
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    envelope = pack(meta, tensors).numpy().tobytes()
    file.write(len(envelope).to_bytes(8, "little") + envelope)
    file.flush()


def read(path: Path) -> tuple[RecordingHeader, list[RecordedChunk], bool]:
    """Return the header, the chunks, and whether the file ends with a whole record. Raises ValueError in one line."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(
                f"{path} is no recording of this version (it should begin with {MAGIC.decode().strip()!r})"
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
                outcome = None if meta["outcome"] is None else msgspec.convert(meta["outcome"], Outcome)
                chunks.append(RecordedChunk(msgspec.convert(meta["params"], DiffusionParams), arrays, outcome))
        except (ValueError, KeyError, TypeError, RequestFailed, msgspec.ValidationError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return header, chunks, whole


def _records(file: BinaryIO, path: Path) -> Iterator[tuple[Any, dict[str, np.ndarray]]]:
    """Yield (meta, arrays) of each record; meta None for one that is cut off at the end."""
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


def committed(chunks: list[RecordedChunk]) -> Iterator[tuple[int, RecordedChunk]]:
    """Yield `(chunk index, request)` of each chunk that became part of the session, in order.

    A cancelled request was finished if a later one got the number after it. Raises ValueError where chunks are missing.
    """
    following: int | None = None  # number of the next chunk known to be finished, from the end
    kept: list[tuple[int, RecordedChunk]] = []
    for chunk in reversed(chunks):
        if chunk.outcome is not None:
            index = chunk.outcome.chunk_index
            if following is not None and index != following - 1:
                raise ValueError(f"chunk {following - 1} is missing from the recording")
        elif following is not None and following > 0 and not _known(chunks, following - 1):
            index = following - 1
        else:
            continue  # cancelled before it was finished, or nothing came after it that would tell
        kept.append((index, chunk))
        following = index
    if following not in (None, 0):
        raise ValueError(f"the recording begins at chunk {following}, not at the session's start")
    return reversed(kept)


def _known(chunks: list[RecordedChunk], index: int) -> bool:
    return any(chunk.outcome is not None and chunk.outcome.chunk_index == index for chunk in chunks)
