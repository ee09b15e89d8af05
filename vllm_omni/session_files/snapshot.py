# SPDX-License-Identifier: Apache-2.0
"""The file format of session snapshots: byte layout, and validation.

A snapshot is a single safetensors file. The file's metadata contains a versioned JSON header
(`SnapshotHeader`). The file contains the session's tensors from every rank, with names such as
`rank0.kv.frame3`. The front end creates the file, and each rank then copies its tensors directly
from its device to their offsets in the file, so saving or restoring a snapshot copies its bytes
only once.

The safetensors library is not used, because it writes only contiguous tensors in host memory and
reads only into memory that it allocates. This module therefore contains its own reader, and
`snapshot_writing.py` contains the writer. Files are validated according to the rules of the
safetensors library, and nothing is unpickled.

The front end and all ranks must be able to access the file, on one host or in a shared directory.
This module does not depend on a model or on sockets.
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
from vllm_omni.tensors.saved import (
    CHANNELS_LAST,
    DTYPE_BYTES,
    DTYPE_NAMES,
    ChunkIndex,
    SavedTensors,
    StoredTensor,
)

FORMAT_VERSION: Final = 1
KIND: Final = "vllm_omni.session"
KEY: Final = "omni_session"
METADATA: Final = "__metadata__"
LENGTH_BYTES: Final = 8
"""Size in bytes of the little-endian integer at the start of a file. The integer is the length of
the table."""
MAX_TABLE_BYTES: Final = 1 << 20
"""Maximum size of the JSON table in bytes. The limit keeps the parsing time below 10 ms, because
the endpoint and every worker parse the table between two steps.
"""
MAX_OBJECTS: Final = 4096
"""Maximum number of JSON objects in the table. Each tensor is one object; a session has about 65
tensors per rank.
"""
UNSEEN: Final = "a worker cannot access the snapshot's file: all ranks need access to its directory"


class ParallelLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Parallel layout of an engine.

    A rank's part of a snapshot can be restored only on the same rank in the same layout.
    """

    tensor: int
    """Tensor-parallel size."""
    pipeline: int
    """Pipeline-parallel size."""
    sequence: bool = False
    """Whether the tensor-parallel ranks are sequence-parallel (Ulysses)."""
    decode: bool = False
    """Whether tensor-parallel ranks decode together (`omni.vae_parallel`). If so, each rank's
    decoder cache contains one horizontal band of the frame.
    """

    def __str__(self) -> str:
        ulysses = " (as sequence parallel)" if self.sequence else ""
        bands = ", VAE decode in parallel" if self.decode else ""
        return f"tensor parallel {self.tensor}{ulysses} x pipeline parallel {self.pipeline}{bands}"


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Identity of the model that a session belongs to."""

    family: str
    """Name of the model family."""
    config: str
    """Digest of the checkpoint's configuration, the model's options and the dtype."""
    parallel: ParallelLayout
    """Parallel layout of the engine."""


class RankPart(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """One rank's part of a snapshot."""

    weights: str
    """Digest of sampled values of the rank's parameters (`weights_digest`)."""
    scalars: dict[str, Any]
    """Scalars of the session on this rank."""
    channels_last: list[str] = []
    """Names of the tensors in channels-last memory format."""
    digests: dict[str, str] = {}
    """Digest of each tensor (`tensor_digests`). Only the snapshot of a session that is being moved
    contains digests.
    """


class SnapshotHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Header of a snapshot."""

    format_version: int
    """Version of the file format."""
    package_version: str
    """Version of this package that wrote the file."""
    model: ModelIdentity
    """Model to which the session belongs."""
    chunk_index: ChunkIndex
    """Index of the session's next chunk."""
    opening: dict[str, Any]
    """Fields of the first chunk's `DiffusionParams` that determine the session's size."""
    ranks: list[RankPart]
    """The ranks' parts of the snapshot, in rank order."""
    owner: dict[str, str] | None = None
    """Owner of the session, as identified by the endpoint that wrote the file. None if the file was
    not written by an endpoint.
    """
    lora: UsedLoras = []
    """LoRA adapters of the last chunk. The next chunk uses them unless its request specifies
    others.
    """
    is_complete: bool = True
    """Whether all tensors belong to the same state of the session. If false, the tensors were
    written while the session was active, and a later version of the file replaces those that have
    changed in the meantime.
    """


class RankDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Result of the `describe_session` RPC: description of one rank's part of a session, without
    its data.
    """

    model: ModelIdentity
    """Model to which the session belongs."""
    chunk_index: int
    """Index of the session's next chunk."""
    opening: dict[str, Any]
    """Fields of the first chunk's `DiffusionParams`; see `SnapshotHeader.opening`."""
    part: RankPart
    """The rank's part of the snapshot header."""
    tensors: dict[str, tuple[str, list[int]]]
    """Dtype and shape of each tensor, keyed by name."""
    lora: list[UsedLora] = []
    """LoRA adapters of the last chunk."""


