# SPDX-License-Identifier: Apache-2.0
"""Reads weight files as named tensors: all shapes first, then the data of one tensor at a time.

Files are untrusted. Two formats are supported: safetensors, and PyTorch zip archives through
`torch.load(weights_only=True)`, which does not execute code from the file. Files are memory-mapped,
except within the `files_may_change` context manager. If a file is truncated, has a format that
differs from its suffix, or contains anything but dense float tensors, it is rejected with a
single-line ValueError before any data is used. Safetensors files may also contain
`QUANTIZED_DTYPES`.
"""

import contextlib
import json
import math
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Protocol

import msgspec
import torch
import yaml
from safetensors import SafetensorError, safe_open

from vllm_omni.tensors.file_io import read_at

Shape = tuple[int, ...]

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTIZED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_SAFETENSORS_DTYPES = {**_FLOATS, **_QUANTIZED}
_DTYPES = frozenset(_FLOATS.values())
QUANTIZED_DTYPES = frozenset(_QUANTIZED.values())
"""Dtypes of quantized weights, which are stored with scales (`quantized_weights.py`)."""
_ZIP_MAGIC = b"PK\x03\x04"
_MAX_CONFIG_BYTES = {"JSON": 64 << 20, "YAML": 1 << 20}


_unmapped: Final = threading.Event()
"""Set while any thread is in `files_may_change`. The event is global to the process, because
several threads load components.
"""


@contextlib.contextmanager
def files_may_change() -> Iterator[None]:
    """Context manager within which files are read without memory-mapping (`UnmappedSource`).

    While the server runs, other processes may overwrite the files. At startup, files are
    memory-mapped instead, because this is faster and a crash at that time loses no session.
    """
    _unmapped.set()
    try:
        yield
    finally:
        _unmapped.clear()


def reads_unmapped() -> bool:
    """Return whether any thread is in the context of `files_may_change`."""
    return _unmapped.is_set()


