# SPDX-License-Identifier: Apache-2.0
"""The file that holds one session: its byte layout, and the checks that a file must pass.

A snapshot is one safetensors file. Its metadata carries a versioned JSON header (`SnapshotHeader`); its tensors are
those that every rank's session names, as `rank0.kv.frame3`. It is written in place: the front end creates the file,
then each rank copies its tensors from its device straight to where they belong, so that a snapshot costs one copy of
its bytes. (The safetensors library can write only what lies contiguous in host memory, hence our own writer; reading is
the library's, which checks every offset against the file's size before a tensor is seen. Nothing is unpickled.)

The file must be visible to the front end and to all ranks: one host, or a shared directory. Knows no model and no
sockets. Held by tests/worker/test_snapshot_refusals.py and test_snapshots.py.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from vllm_omni.outputs import RequestFailed

FORMAT_VERSION: Final = 1
_KIND: Final = "vllm_omni.session"
_KEY: Final = "omni_session"
_ALIGN: Final = 64
_MAX_VECTORS: Final = 1024  # the kernel's limit of one pwritev
_STAGING_BYTES: Final = 64 << 20
_DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SIZES: Final = {name: dtype.itemsize for dtype, name in _DTYPES.items()}
_CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}

ChunkIndex = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]

S = TypeVar("S", bound=msgspec.Struct)


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the engine is split; every rank's part fits only the same rank of the same split."""

    tensor: int
    pipeline: int
    sequence: bool = False

    def __str__(self) -> str:
        ulysses = " (as sequence parallel)" if self.sequence else ""
        return f"tensor parallel {self.tensor}{ulysses} x pipeline parallel {self.pipeline}"


class ModelIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a session fits. config: digest of the checkpoint's configuration, the model's options and the dtype."""

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
    sizes. owner: whose session it is, as the door that wrote it knows; None = written without a door.
    """

    format_version: int
    package_version: str
    model: ModelIdentity
    chunk_index: ChunkIndex
    opening: dict[str, Any]
    ranks: list[RankPart]
    owner: dict[str, str] | None = None


