# SPDX-License-Identifier: Apache-2.0
"""The saved state of one rank's session as its model reads it: tensors by name, and scalars.

`OpenSnapshot.rank` (`sessions/snapshot.py`) makes a `SavedTensors` of a checked file, and a session's `restore`
(`model_executor/interfaces.py`) takes its tensors from it. This file lies below both: it knows neither the snapshot's
header nor a model.
Held by tests/worker/test_snapshots.py and test_snapshot_refusals.py.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
import torch

from vllm_omni.outputs import RequestFailed
from vllm_omni.tensor_bytes import Place, read_at

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
"""dtype -> its name in safetensors, of those that a session may hold."""
_TORCH_DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
DTYPE_BYTES: Final = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
"""Bytes of a number, by that name."""
CHANNELS_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Number of dimensions -> the memory layout that is restored as it was saved."""

ChunkIndex = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
"""The number of the chunk that a saved session goes on with."""

S = TypeVar("S", bound=msgspec.Struct)


class StoredTensor(msgspec.Struct, frozen=True):
    """An entry of a snapshot's table. data_offsets: begin and end, in bytes behind the table.

    `OpenSnapshot` accepts no tensor with the defaults; they let the metadata, which has no such fields, stand among
    the tensors while the table is decoded.
    """

    dtype: str = ""
    shape: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    data_offsets: tuple[int, int] = (-1, -1)


class SavedTensors:
    """One rank's tensors of an open snapshot, to be taken one by one; tensors left over are an error.

    Made by `OpenSnapshot.rank`. A tensor is checked when it is asked for; bytes are read together by `read` and
    `finish`, until when a new tensor holds nothing. Nothing refers to the file afterwards.
    """

    def __init__(
        self,
        file: int,
        start: int,
        left: dict[str, StoredTensor],
        channels_last: frozenset[str],
        prefix: str = "",
        pending: list[Place] | None = None,
    ) -> None:
        self._file, self._start, self._left = file, start, left
        self._channels_last, self._prefix = channels_last, prefix
        self._pending: list[Place] = [] if pending is None else pending

    def under(self, prefix: str) -> "SavedTensors":
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        whole = self._prefix + prefix
        return SavedTensors(self._file, self._start, self._left, self._channels_last, whole, self._pending)

    def names(self, prefix: str = "") -> list[str]:
        """Names not yet taken that begin with `prefix`, sorted."""
        whole, length = self._prefix + prefix, len(self._prefix)
        return sorted(name[length:] for name in self._left if name.startswith(whole))

    def shape(self, name: str) -> list[int] | None:
        """The shape a tensor was saved in; None if it is not there."""
        stored = self._left.get(self._prefix + name)
        return None if stored is None else stored.shape

    def fill(self, places: Mapping[str, torch.Tensor]) -> None:
        """Have the tensor of each name read into its place. Raises `RequestFailed("invalid_snapshot")`."""
        for name, place in places.items():
            self._pending.append((self._claim(name, place.dtype, list(place.shape)), place))

    def take(self, name: str, device: torch.device | str, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return a new tensor on `device`, in the memory layout it was saved in, to be filled by `read`.

        Raises `RequestFailed("invalid_snapshot")` if the saved tensor has another shape or dtype.
        """
        position = self._claim(name, dtype, list(shape))
        memory_format = torch.contiguous_format
        if self._prefix + name in self._channels_last:
            memory_format = CHANNELS_LAST.get(len(shape), torch.contiguous_format)
        tensor = torch.empty(shape, dtype=dtype, device=device, memory_format=memory_format)
        self._pending.append((position, tensor))
        return tensor

    def leave(self, prefix: str) -> None:
        """Do without the tensors whose names begin with `prefix`."""
        for name in self.names(prefix):
            del self._left[self._prefix + name]

    def read(self) -> None:
        """Fill all tensors requested by `fill` and `take`. Raises OSError and EOFError."""
        read_at(self._file, sorted(self._pending, key=operator.itemgetter(0)))
        self._pending.clear()

    def finish(self) -> None:
        """Read, or raise `RequestFailed("invalid_snapshot")` if some tensor belongs to nothing."""
        if self._left:
            raise RequestFailed("invalid_snapshot", f"the snapshot holds unknown tensors {self.names()[:3]}")
        self.read()

    def _claim(self, name: str, dtype: torch.dtype, shape: list[int]) -> int:
        """Check a tensor's dtype and shape, take it off the list and return its position in the file, in bytes."""
        stored = self._left.pop(self._prefix + name, None)
        if stored is None:
            raise RequestFailed("invalid_snapshot", f"the snapshot lacks the tensor {self._prefix}{name}")
        if stored.dtype != DTYPE_NAMES.get(dtype) or stored.shape != shape:
            raise RequestFailed(
                "invalid_snapshot",
                f"the snapshot's tensor {self._prefix}{name} is {_TORCH_DTYPES[stored.dtype]} {stored.shape}, "
                f"expected {dtype} {shape}",
            )
        return self._start + stored.data_offsets[0]


def read_scalars(scalars: Mapping[str, Any], kind: type[S]) -> S:
    """Convert a rank's scalars strictly. Raises `RequestFailed("invalid_snapshot")` naming the field."""
    try:
        return msgspec.convert(dict(scalars), kind)
    except msgspec.ValidationError as error:
        raise RequestFailed("invalid_snapshot", f"the snapshot's scalars: {error}") from error
