# SPDX-License-Identifier: Apache-2.0
"""The result envelope: one uint8 tensor that contains metadata and several tensors.

vLLM transfers exactly one tensor per pooling request from a worker to a client, so the whole result
of a request (frames, latents, timings, or an error) is packed into one tensor. This module defines
the byte layout:

    magic "VOMN" | u32 version | u64 header length | JSON header | padding | payload 0 | padding |
    payload 1 ...

The header is `{"meta": {...}, "tensors": [[name, dtype, shape, offset], ...]}`. Offsets are
relative to the start of the envelope and are multiples of 64.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

_MAGIC = b"VOMN"
_VERSION = 1
_PREFIX = struct.Struct("<4sIQ")
_ALIGN = 64
_MAX_HEADER_BYTES = 1 << 20
_HEADER_ROOM = 4096
_DTYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ARRAY_DTYPES = {name: np.dtype(name) for name in _DTYPES if name != "bfloat16"}


class RequestFailed(Exception):
    """Raised if a request fails. The engine and the request's session continue to run.

    Attributes:
        code: Short stable identifier for programs, for example `invalid_camera`, `capacity` or
            `non_finite`.
        message: Human-readable explanation. It contains no path, address or traceback.
    """

    def __init__(self, code: str, message: str):
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGN) * _ALIGN


def empty_result(
    shape: Sequence[int], dtype: torch.dtype, *, pin_memory: bool = False
) -> torch.Tensor:
    """Return an uninitialised CPU tensor that `pack` turns into an envelope without a copy.

    The tensor's storage reserves space for the header in front of the data. `pack` takes over the
    storage. The tensor must be the only tensor in the call to `pack` and must not be used for
    anything else.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        pin_memory: Whether to allocate page-locked memory, which a CUDA device can write to
            asynchronously.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch.empty(_HEADER_ROOM + nbytes, dtype=torch.uint8, pin_memory=pin_memory)
    return storage[_HEADER_ROOM:].view(dtype).view(list(shape))


def _pack_in_place(meta: Mapping[str, Any], name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    """Turn the storage of an `empty_result` tensor into an envelope.

    Returns:
        The envelope. None if the storage was not created by `empty_result`, or if the header does
        not fit into the reserved space.
    """
    storage = tensor.untyped_storage()
    made_for_it = (
        not tensor.is_cuda
        and tensor.is_contiguous()
        and tensor.storage_offset() * tensor.element_size() == _HEADER_ROOM
        and storage.nbytes() == _HEADER_ROOM + tensor.nbytes
    )
    header = _header(meta, [[name, _NAMES[tensor.dtype], list(tensor.shape), _HEADER_ROOM]])
    if not made_for_it or _PREFIX.size + len(header) > _HEADER_ROOM:
        return None
    out = torch.empty(0, dtype=torch.uint8).set_(storage)
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header)) + header
    out[:_HEADER_ROOM] = torch.frombuffer(
        bytearray(prefix.ljust(_HEADER_ROOM, b"\0")), dtype=torch.uint8
    )
    return out


