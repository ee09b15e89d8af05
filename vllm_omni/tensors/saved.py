# SPDX-License-Identifier: Apache-2.0
"""Saved state of a session on one rank: named tensors, and scalars.

`OpenSnapshot.rank` (`session_files/snapshot.py`) creates a `SavedTensors` from a validated file. A
session's `restore` (`model_executor/interfaces.py`) reads the session's tensors from this object.
This module depends neither on the snapshot's header nor on a model.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.tensors.file_io import TensorAt, read_at

DTYPE_NAMES: Final = {
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
    torch.float8_e4m3fn: "F8_E4M3",
}
"""safetensors names of the dtypes that a session's tensors may have."""
_TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
DTYPE_BYTES: Final = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
"""Element size in bytes, keyed by the safetensors name of the dtype."""
CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Channels-last memory formats, keyed by number of dimensions. A tensor saved in one of these
formats is restored in the same format."""

ChunkIndex = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
"""Index of the next chunk of a saved session."""

S = TypeVar("S", bound=msgspec.Struct)


class StoredTensor(msgspec.Struct, frozen=True):
    """Entry for one tensor in a snapshot's table.

    The defaults exist only because the `__metadata__` entry of the table has none of these fields
    and is decoded as the same type. `OpenSnapshot` rejects tensors whose entries have the default
    values.
    """

    dtype: str = ""
    """safetensors name of the tensor's dtype."""
    shape: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    """Shape of the tensor."""
    data_offsets: tuple[int, int] = (-1, -1)
    """Start and end of the tensor's data, in bytes from the end of the table."""


class SavedTensors:
    """Tensors of one rank in an open snapshot, created by `OpenSnapshot.rank`.

    The caller requests the tensors one by one with `fill` and `take_tensor`. A tensor is validated
    when it is requested. `read_tensors` and `finish` read the data of all requested tensors
    together; until then, new tensors are uninitialised. `fill` does not read tensors that are
    `in_place`, because the session already has their data. A tensor that is neither requested nor
    skipped is an error. After `finish`, the object no longer needs the file.
    """

    def __init__(
        self,
        file: int,
        start: int,
        left: dict[str, StoredTensor],
        channels_last: frozenset[str],
        prefix: str = "",
        pending: list[TensorAt] | None = None,
        in_place: frozenset[str] = frozenset(),
    ) -> None:
        self._file, self._start, self._left = file, start, left
        self._channels_last, self._prefix = channels_last, prefix
        self._in_place = in_place
        self._pending: list[TensorAt] = [] if pending is None else pending

    def under(self, prefix: str) -> "SavedTensors":
        """Return a view of the tensors whose names start with `prefix`. The prefix is removed from
        their names.
        """
        whole = self._prefix + prefix
        return SavedTensors(
            self._file,
            self._start,
            self._left,
            self._channels_last,
            whole,
            self._pending,
            self._in_place,
        )

    def names(self, prefix: str = "") -> list[str]:
        """Return, in sorted order, the names that start with `prefix`. Tensors that have already
        been requested or skipped are left out.
        """
        whole, length = self._prefix + prefix, len(self._prefix)
        return sorted(name[length:] for name in self._left if name.startswith(whole))

    def shape(self, name: str) -> list[int] | None:
        """Return the saved shape of a tensor, or None if there is no tensor with this name or the
        tensor has already been requested or skipped.
        """
        stored = self._left.get(self._prefix + name)
        return None if stored is None else stored.shape

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Request that existing tensors be filled with saved data.

        Args:
            targets: Tensors to fill, keyed by the name of the saved tensor.

        Raises:
            RequestFailed: A tensor is missing or has the wrong shape or dtype (code
                `invalid_snapshot`).
        """
        for name, target in targets.items():
            position = self._claim(name, target.dtype, list(target.shape))
            if self._prefix + name not in self._in_place:
                self._pending.append((position, target))

    def take_tensor(
        self, name: str, device: torch.device | str, dtype: torch.dtype, shape: Sequence[int]
    ) -> torch.Tensor:
        """Request a new tensor on `device`, in its saved memory format.

        The tensor is uninitialised until `read_tensors` or `finish` fills it.

        Raises:
            RequestFailed: The tensor is missing or has the wrong shape or dtype (code
                `invalid_snapshot`).
        """
        position = self._claim(name, dtype, list(shape))
        memory_format = torch.contiguous_format
        if self._prefix + name in self._channels_last:
            memory_format = CHANNELS_LAST.get(len(shape), torch.contiguous_format)
        tensor = torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)
        self._pending.append((position, tensor))
        return tensor

    def skip_prefix(self, prefix: str) -> None:
        """Skip the tensors whose names start with `prefix`."""
        for name in self.names(prefix):
            del self._left[self._prefix + name]

    def read_tensors(self) -> None:
        """Fill all tensors requested by `fill` and `take_tensor`.

        Raises:
            OSError: Reading failed.
            EOFError: The file is too short.
        """
        read_at(self._file, sorted(self._pending, key=operator.itemgetter(0)))
        self._pending.clear()

    def finish(self) -> None:
        """Read all requested tensors, and check that every tensor has been requested or skipped.

        Raises:
            RequestFailed: A tensor has been neither requested nor skipped (code
                `invalid_snapshot`).
        """
        if self._left:
            raise RequestFailed(
                "invalid_snapshot", f"the snapshot holds unknown tensors {self.names()[:3]}"
            )
        self.read_tensors()

    def _claim(self, name: str, dtype: torch.dtype, shape: list[int]) -> int:
        """Validate a tensor, mark it as requested and return its offset in the file in bytes."""
        stored = self._left.pop(self._prefix + name, None)
        if stored is None:
            raise RequestFailed(
                "invalid_snapshot", f"the snapshot lacks the tensor {self._prefix}{name}"
            )
        if stored.dtype != DTYPE_NAMES.get(dtype) or stored.shape != shape:
            raise RequestFailed(
                "invalid_snapshot",
                f"the snapshot's tensor {self._prefix}{name} is {_TORCH_DTYPES[stored.dtype]} "
                f"{stored.shape}, "
                f"expected {dtype} {shape}",
            )
        return self._start + stored.data_offsets[0]


def read_scalars(scalars: Mapping[str, Any], kind: type[S]) -> S:
    """Convert a rank's scalars to the Struct `kind`. The types of the scalars are checked strictly.

    Raises:
        RequestFailed: A scalar is invalid (code `invalid_snapshot`). The message names the field.
    """
    try:
        return msgspec.convert(dict(scalars), kind)
    except msgspec.ValidationError as error:
        raise RequestFailed("invalid_snapshot", f"the snapshot's scalars: {error}") from error