class StagedRank(msgspec.Struct, frozen=True):
    """Result of the `stage_snapshot` RPC."""

    described: RankDescription
    """Description of the rank's part of the session."""
    held_s: float
    """Time in seconds by which the copy delayed the engine."""


def describe(
    model: ModelIdentity,
    weights: str,
    chunk_index: int,
    opening: Mapping[str, Any],
    scalars: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    lora: Sequence[UsedLora] = (),
    digests: Mapping[str, str] | None = None,
) -> RankDescription:
    """Describe one rank's part of a session.

    Args:
        model: Model that the session belongs to.
        weights: Digest of the rank's weights.
        chunk_index: Index of the session's next chunk.
        opening: Fields of the first chunk's `DiffusionParams`; see `SnapshotHeader.opening`.
        scalars: Scalars of the session.
        tensors: Tensors of the session, keyed by name.
        lora: LoRA adapters of the last chunk.
        digests: Digests of the tensors, keyed by name; see `RankPart.digests`.

    Raises:
        TypeError: safetensors does not support the dtype of a tensor.
    """
    unknown = [
        f"{name} ({tensor.dtype})"
        for name, tensor in tensors.items()
        if tensor.dtype not in DTYPE_NAMES
    ]
    if unknown:
        raise TypeError(f"a snapshot cannot contain {', '.join(unknown[:3])}")
    return RankDescription(
        model=model,
        chunk_index=chunk_index,
        opening=dict(opening),
        part=RankPart(
            weights=weights,
            scalars=dict(scalars),
            channels_last=[
                name
                for name, tensor in tensors.items()
                if not tensor.is_contiguous() and _is_channels_last(tensor)
            ],
            digests=dict(digests or {}),
        ),
        tensors={
            name: (DTYPE_NAMES[tensor.dtype], list(tensor.shape))
            for name, tensor in tensors.items()
        },
        lora=list(lora),
    )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    memory_format = CHANNELS_LAST.get(tensor.dim())
    return memory_format is not None and bool(tensor.is_contiguous(memory_format=memory_format))


# -- reading ---------------------------------------------------------------------------------------


class _Metadata(msgspec.Struct, frozen=True):
    metadata: dict[str, str] = msgspec.field(name=METADATA, default_factory=dict)
    """Metadata of the safetensors file."""


_METADATA_OF: Final = msgspec.json.Decoder(_Metadata)
_TABLE: Final = msgspec.json.Decoder(dict[str, StoredTensor])
_OFFSETS: Final = operator.attrgetter("data_offsets")


def check_length(length: int) -> None:
    """Check the table length stored in the first 8 bytes of a file.

    Raises:
        RequestFailed: The table is too long (code `invalid_snapshot`).
    """
    if length > MAX_TABLE_BYTES:
        raise RequestFailed(
            "invalid_snapshot",
            f"the snapshot's header has {length} bytes, at most {MAX_TABLE_BYTES}",
        )


def _check_objects(count: int) -> None:
    """Reject a JSON document that contains too many objects, before decoding it.

    The number is limited because decoding a mebibyte of empty objects would block the process for
    300 ms.

    Args:
        count: Number of opening braces in the JSON text, including braces in strings.

    Raises:
        RequestFailed: There are too many objects (code `invalid_snapshot`).
    """
    if count > MAX_OBJECTS:
        raise RequestFailed(
            "invalid_snapshot", f"the snapshot's header has {count} objects, at most {MAX_OBJECTS}"
        )


def read_header(path: Path, max_bytes: int | None = None) -> SnapshotHeader:
    """Read and validate the header of a snapshot. The workers validate the tensors.

    Args:
        path: Path of the snapshot file.
        max_bytes: Maximum size of the file.

    Raises:
        RequestFailed: The file cannot be used. The code is `invalid_snapshot` (not a snapshot,
            damaged or truncated), `snapshot_version` or `snapshot_too_large`.
    """
    if max_bytes is not None and (size := path.stat().st_size) > max_bytes:
        raise RequestFailed(
            "snapshot_too_large",
            f"the snapshot has {size} bytes; sessions here may hold {max_bytes} bytes",
        )
    with OpenSnapshot.open(path) as snapshot:
        return snapshot.header