class RankDescription(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What `describe_session` answers: the rank's part without its bytes. tensors: name -> (dtype, shape)."""

    model: ModelIdentity
    chunk_index: int
    opening: dict[str, Any]
    part: RankPart
    tensors: dict[str, tuple[str, list[int]]]


def describe(
    model: ModelIdentity,
    weights: str,
    chunk_index: int,
    opening: Mapping[str, Any],
    scalars: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> RankDescription:
    """Describe one rank's part of a session. Raises TypeError for a tensor that safetensors has no name for."""
    unknown = [f"{name} ({tensor.dtype})" for name, tensor in tensors.items() if tensor.dtype not in _DTYPES]
    if unknown:
        raise TypeError(f"a snapshot cannot hold {', '.join(unknown[:3])}")
    return RankDescription(
        model=model,
        chunk_index=chunk_index,
        opening=dict(opening),
        part=RankPart(
            weights=weights,
            scalars=dict(scalars),
            channels_last=[name for name, tensor in tensors.items() if _is_channels_last(tensor)],
        ),
        tensors={name: (_DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in tensors.items()},
    )


def _is_channels_last(tensor: torch.Tensor) -> bool:
    memory_format = _CHANNELS_LAST.get(tensor.dim())
    return (
        memory_format is not None
        and not tensor.is_contiguous()
        and bool(tensor.is_contiguous(memory_format=memory_format))
    )


# -- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotPlan:
    """Where everything goes. offsets: of each rank's tensors, from the start of the file, in the order described."""

    header: SnapshotHeader
    head: bytes
    nbytes: int
    offsets: tuple[dict[str, int], ...]


def plan(described: Sequence[RankDescription], package_version: str, owner: Mapping[str, str] | None) -> SnapshotPlan:
    """Lay the file out. Raises `RequestFailed("session_busy")` if the ranks are not at the same chunk."""
    first = described[0]
    if any(rank.chunk_index != first.chunk_index for rank in described):
        raise RequestFailed("session_busy", "a chunk of this session is being finished; ask again")
    header = SnapshotHeader(
        format_version=FORMAT_VERSION,
        package_version=package_version,
        model=first.model,
        chunk_index=first.chunk_index,
        opening=first.opening,
        ranks=[rank.part for rank in described],
        owner=None if owner is None else dict(owner),
    )
    entries: dict[str, Any] = {
        "__metadata__": {"format": "pt", "kind": _KIND, _KEY: msgspec.json.encode(header).decode()}
    }
    position = 0
    relative: list[dict[str, int]] = []
    for number, rank in enumerate(described):
        starts = {}
        for name, (dtype, shape) in rank.tensors.items():
            end = position + _SIZES[dtype] * torch.Size(shape).numel()
            entries[f"rank{number}.{name}"] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
            starts[name] = position
            position = end
        relative.append(starts)
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)  # spaces behind the JSON, as safetensors pads it
    start = 8 + len(text)
    return SnapshotPlan(
        header=header,
        head=len(text).to_bytes(8, "little") + text,
        nbytes=start + position,
        offsets=tuple({name: start + offset for name, offset in starts.items()} for starts in relative),
    )


def create_file(path: Path, planned: SnapshotPlan) -> None:
    """Make the file at its full size with its header. It must not exist; only its owner may read it.

    Its blocks are allocated now, so that a full disk is an error before anybody has copied anything. Raises
    `RequestFailed("snapshot_storage")`.
    """
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, planned.nbytes)
            file.write(planned.head)
        except OSError as error:
            path.unlink()
            raise RequestFailed(
                "snapshot_storage", f"there is no room for a snapshot of {planned.nbytes} bytes ({error.strerror})"
            ) from error


def write_tensors(path: Path, nbytes: int, offsets: Mapping[str, int], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors from their device to their places in an existing file of `nbytes`. Raises `RequestFailed`.

    Host tensors go from where they are to the file in one copy, strided ones piece by piece; device tensors through a
    small page-locked buffer.
    """
    try:
        file = path.open("r+b", buffering=0)
    except OSError:
        file = None
    if file is None or os.fstat(file.fileno()).st_size != nbytes:
        raise RequestFailed(
            "snapshot_storage", "a worker does not see the snapshot's file: all ranks need the directory it is in"
        )
    with file:
        descriptor = file.fileno()
        waiting: list[torch.Tensor] = []  # host bytes that go to `start`, one behind the other
        start = end = 0
        staging: torch.Tensor | None = None
        for name, tensor in tensors.items():
            if waiting and (tensor.is_cuda or offsets[name] != end or len(waiting) >= _MAX_VECTORS):
                _write(descriptor, waiting, start)
                waiting = []
            if not waiting:
                start = offsets[name]
            end = offsets[name] + tensor.nbytes
            pieces = _pieces(tensor)
            if not tensor.is_cuda:
                waiting += pieces
                continue
            if staging is None:
                staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
            position = offsets[name]
            for part in (part for piece in pieces for part in piece.split(_STAGING_BYTES)):
                position = _write(descriptor, [staging[: part.numel()].copy_(part)], position)
        _write(descriptor, waiting, start)


def _pieces(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The bytes of a tensor as flat uint8 tensors without a copy, if what is contiguous in it is large enough."""
    if tensor.numel() == 0:
        return []
    if not tensor.is_contiguous() and tensor.dim() > 2 and tensor[0, 0].is_contiguous():
        return [row.flatten().view(torch.uint8) for row in tensor.flatten(0, 1)]
    return [tensor.contiguous().flatten().view(torch.uint8)]


def _write(descriptor: int, pieces: Sequence[torch.Tensor], position: int) -> int:
    """Write host bytes at `position`; returns the position after them."""
    left = [piece.numpy().data for piece in pieces]
    while left:
        written = os.pwritev(descriptor, left[:_MAX_VECTORS], position)
        position += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left:
            left[0] = left[0][written:]
    return position


# -- reading ---------------------------------------------------------------------------------------------------------


def read_header(path: Path, max_bytes: int | None = None) -> SnapshotHeader:
    """Check that a file is a whole snapshot of this format; look at no tensor.

    Raises `RequestFailed` `invalid_snapshot` (no snapshot, damaged, truncated), `snapshot_version` or
    `snapshot_too_large`.
    """
    size = path.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise RequestFailed(
            "snapshot_too_large", f"the snapshot has {size} bytes; sessions here may hold {max_bytes} bytes"
        )
    try:
        with safe_open(path, framework="pt") as file:  # checks lengths, offsets and dtypes
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise RequestFailed("invalid_snapshot", f"the snapshot is damaged or truncated ({_reason(error)})") from error
    if metadata.get("kind") != _KIND or _KEY not in metadata:
        raise RequestFailed("invalid_snapshot", "this is no snapshot of a session")
    try:
        raw = msgspec.json.decode(metadata[_KEY], type=dict[str, Any])
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
    """Return this rank's part of a snapshot. Raises `RequestFailed("foreign_snapshot")` naming what differs."""
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


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy in pieces that are contiguous on both sides, if they are large: a device then needs no second copy."""
    if target.is_cuda and not target.is_contiguous() and target.dim() > 2 and target[0, 0].is_contiguous():
        for row, values in zip(target.flatten(0, 1), source.flatten(0, 1), strict=True):
            row.copy_(values)
    else:
        target.copy_(source)


class SavedTensors:
    """One rank's tensors of an open snapshot, to be taken one by one; what is left over is an error.

    Made by `open_rank`. Tensors are copied out of the mapped file, so nothing refers to it afterwards.
    """

    def __init__(self, file: Any, prefix: str, left: set[str], channels_last: Sequence[str]) -> None:
        self._file, self._prefix, self._left = file, prefix, left
        self._channels_last = frozenset(channels_last)

    @classmethod
    @contextmanager
    def open_rank(cls, path: Path, rank: int, part: RankPart) -> "Iterator[SavedTensors]":
        """Open a snapshot for one rank. Raises `RequestFailed("invalid_snapshot")`."""
        prefix = f"rank{rank}."
        try:
            with safe_open(path, framework="pt") as file:
                left = {name for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
                yield cls(file, prefix, left, [prefix + name for name in part.channels_last])
        except SafetensorError as error:
            raise RequestFailed("invalid_snapshot", f"the snapshot is damaged ({_reason(error)})") from error

    def under(self, prefix: str) -> "SavedTensors":
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        part = SavedTensors(self._file, self._prefix + prefix, self._left, ())
        part._channels_last = self._channels_last
        return part

    def names(self, prefix: str = "") -> list[str]:
        """Names not yet taken that begin with `prefix`, sorted."""
        whole, length = self._prefix + prefix, len(self._prefix)
        return sorted(name[length:] for name in self._left if name.startswith(whole))

    def fill(self, places: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensor of each name into its place. Raises `RequestFailed("invalid_snapshot")`."""
        for name, place in places.items():
            _copy(place, self._take(name, list(place.shape), place.dtype))

    def take(
        self, name: str, device: torch.device | str, dtype: torch.dtype, shape: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a copy on `device`, in the memory layout it was saved in. shape: if set, the only one accepted."""
        saved = self._take(name, shape, dtype)
        copy = torch.empty(saved.shape, dtype=dtype, device=device)
        memory_format = _CHANNELS_LAST.get(saved.dim())
        if self._prefix + name in self._channels_last and memory_format is not None:
            copy = copy.contiguous(memory_format=memory_format)
        return copy.copy_(saved)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype a tensor was saved in. Raises `RequestFailed("invalid_snapshot")` if it is not there."""
        self._require(name)
        stored = self._file.get_slice(self._prefix + name).get_dtype()
        known = next((dtype for dtype, code in _DTYPES.items() if code == stored), None)
        if known is None:
            raise RequestFailed("invalid_snapshot", f"the snapshot's tensor {name} has an unknown dtype")
        return known

    def finish(self) -> None:
        """Raise `RequestFailed("invalid_snapshot")` if some tensor belongs to nothing."""
        if self._left:
            raise RequestFailed("invalid_snapshot", f"the snapshot holds unknown tensors {self.names()[:3]}")

    def _require(self, name: str) -> None:
        if self._prefix + name not in self._left:
            raise RequestFailed("invalid_snapshot", f"the snapshot lacks the tensor {name}")

    def _take(self, name: str, shape: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
        self._require(name)
        saved: torch.Tensor = self._file.get_tensor(self._prefix + name)
        if saved.dtype != dtype or (shape is not None and list(saved.shape) != list(shape)):
            raise RequestFailed(
                "invalid_snapshot",
                f"the snapshot's tensor {name} is {saved.dtype} {list(saved.shape)}, expected {dtype} "
                f"{'of any shape' if shape is None else list(shape)}",
            )
        self._left.remove(self._prefix + name)
        return saved


def read_scalars(scalars: Mapping[str, Any], kind: type[S]) -> S:
    """Convert a rank's scalars strictly. Raises `RequestFailed("invalid_snapshot")` naming the field."""
    try:
        return msgspec.convert(dict(scalars), kind)
    except msgspec.ValidationError as error:
        raise RequestFailed("invalid_snapshot", f"the snapshot's scalars: {error}") from error


def _reason(error: SafetensorError) -> str:
    """The library's own word for what is wrong, without its free text (which may quote the file)."""
    text = str(error).rsplit(": ", 1)[-1]
    return text if text.isalnum() else text.partition("(")[0].strip() or "unreadable"
