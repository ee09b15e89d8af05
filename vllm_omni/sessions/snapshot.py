# SPDX-License-Identifier: Apache-2.0
"""The file that holds one session: its byte layout, and the checks that a file must pass.

A snapshot is one safetensors file. Its metadata carries a versioned JSON header (`SnapshotHeader`); its tensors are
those that every rank's session names, as `rank0.kv.frame3`. It is written in place: the front end creates the file,
then each rank copies its tensors from its device straight to where they belong, so that a snapshot costs one copy of
its bytes; so does restoring it. (The safetensors library writes only contiguous tensors in host memory and reads
only into memory of its own; hence our own reader here and our own writer in `snapshot_writing.py`. A file is checked by
the library's rules, and nothing is unpickled.)

The file must be visible to the front end and to all ranks: one host, or a shared directory. Knows no model and no
sockets. Held by tests/worker/test_snapshot_refusals.py, test_snapshot_table.py,
test_snapshot_forgeries.py and test_snapshots.py.
"""

import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from vllm_omni.inputs import UsedLora, UsedLoras
from vllm_omni.outputs import RequestFailed
from vllm_omni.saved_tensors import CHANNELS_LAST, DTYPE_BYTES, DTYPE_NAMES, ChunkIndex, SavedTensors, StoredTensor

FORMAT_VERSION: Final = 1
KIND: Final = "vllm_omni.session"
KEY: Final = "omni_session"
METADATA: Final = "__metadata__"
LENGTH_BYTES: Final = 8
"""Of the table's length, little-endian, with which a file begins."""
MAX_TABLE_BYTES: Final = 1 << 20
"""Of the JSON before the tensors: read by the door and by every worker between two steps, some 10 ms at most."""
MAX_OBJECTS: Final = 4096
"""In that JSON, each tensor being one; a session has some 65 tensors a rank."""
UNSEEN: Final = "a worker does not see the snapshot's file: all ranks need the directory it is in"


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine is split; every rank's part fits only the same rank of the same split.

    decode: tensor-parallel ranks decode together, each with a cache of its own rows (`omni.vae_parallel`).
    """

    tensor: int
    pipeline: int
    sequence: bool = False
    decode: bool = False

    def __str__(self) -> str:
        ulysses = " (as sequence parallel)" if self.sequence else ""
        bands = ", VAE decode in parallel" if self.decode else ""
        return f"tensor parallel {self.tensor}{ulysses} x pipeline parallel {self.pipeline}{bands}"


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The model a session fits. config: digest of the checkpoint's configuration, the model's options and the dtype."""

    family: str
    config: str
    parallel: Parallel


class RankPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One rank's share. weights: digest of samples of its parameters. channels_last: tensors in that layout."""

    weights: str
    scalars: dict[str, Any]
    channels_last: list[str] = []


class SnapshotHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The metadata of a snapshot.

    chunk_index: the session's next chunk. opening: fields of the first chunk's `DiffusionParams` that fix the session's
    sizes. owner: whose session it is, as the door that wrote it knows; None = written without a door. lora: the
    adapters of the last chunk, which the next one uses unless it names others.
    """

    format_version: int
    package_version: str
    model: ModelIdentity
    chunk_index: ChunkIndex
    opening: dict[str, Any]
    ranks: list[RankPart]
    owner: dict[str, str] | None = None
    lora: UsedLoras = []


class RankDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Result of `describe_session`: the rank's part without its bytes. tensors: name -> (dtype, shape)."""

    model: ModelIdentity
    chunk_index: int
    opening: dict[str, Any]
    part: RankPart
    tensors: dict[str, tuple[str, list[int]]]
    lora: list[UsedLora] = []


class StagedRank(msgspec.Struct, frozen=True):
    """Result of `stage_checkpoint`. held_s: seconds for which the copy held up the engine."""

    described: RankDescription
    held_s: float


