# SPDX-License-Identifier: Apache-2.0
"""Weight files as named tensors: shapes first, data one tensor at a time, nothing but plain dense
tensors.

Files are untrusted. Two formats are read: safetensors, and PyTorch zip archives through
`torch.load(weights_only=True, mmap=True)`, which runs no code from the file and maps it instead of
reading it, unless `files_may_change`. A truncated file, or one that is of another kind than its
name says or holds anything but dense float tensors (in safetensors also those of quantized weights,
`QUANTIZED_DTYPES`) is a ValueError of one line before any data is used.
Held by tests/model_executor/test_tensor_files.py.
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
"""Of weights that stand beside scales (`quantized_weights.py`)."""
_ZIP_MAGIC = b"PK\x03\x04"
_MAX_CONFIG_BYTES = {"JSON": 64 << 20, "YAML": 1 << 20}


_unmapped: Final = threading.Event()
"""Set in `files_may_change`; of the process, because components are loaded on threads of their
own.
"""


@contextlib.contextmanager
def files_may_change() -> Iterator[None]:
    """In this block, files are read as `UnmappedSource` reads them: while serving, others may write
    them.

    At start, files are mapped, because that is faster and nothing is lost with the process.
    """
    _unmapped.set()
    try:
        yield
    finally:
        _unmapped.clear()


def reads_unmapped() -> bool:
    """Return whether some caller is in a `files_may_change` block."""
    return _unmapped.is_set()


@dataclass(frozen=True)
class SafetensorsSource:
    """Tensors of one or several safetensors files.

    `shapes` and `dtypes` come from their headers.
    """

    where: str
    files: Mapping[Path, tuple[str, ...]]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for the given names, file by file; one tensor is in memory at
        a time.
        """
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
    """Tensors of one PyTorch zip archive, mapped into memory."""

    where: str
    tensors: Mapping[str, torch.Tensor]
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for the given names; pages are read from the file when they
        are touched.
        """
        for name in names:
            yield name, self.tensors[name]


@dataclass(frozen=True)
class UnmappedSource:
    """Tensors of one safetensors file that others may write while the server runs: read, never
    memory-mapped.

    A mapped file that is truncated ends the process (SIGBUS) when its bytes are touched. Here a
    file that changes between `open` and the end of `read` is a ValueError. metadata: of the file's
    header.
    """

    where: str
    shapes: Mapping[str, Shape]
    dtypes: Mapping[str, torch.dtype]
    metadata: Mapping[str, str]
    _path: Path
    _starts: Mapping[str, int]
    _identity: tuple[int, ...]

    @classmethod
    def open(cls, path: Path) -> "UnmappedSource":
        """Read the header. Raises ValueError of one line that names the file and the fault."""
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
                    f"{path} is no complete safetensors file (the place of {name!r}); download "
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

        Raises ValueError if the file has changed.
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
    """A tensor in a safetensors header. data_offsets: begin and end, in bytes after the header."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int]


def copy_unchanged(source: Path, target: Path) -> None:
    """Copy a file that others may write. Raises ValueError if it changes meanwhile, and OSError."""
    with source.open("rb") as file, target.open("xb") as copy:
        before = _identity(file)
        shutil.copyfileobj(file, copy, 1 << 20)
        if _identity(file) != before or copy.tell() != before[0]:
            raise ValueError(
                f"{source} was changed while it was read; load it again when it is complete"
            )


def _identity(file: BinaryIO) -> tuple[int, ...]:
    """Equal for two openings of a file that nobody has written or replaced between them."""
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev


class TensorSource(Protocol):
    """Named tensors of a checkpoint. where: its place, for errors. shapes, dtypes: of all of
    them, by name.
    """

    @property
    def where(self) -> str: ...
    @property
    def shapes(self) -> Mapping[str, Shape]: ...
    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    def read_tensors(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, CPU tensor) for the given names; one tensor is in memory at a time."""
        ...


Forms = Callable[[str], Mapping[str, Callable[[torch.Tensor], torch.Tensor]]]
"""Stored name -> the tensors that are made from it, by their names, and how."""


class AdaptedSource:
    """Another source, some of whose tensors are given under other names or in other forms.

    forms: a stored tensor that nothing is made from is left out. Raises ValueError for two tensors
    of one name, and for shapes that cannot be given in their form.
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
        """Yield (name, CPU tensor) for the given names; a stored tensor is read once for all
        that is made from it.
        """
        wanted: dict[str, list[str]] = defaultdict(list)
        for target in names:
            wanted[self._made[target][0]].append(target)
        for name, tensor in self._source.read_tensors(wanted):
            for target in wanted[name]:
                yield target, self._made[target][1](tensor)


def unchanged(tensor: torch.Tensor) -> torch.Tensor:
    """The form of a tensor that is given as it is stored."""
    return tensor


def open_tensors(path: Path, state_keys: Sequence[str] = ()) -> SafetensorsSource | TorchSource:
    """Open a folder of safetensors (with or without an index), one safetensors file, or one `.pth`.

    state_keys: a `.pth` that holds one of these keys is a training checkpoint: the first one there
    is the network, and whatever else the file holds is not looked at. Raises ValueError of one line
    that names the file and the fault.
    """
    if path.is_dir():
        return _open_safetensors(_files_of(path), str(path))
    if path.suffix == ".safetensors":
        return _open_safetensors([confined(path.parent, path.name)], str(path))
    return _open_torch(confined(path.parent, path.name), state_keys)


def unknown_state(path: Path, names: Iterable[str], state_keys: Sequence[str]) -> ValueError:
    """The error of a file in which the network is under none of `state_keys`. names: the keys in
    the file.
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
    """Read a small JSON object. Raises ValueError naming the file when it is anything else."""
    return _read_mapping(path, "JSON", json.loads)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a small YAML mapping, as data only.

    Raises ValueError naming the file when it is anything else.
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
    """Return `folder / name` if that is a file really inside `folder`, else raise ValueError.

    Links that the Hugging Face cache makes (`snapshots/<revision>/x -> blobs/<hash>` of the same
    repository) count as inside.
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
    """Return the weight files of a folder: those its index names, else all its safetensors."""
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
    except Exception as error:  # the unpickler raises whatever a malformed file makes it raise
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
    """Say why `value` is no plain dense float tensor; None if it is one. Touches no data."""
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