def _checked_header(metadata: Mapping[str, str]) -> SnapshotHeader:
    if metadata.get("kind") != KIND or KEY not in metadata:
        raise RequestFailed("invalid_snapshot", "this is not a snapshot of a session")
    _check_objects(metadata[KEY].count("{"))
    try:
        raw = msgspec.json.decode(metadata[KEY], type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestFailed("invalid_snapshot", "the snapshot's header is not JSON") from error
    if raw.get("format_version") != FORMAT_VERSION:
        raise RequestFailed(
            "snapshot_version",
            f"the snapshot has format version {raw.get('format_version')!r} (written by vllm_omni "
            f"{str(raw.get('package_version'))[:40]!r}); this server reads version "
            f"{FORMAT_VERSION}",
        )
    try:
        return msgspec.convert(raw, SnapshotHeader)
    except msgspec.ValidationError as error:
        raise RequestFailed("invalid_snapshot", f"the snapshot's header: {error}") from error


def check_fits(header: SnapshotHeader, model: ModelIdentity, rank: int, weights: str) -> RankPart:
    """Check that a snapshot fits this engine, and return this rank's part of the snapshot.

    Args:
        header: Header of the snapshot.
        model: Model of this engine.
        rank: Rank of this process.
        weights: Digest of this rank's weights.

    Raises:
        RequestFailed: The snapshot belongs to another model, layout or checkpoint (code
            `foreign_snapshot`). The message names the difference.
    """
    for label, theirs, ours in (
        ("the model", header.model.family, model.family),
        ("the split over ranks", str(header.model.parallel), str(model.parallel)),
    ):
        if theirs != ours:
            raise RequestFailed(
                "foreign_snapshot",
                f"{label} differs: the snapshot's is {theirs}, this server's {ours}",
            )
    if header.model.config != model.config:
        raise RequestFailed(
            "foreign_snapshot",
            "the model's configuration, its options (omni.model) or its dtype differ",
        )
    if not 0 <= rank < len(header.ranks):
        raise RequestFailed("invalid_snapshot", f"the snapshot has no part for rank {rank}")
    part = header.ranks[rank]
    if part.weights != weights:
        raise RequestFailed(
            "foreign_snapshot",
            "the weights differ from the weights that the session was created with",
        )
    return part


class OpenSnapshot:
    """An open snapshot file.

    Args:
        file: Descriptor of the open file.
        text: Table of the file as JSON.
        header: Header of the snapshot, as returned by `read_header`.
    """

    def __init__(self, file: int, text: bytes, header: SnapshotHeader) -> None:
        self._file, self._text = file, text
        self.header = header

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> "Iterator[OpenSnapshot]":
        """Open and validate a file, as a context manager.

        Read errors in the body of the `with` statement are also converted to `RequestFailed`.

        Raises:
            OSError: The file does not exist.
            RequestFailed: The file cannot be used; see `read_header`.
        """
        with path.open("rb", buffering=0) as file:
            try:
                descriptor = file.fileno()
                size = os.fstat(descriptor).st_size
                length = int.from_bytes(file.read(8), "little")
                if not 0 < length <= size - 8:
                    raise EOFError("the header ends after the file")
                check_length(length)
                text = os.pread(descriptor, length, 8)
                _check_objects(text.count(b"{"))
                yield cls(descriptor, text, _checked_header(_METADATA_OF.decode(text).metadata))
            except (
                msgspec.DecodeError,
                UnicodeDecodeError,
                RecursionError,
                OSError,
                EOFError,
            ) as error:
                raise RequestFailed(
                    "invalid_snapshot", "the snapshot is damaged or truncated"
                ) from error

    def rank(
        self, rank: int, part: RankPart, held: Mapping[str, str] | None = None
    ) -> SavedTensors:
        """Return the tensors of one rank after validating the table of the whole file.

        Args:
            rank: Rank whose tensors are returned.
            part: The rank's part of the header.
            held: Digests of the tensors that the session to be restored already has, keyed by
                tensor name.

        Raises:
            RequestFailed: The table is invalid.
            EOFError: The file is truncated.
        """
        start, table = 8 + len(self._text), self._table()
        prefix = f"rank{rank}."
        left = {
            name.removeprefix(prefix): stored
            for name, stored in table.items()
            if name.startswith(prefix)
        }
        in_place = frozenset((held or {}).items() & part.digests.items())
        return SavedTensors(
            self._file,
            start,
            left,
            frozenset(part.channels_last),
            in_place=frozenset(name for name, _ in in_place),
        )

    def check_table(self) -> None:
        """Validate the table of the file.

        Raises:
            RequestFailed: The table is invalid.
            EOFError: The file is truncated.
        """
        self._table()

    def _table(self) -> dict[str, StoredTensor]:
        table = _TABLE.decode(self._text)
        table.pop(METADATA, None)
        _check_offsets(table, os.fstat(self._file).st_size - 8 - len(self._text))
        return table


def check_table(path: Path) -> None:
    """Validate the table of a file with the checks that every worker also performs.

    Raises:
        RequestFailed: The table is invalid.
    """
    with OpenSnapshot.open(path) as snapshot:
        snapshot.check_table()


def _check_offsets(table: Mapping[str, StoredTensor], nbytes: int) -> None:
    """Check that the length of each tensor matches its shape, and that the tensors fill the file
    exactly, without gaps.

    The safetensors library performs the same checks. tests/worker/test_snapshot_table.py compares
    this function with the library.

    Raises:
        EOFError: One of the checks fails.
    """
    position = 0
    for stored in sorted(table.values(), key=_OFFSETS):
        size = DTYPE_BYTES.get(stored.dtype)
        end = position if size is None else position + size * math.prod(stored.shape)
        if size is None or stored.data_offsets != (position, end):
            raise EOFError("a tensor's offsets do not fit its shape or its neighbours")
        position = end
    if position != nbytes:
        raise EOFError("the tensors do not fill the file")