@dataclass(frozen=True)
class SafetensorsSource:
    """Tensors of one or more safetensors files."""

    where: str
    """Path to report in error messages."""
    files: Mapping[Path, tuple[str, ...]]
    """Names of the tensors in each file."""
    shapes: Mapping[str, Shape]
    """Shape of each tensor, from the headers."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype of each tensor, from the headers."""

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for the given names, file by file, one tensor at a time."""
        wanted = set(names)
        for path, stored in self.files.items():
            if wanted.isdisjoint(stored):
                continue
            if reads_unmapped():
                yield from self._read_unmapped(path, [name for name in stored if name in wanted])
                continue
            with safe_open(path, framework="pt") as file:
                for name in stored:
                    if name in wanted:
                        yield name, file.get_tensor(name)

    def _read_unmapped(
        self, path: Path, names: Sequence[str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        source = UnmappedSource.open(path)
        if any(source.shapes.get(name) != self.shapes[name] for name in names):
            raise ValueError(
                f"{path} was changed while it was read; load it again when it is complete"
            )
        yield from source.read_tensors(names)


@dataclass(frozen=True)
class TorchSource:
    """Tensors of one memory-mapped PyTorch zip archive."""

    where: str
    """Path to report in error messages."""
    tensors: Mapping[str, torch.Tensor]
    """Memory-mapped tensors by name."""
    shapes: Mapping[str, Shape]
    """Shape of each tensor."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype of each tensor."""

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for the given names. Data is read from disk when it is first
        accessed.
        """
        for name in names:
            yield name, self.tensors[name]


@dataclass(frozen=True)
class UnmappedSource:
    """Tensors of a safetensors file that other processes may overwrite. The file is never
    memory-mapped.

    Accessing a memory-mapped file that has been truncated kills the process (SIGBUS). This class
    raises ValueError if the file changes between `open` and the end of `read_tensors`.
    """

    where: str
    """Path to report in error messages."""
    shapes: Mapping[str, Shape]
    """Shape of each tensor."""
    dtypes: Mapping[str, torch.dtype]
    """Dtype of each tensor."""
    metadata: Mapping[str, str]
    """Metadata from the file header."""
    _path: Path
    """File path."""
    _starts: Mapping[str, int]
    """Each tensor's offset in bytes from the start of the file."""
    _identity: tuple[int, ...]
    """Key returned by the `_identity` function when the file was opened."""

    @classmethod
    def open(cls, path: Path) -> "UnmappedSource":
        """Read the header of a file.

        Raises:
            ValueError: The file is not a complete safetensors file. The error message is a single
                line.
        """
        try:
            with path.open("rb") as file:
                identity = _identity(file)
                length = int.from_bytes(file.read(8), "little")
                if length > _MAX_CONFIG_BYTES["JSON"]:
                    raise ValueError(f"its header has {length} bytes")
                raw = msgspec.json.decode(file.read(length), type=dict[str, Any])
            metadata = msgspec.convert(raw.pop("__metadata__", {}), dict[str, str])
            header = msgspec.convert(raw, dict[str, _Entry])
        except (OSError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise ValueError(
                f"{path} is no complete safetensors file ({error}); download it again"
            ) from error
        size, start = identity[0], 8 + length
        position = start
        for name, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
            if (dtype := _SAFETENSORS_DTYPES.get(entry.dtype)) is None:
                allowed = ", ".join(_SAFETENSORS_DTYPES)
                raise ValueError(
                    f"{path}: tensor {name!r} has dtype {entry.dtype}; allowed: {allowed}"
                )
            begin_at, end = (start + offset for offset in entry.data_offsets)
            if begin_at != position or end - begin_at != dtype.itemsize * math.prod(entry.shape):
                raise ValueError(
                    f"{path} is no complete safetensors file (the offsets of {name!r}); download "
                    "it again"
                )
            position = end
        if position != size:
            raise ValueError(
                f"{path} is no complete safetensors file ({size} bytes of {position}); download "
                "it again"
            )
        return cls(
            str(path),
            {name: tuple(entry.shape) for name, entry in header.items()},
            {name: _SAFETENSORS_DTYPES[entry.dtype] for name, entry in header.items()},
            metadata,
            path,
            {name: start + entry.data_offsets[0] for name, entry in header.items()},
            identity,
        )

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) in the order of `names`.

        Raises:
            ValueError: The file has changed since it was opened, or it cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                self._check(file)
                for name in names:
                    dtype, shape = self.dtypes[name], self.shapes[name]
                    data = torch.empty(dtype.itemsize * math.prod(shape), dtype=torch.uint8)
                    read_at(file.fileno(), [(self._starts[name], data)])
                    yield name, data.view(dtype).reshape(shape)
                self._check(file)
        except (OSError, EOFError) as error:
            raise ValueError(f"{self.where} cannot be read ({error})") from error

    def _check(self, file: BinaryIO) -> None:
        if _identity(file) != self._identity:
            raise ValueError(
                f"{self.where} was changed while it was read; load it again when it is complete"
            )


class _Entry(msgspec.Struct):
    """Entry of the safetensors header that describes one tensor."""

    dtype: str
    """Safetensors name of the tensor's dtype."""
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    """The tensor's shape."""
    data_offsets: tuple[int, int]
    """Start and end of the tensor's data, in bytes from the end of the header."""


def copy_unchanged(source: Path, target: Path) -> None:
    """Copy a file that other processes may overwrite.

    Raises:
        ValueError: The file changed during the copy.
        OSError: The file cannot be copied.
    """
    with source.open("rb") as file, target.open("xb") as copy:
        before = _identity(file)
        shutil.copyfileobj(file, copy, 1 << 20)
        if _identity(file) != before or copy.tell() != before[0]:
            raise ValueError(
                f"{source} was changed while it was read; load it again when it is complete"
            )


def _identity(file: BinaryIO) -> tuple[int, ...]:
    """Return a key that stays the same as long as the file is unchanged, even if the file is
    reopened.
    """
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