def pack(
    meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor:
    """Pack metadata and tensors into one 1-D uint8 CPU tensor owned by the caller.

    Args:
        meta: JSON-serialisable metadata.
        tensors: Tensors, keyed by name. If there are CUDA tensors, the envelope is allocated in
            page-locked memory, and the CUDA tensors are copied directly into it.

    Raises:
        TypeError: A tensor has a dtype that envelopes do not support.
    """
    tensors = tensors or {}
    _check_dtypes(tensors)
    if (
        len(tensors) == 1
        and (in_place := _pack_in_place(meta, *next(iter(tensors.items())))) is not None
    ):
        return in_place
    prefix, offsets, total = _layout(meta, tensors)
    pinned = any(tensor.is_cuda for tensor in tensors.values())
    out = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    out[: offsets[0] if offsets else total].zero_()
    out[: len(prefix)] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)
    for offset, tensor in zip(offsets, tensors.values(), strict=True):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes:
            view = out[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
    return out


def pack_bytes(meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Pack metadata and CPU tensors into the bytes of an envelope. Each tensor is copied once.

    Raises:
        TypeError: A tensor has a dtype that envelopes do not support.
    """
    _check_dtypes(tensors)
    prefix, offsets, total = _layout(meta, tensors)
    parts: list[Any] = [prefix]
    end = len(prefix)
    for offset, tensor in zip(offsets, tensors.values(), strict=True):
        parts += bytes(offset - end), tensor.reshape(-1).view(torch.uint8).numpy()
        end = offset + parts[-1].nbytes
    return b"".join((*parts, bytes(total - end)))


def _check_dtypes(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"tensor {name!r} has dtype {tensor.dtype}; allowed: {', '.join(_DTYPES)}"
            )


def _layout(
    meta: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> tuple[bytes, list[int], int]:
    """Return an envelope's prefix and header, the offset of each payload, and the size of the
    envelope in bytes.
    """
    # The header contains the offsets, and the offsets depend on the length of the header.
    # Therefore, the largest possible length is reserved.
    entries: list[list[Any]] = [
        [name, _NAMES[t.dtype], list(t.shape), 0] for name, t in tensors.items()
    ]
    slack = 24 * len(entries)
    offset = _aligned(_PREFIX.size + len(_header(meta, entries)) + slack)
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        entry[3] = offset
        offset = _aligned(offset + tensor.numel() * tensor.element_size())
    header = _header(meta, entries)
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(header)) + header
    return prefix, [entry[3] for entry in entries], offset


def _header(meta: Mapping[str, Any], entries: list[list[Any]]) -> bytes:
    return json.dumps({"meta": dict(meta), "tensors": entries}, allow_nan=False).encode()


def pack_error(code: str, message: str) -> torch.Tensor:
    """Pack an error into an envelope. `unpack` raises the error as
    `RequestFailed(code, message)`.
    """
    return pack({"error": {"code": code, "message": message}})


def opaque(envelope: torch.Tensor) -> torch.Tensor:
    """Return the bytes of an envelope as a tensor with a dtype that only `unpack` supports.

    No encoding of vLLM's `/pooling` endpoint supports this dtype, so the endpoint returns status
    500. With a uint8 tensor, the endpoint would return the bytes of an error as data, with status
    200. Do not put the result into a pickled inter-process message.
    """
    return envelope.view(torch.bits8)


class _Payload(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Entry for one tensor in an envelope's header."""

    name: str
    """Name of the tensor."""
    dtype: str
    """Name of the tensor's dtype, a key of `_DTYPES`."""
    shape: list[int]
    """Shape of the tensor, with at most 8 dimensions."""
    offset: int
    """Offset of the payload in bytes from the start of the envelope, a multiple of 64."""

    def num_bytes(self, total: int) -> int:
        """Return the size of the payload in bytes.

        Raises:
            ValueError: The payload is not inside an envelope of `total` bytes.
        """
        dtype = _DTYPES.get(self.dtype)
        if dtype is None:
            raise ValueError(f"unknown dtype {self.dtype!r} in envelope")
        if len(self.shape) > 8 or (self.shape and min(self.shape) < 0):
            raise ValueError(f"bad shape {self.shape} or offset {self.offset!r} in envelope")
        nbytes: int = math.prod(self.shape) * dtype.itemsize
        if self.offset < 0 or self.offset % _ALIGN or self.offset + nbytes > total:
            end = self.offset + nbytes
            raise ValueError(
                f"payload [{self.offset}, {end}) is outside the envelope of {total} bytes"
            )
        return nbytes


class _Header(msgspec.Struct):
    """Header of an envelope."""

    meta: dict[str, Any]
    """Metadata of the result."""
    tensors: list[_Payload]
    """Entries for the tensors in the envelope."""


_decode_header = msgspec.json.Decoder(_Header).decode


def unpack(envelope: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read an envelope.

    Returns:
        The metadata, and the tensors, keyed by name. The tensors are views into `envelope`.

    Raises:
        RequestFailed: The envelope carries an error.
        ValueError: The envelope is malformed.
    """
    envelope, _, header = _opened(envelope)
    return header.meta, {payload.name: _tensor(envelope, payload) for payload in header.tensors}


def unpack_arrays(envelope: torch.Tensor) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read an envelope into NumPy arrays. This is faster than `unpack`.

    Raises:
        RequestFailed: The envelope carries an error.
        ValueError: The envelope is malformed, or contains bfloat16, which NumPy does not support.
    """
    _, buffer, header = _opened(envelope)
    arrays = {}
    for payload in header.tensors:  # not a comprehension, which would add a call for every chunk
        arrays[payload.name] = _array(buffer, payload)
    return header.meta, arrays


def _opened(envelope: torch.Tensor) -> tuple[torch.Tensor, memoryview, _Header]:
    """Return the contiguous envelope, its bytes and its header."""
    if envelope.dtype is torch.bits8:
        envelope = envelope.view(torch.uint8)
    if envelope.dtype is not torch.uint8 or envelope.ndim != 1:
        raise ValueError(
            f"envelope must be a 1-D uint8 tensor, got {envelope.dtype} {tuple(envelope.shape)}"
        )
    envelope = envelope.contiguous()
    buffer = memoryview(envelope.numpy())  # type: ignore[arg-type]  # missing in NumPy's type hints
    total = len(buffer)
    if total < _PREFIX.size:
        raise ValueError(
            f"envelope of {total} bytes is shorter than its {_PREFIX.size}-byte prefix"
        )
    magic, version, header_bytes = _PREFIX.unpack_from(buffer)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"not a version {_VERSION} envelope (magic {magic!r}, version {version})")
    if header_bytes > min(_MAX_HEADER_BYTES, total - _PREFIX.size):
        raise ValueError(f"header length {header_bytes} exceeds the envelope of {total} bytes")
    try:
        header = _decode_header(buffer[_PREFIX.size : _PREFIX.size + header_bytes])
    except msgspec.ValidationError as error:
        raise ValueError(f"malformed envelope header: {error}") from error
    except (RecursionError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise ValueError(f"malformed envelope header: {type(error).__name__}") from error
    if "error" in header.meta:
        error_map = header.meta["error"]
        if not isinstance(error_map, dict):
            raise ValueError("malformed envelope header: error is not a map")
        raise RequestFailed(str(error_map.get("code")), str(error_map.get("message")))
    return envelope, buffer, header


def _tensor(envelope: torch.Tensor, payload: _Payload) -> torch.Tensor:
    nbytes, dtype = payload.num_bytes(envelope.numel()), _DTYPES[payload.dtype]
    if nbytes == 0:
        return torch.empty(payload.shape, dtype=dtype)
    return envelope[payload.offset : payload.offset + nbytes].view(dtype).view(payload.shape)


def _array(buffer: memoryview, payload: _Payload) -> np.ndarray:
    nbytes, dtype = payload.num_bytes(len(buffer)), _ARRAY_DTYPES.get(payload.dtype)
    if dtype is None:
        raise ValueError(
            f"{payload.name!r} is {payload.dtype}, which NumPy does not have; use `unpack`"
        )
    return np.ndarray(payload.shape, dtype, buffer, payload.offset if nbytes else 0)