def describe(
    model: ModelIdentity,
    weights: str,
    chunk_index: int,
    opening: Mapping[str, Any],
    scalars: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    lora: Sequence[UsedLora] = (),
) -> RankDescription:
    """Describe one rank's part of a session. Raises TypeError for a tensor that safetensors has no name for."""
    unknown = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in DTYPE_NAMES]
    if unknown:
        raise TypeError(f"a snapshot cannot hold {', '.join(unknown[:3])}")
    return RankDescription(
        model=model,
        chunk_index=chunk_index,
        opening=dict(opening),
        part=RankPart(
            weights=weights,
            scalars=dict(scalars),
            channels_last=[
                name for name, tensor in tensors.items() if not tensor.is_contiguous() and _is_channels_last(tensor)
            ],
        ),
        tensors={name: (DTYPE_NAMES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()},
        lora=list(lora),
    )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    memory_format = CHANNELS_LAST.get(tensor.dim())
    return memory_format is not None and bool(tensor.is_contiguous(memory_format=memory_format))


# -- reading ---------------------------------------------------------------------------------------


class _Metadata(msgspec.Struct, frozen=True):
    metadata: dict[str, str] = msgspec.field(name=METADATA, default_factory=dict)


_METADATA_OF: Final = msgspec.json.Decoder(_Metadata)
_TABLE: Final = msgspec.json.Decoder(dict[str, StoredTensor])
_PLACE: Final = operator.attrgetter("data_offsets")


def check_length(length: int) -> None:
    """Refuse a table by its length, the first 8 bytes of a file. Raises `RequestFailed`."""
    if length > MAX_TABLE_BYTES:
        raise RequestFailed("invalid_snapshot", f"the snapshot's header has {length} bytes, at most {MAX_TABLE_BYTES}")


def _check_objects(count: int) -> None:
    """count: opening braces in JSON that is yet to be decoded; those in texts are counted, too. Raises `RequestFailed`.

    A mebibyte of empty objects would hold up the process for 300 ms.
    """
    if count > MAX_OBJECTS:
        raise RequestFailed("invalid_snapshot", f"the snapshot's header has {count} objects, at most {MAX_OBJECTS}")


def read_header(path: Path, max_bytes: int | None = None) -> SnapshotHeader:
    """Check that a file begins as a snapshot of this format; each worker checks its tensors before it takes any.

    Raises `RequestFailed` `invalid_snapshot` (no snapshot, damaged, truncated), `snapshot_version` or
    `snapshot_too_large`.
    """
    if max_bytes is not None and (size := path.stat().st_size) > max_bytes:
        raise RequestFailed(
            "snapshot_too_large", f"the snapshot has {size} bytes; sessions here may hold {max_bytes} bytes"
        )
    with OpenSnapshot.open(path) as snapshot:
        return snapshot.header


def _checked_header(metadata: Mapping[str, str]) -> SnapshotHeader:
    if metadata.get("kind") != KIND or KEY not in metadata:
        raise RequestFailed("invalid_snapshot", "this is no snapshot of a session")
    _check_objects(metadata[KEY].count("{"))
    try:
        raw = msgspec.json.decode(metadata[KEY], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestFailed("invalid_snapshot", "the snapshot's header is not JSON") from error
    if raw.get("format_version") != FORMAT_VERSION:
        raise RequestFailed(
            "snapshot_version",
            f"the snapshot has format version {raw.get('format_version')!r} (written by vllm_omni "
            f"{str(raw.get('package_version'))[:40]!r}); this server reads version {FORMAT_VERSION}",
        )
    try:
        return msgspec.convert(raw, SnapshotHeader)
    except msgspec.ValidationError as error:
        raise RequestFailed("invalid_snapshot", f"the snapshot's header: {error}") from error


def check_fits(header: SnapshotHeader, model: ModelIdentity, rank: int, weights: str) -> RankPart:
    """Return this rank's part of a snapshot. Raises `RequestFailed("foreign_snapshot")` naming the difference."""
    for what, theirs, ours in (
        ("the model", header.model.family, model.family),
        ("the split over ranks", str(header.model.parallel), str(model.parallel)),
    ):
        if theirs != ours:
            raise RequestFailed("foreign_snapshot", f"{what} differs: the snapshot's is {theirs}, this server's {ours}")
    if header.model.config != model.config:
        raise RequestFailed(
            "foreign_snapshot", "the model's configuration, its options (omni.model) or its dtype differ"
        )
    if not 0 <= rank < len(header.ranks):
        raise RequestFailed("invalid_snapshot", f"the snapshot has no part for rank {rank}")
    part = header.ranks[rank]
    if part.weights != weights:
        raise RequestFailed("foreign_snapshot", "the weights differ from those the session was made with")
    return part


class OpenSnapshot:
    """A snapshot's open file. header: as `read_header` returns it. text: the file's table, as JSON."""

    def __init__(self, file: int, text: bytes, header: SnapshotHeader) -> None:
        self._file, self._text = file, text
        self.header = header

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> "Iterator[OpenSnapshot]":
        """Raises OSError if there is no such file, and `RequestFailed` as `read_header` does, also while it is open."""
        with path.open("rb", buffering=0) as file:
            try:
                descriptor = file.fileno()
                size = os.fstat(descriptor).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= size - 8:
                    raise EOFError("the header ends behind the file")
                check_length(length)
                text = os.pread(descriptor, length, 8)
                _check_objects(text.count(b"{"))
                yield cls(descriptor, text, _checked_header(_METADATA_OF.decode(text).metadata))
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OSError, EOFError) as error:
                raise RequestFailed("invalid_snapshot", "the snapshot is damaged or truncated") from error

    def rank(self, rank: int, part: RankPart) -> SavedTensors:
        """The tensors of one rank; the whole file's table is checked. Raises `RequestFailed` and EOFError."""
        start, table = 8 + len(self._text), self._table()
        prefix = f"rank{rank}."
        left = {name.removeprefix(prefix): stored for name, stored in table.items() if name.startswith(prefix)}
        return SavedTensors(self._file, start, left, frozenset(part.channels_last))

    def check_table(self) -> None:
        """Raises `RequestFailed` and EOFError, as `rank` does."""
        self._table()

    def _table(self) -> dict[str, StoredTensor]:
        table = _TABLE.decode(self._text)
        table.pop(METADATA, None)
        _check_places(table, os.fstat(self._file).st_size - 8 - len(self._text))
        return table


def check_table(path: Path) -> None:
    """Check the tensor offsets in a file's table, as every worker will. Raises `RequestFailed`."""
    with OpenSnapshot.open(path) as snapshot:
        snapshot.check_table()


def _check_places(table: Mapping[str, StoredTensor], nbytes: int) -> None:
    """Tensors lie one behind the other without gaps, each as long as its shape says, and fill the file exactly.

    Raises EOFError. The safetensors library makes the same checks; tests/worker/test_snapshot_table.py compares.
    """
    position = 0
    for stored in sorted(table.values(), key=_PLACE):
        size = DTYPE_BYTES.get(stored.dtype)
        end = position if size is None else position + size * math.prod(stored.shape)
        if size is None or stored.data_offsets != (position, end):
            raise EOFError("a tensor's place does not fit its shape or its neighbours")
        position = end
    if position != nbytes:
        raise EOFError("the tensors do not fill the file")