class TensorSource(Protocol):
    """A checkpoint's named tensors."""

    @property
    def where(self) -> str:
        """Path to report in error messages."""
        ...

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of each tensor."""
        ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Dtype of each tensor."""
        ...

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for the given names, one tensor at a time."""
        ...


Forms = Callable[[str], Mapping[str, Callable[[torch.Tensor], torch.Tensor]]]
"""Function that maps the name of a stored tensor to `{name of a result: function that computes it
from the stored tensor}`.
"""


class AdaptedSource:
    """A `TensorSource` that renames or converts the tensors of another source.

    Args:
        source: Source of the stored tensors.
        forms: Tensors to compute from each stored tensor. If nothing is computed from a stored
            tensor, the tensor is skipped.

    Raises:
        ValueError: Two tensors have the same name, or a stored tensor has an unsuitable shape.
    """

    def __init__(self, source: TensorSource, forms: Forms) -> None:
        self.where, self._source = source.where, source
        self._made: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {}
        self.shapes: dict[str, Shape] = {}
        for name, shape in source.shapes.items():
            for target, form in forms(name).items():
                if target in self._made:
                    raise ValueError(
                        f"{self.where} holds {target!r} twice, as {self._made[target][0]!r} and "
                        f"{name!r}"
                    )
                try:
                    self.shapes[target] = tuple(form(torch.empty(shape, device="meta")).shape)
                except (IndexError, RuntimeError) as error:
                    raise ValueError(
                        f"{self.where}: {name!r} can not have the shape {list(shape)}"
                    ) from error
                self._made[target] = name, form
        self.dtypes = {target: source.dtypes[name] for target, (name, _) in self._made.items()}

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for the given names. Each stored tensor is read once, even if
        several tensors are computed from it.
        """
        wanted: dict[str, list[str]] = defaultdict(list)
        for target in names:
            wanted[self._made[target][0]].append(target)
        for name, tensor in self._source.read_tensors(wanted):
            for target in wanted[name]:
                yield target, self._made[target][1](tensor)


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` unchanged."""
    return tensor


def open_tensors(path: Path, state_keys: Sequence[str] = ()) -> SafetensorsSource | TorchSource:
    """Open a directory of safetensors files (with or without an index), or a single weight file.

    Args:
        path: Directory, safetensors file or `.pth` file.
        state_keys: Keys under which a training checkpoint (`.pth`) may store the network. The first
            existing key is used, and all other file content is ignored.

    Raises:
        ValueError: The files are not supported. The error message is a single line that names the
            file.
    """
    if path.is_dir():
        return _open_safetensors(_files_of(path), str(path))
    if path.suffix == ".safetensors":
        return _open_safetensors([confined(path.parent, path.name)], str(path))
    return _open_torch(confined(path.parent, path.name), state_keys)


def unknown_state(path: Path, names: Iterable[str], state_keys: Sequence[str]) -> ValueError:
    """Return the error for a training checkpoint that contains none of `state_keys`.

    Args:
        path: Path of the training checkpoint.
        names: Keys that the file contains.
        state_keys: Keys under which the network was expected.
    """
    seen = list(names)
    first = ", ".join(repr(name[:80]) for name in seen[:4]) + (
        f" and {len(seen) - 4} more" if len(seen) > 4 else ""
    )
    return ValueError(
        f"{path} holds no network known here: its keys are {first or 'none'}; expected the tensors "
        "themselves, their "
        f"names with or without a trainer's prefix, or one of the wrappers {', '.join(state_keys)} "
        "around them"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON object.

    Raises:
        ValueError: The file does not contain a JSON object. The error message names the file.
    """
    return _read_mapping(path, "JSON", json.loads)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a small YAML mapping without constructing arbitrary Python objects.

    Raises:
        ValueError: The file does not contain a YAML mapping. The error message names the file.
    """
    return _read_mapping(path, "YAML", yaml.safe_load)


def _read_mapping(path: Path, kind: str, parse: Callable[[bytes], Any]) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES[kind]:
            raise ValueError(
                f"{path} is larger than {_MAX_CONFIG_BYTES[kind] >> 20} MiB; it is no config or "
                "index file"
            )
        value = parse(path.read_bytes())
    except (
        OSError,
        RecursionError,
        UnicodeDecodeError,
        json.JSONDecodeError,
        yaml.YAMLError,
    ) as error:
        raise ValueError(
            f"{path} cannot be read as {kind} ({type(error).__name__}); download it again"
        ) from error
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{path} must hold a {kind} object, got {type(value).__name__}")
    return value


def confined(folder: Path, name: str) -> Path:
    """Return `folder / name` if the file, after links are resolved, is inside `folder`.

    Links within one repository of the Hugging Face cache (`snapshots/<revision>/x -> blobs/<hash>`)
    are allowed.

    Raises:
        ValueError: `name` is not a plain file name, or the file is outside `folder` or does not
            exist.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or len(name) > 255
        or set(name) & set("/\\\0")
    ):
        raise ValueError(
            f"{folder}: {str(name)[:80]!r} is no plain file name; weight files lie beside "
            "their index"
        )
    path = folder / name
    real_folder = folder.resolve()
    inside = [
        real_folder,
        *(parent.parent / "blobs" for parent in real_folder.parents if parent.name == "snapshots"),
    ]
    real = path.resolve()
    if not any(real.is_relative_to(root) for root in inside):
        raise ValueError(
            f"{path} is a link to a file outside its folder; put the file itself there"
        )
    if not real.is_file():
        raise ValueError(f"{path} is not there; download it again")
    return path


def _files_of(folder: Path) -> list[Path]:
    """Return a folder's weight files: the files that its index names, or all safetensors files if
    it has no index.
    """
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        raise ValueError(
            f"{folder} has {len(indices)} index files ({indices[0].name}, {indices[1].name}); "
            "keep one"
        )
    if indices:
        weight_map = read_json(confined(folder, indices[0].name)).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(
                f"{indices[0]} must hold a 'weight_map' object of tensor name -> file name"
            )
        return [confined(folder, name) for name in sorted(set(map(str, weight_map.values())))]
    files = [confined(folder, path.name) for path in sorted(folder.glob("*.safetensors"))]
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file; download the weights into it")
    return files


def _open_safetensors(paths: list[Path], where: str) -> SafetensorsSource:
    files: dict[Path, tuple[str, ...]] = {}
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, torch.dtype] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                files[path] = tuple(file.keys())
                for name in files[path]:
                    if name in shapes:
                        raise ValueError(
                            f"{path}: tensor {name!r} is in another file of this folder too; "
                            "keep one"
                        )
                    header = file.get_slice(name)
                    shapes[name] = tuple(header.get_shape())
                    if (stored := header.get_dtype()) not in _SAFETENSORS_DTYPES:
                        allowed = ", ".join(_SAFETENSORS_DTYPES)
                        raise ValueError(
                            f"{path}: tensor {name!r} has dtype {stored}; allowed: {allowed}"
                        )
                    dtypes[name] = _SAFETENSORS_DTYPES[stored]
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path} is no complete safetensors file ({error}); download it again"
            ) from error
    return SafetensorsSource(where, files, shapes, dtypes)


def _open_torch(path: Path, state_keys: Sequence[str]) -> TorchSource:
    with path.open("rb") as file:
        before = _identity(file)
        if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:
            raise ValueError(
                f"{path} is no PyTorch zip archive; download it again or convert it to safetensors"
            )
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=not reads_unmapped())
    except Exception as error:  # a malformed file can make the unpickler raise any exception
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}): it is truncated or holds more than "
            "tensors; "
            "download it again"
        ) from error
    with path.open("rb") as file:
        if _identity(file) != before:
            raise ValueError(
                f"{path} was changed while it was read; load it again when it is complete"
            )
    if (
        isinstance(tensors, dict)
        and (key := next((key for key in state_keys if key in tensors), None)) is not None
    ):
        tensors = tensors[key]
    if not isinstance(tensors, dict) or not all(isinstance(name, str) for name in tensors):
        raise ValueError(
            f"{path} must hold a dictionary of tensor name -> tensor, got {type(tensors).__name__}"
        )
    if state_keys and any(isinstance(value, dict) for value in tensors.values()):
        raise unknown_state(path, tensors, state_keys)
    for name, tensor in tensors.items():
        if problem := _not_plain(tensor):
            raise ValueError(
                f"{path}: {name[:80]!r} {problem}; only dense float tensors are loaded"
            )
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors.values()
    }
    if (claimed := sum(tensor.nbytes for tensor in tensors.values())) > sum(storages.values()):
        raise ValueError(
            f"{path}: its tensors share memory ({claimed} bytes in {sum(storages.values())} "
            "stored ones)"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return TorchSource(
        str(path), tensors, shapes, {name: tensor.dtype for name, tensor in tensors.items()}
    )


def _not_plain(value: Any) -> str | None:
    """Return why a value is not a dense float tensor, or None if it is one. No data is read."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(value).__name__}"
    if value.layout != torch.strided or value.is_quantized:
        return "is sparse or quantised"
    if value.dtype not in _DTYPES:
        return f"has dtype {value.dtype}"
    if value.device.type != "cpu":
        return f"has no data (device {value.device})"
    end = value.storage_offset() + value.numel()
    if not value.is_contiguous() or end * value.itemsize > value.untyped_storage().nbytes():
        return f"of shape {tuple(value.shape)} is a view that claims more than it stores"
    return None
