# SPDX-License-Identifier: Apache-2.0
"""`load_adapter`: read an adapter's files, validate them against a model, and return the deltas
that this rank needs.

Every rank validates all names, LoRA ranks and shapes before it reads data. Modules that do not
match the model are skipped and reported, because adapters are shared between models. For example,
adapters for Wan 2.1 I2V contain start-image layers that Wan 2.2 lacks, and other adapters contain
text encoder layers. A file is rejected if it is malformed or if none of its modules match the
model.
"""

# r rank, I inputs, O outputs of a module

import hashlib
from collections.abc import Collection, Hashable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_omni.model_executor.checkpoint.loading import some
from vllm_omni.model_executor.checkpoint.tensor_files import Shape
from vllm_omni.model_executor.layers.lora.files import (
    AdapterError,
    AdapterFile,
    AdapterFileContents,
    Kind,
    MatrixKeys,
    open_adapter,
    read_names,
)
from vllm_omni.model_executor.layers.lora.target import AdapterTarget

_DIGESTING_THREADS = 4
TargetName = tuple[str, str]
"""Name of a target that an adapter changes: (network, module or tensor name)."""


@dataclass(frozen=True)
class LowRank:
    """The deltas for one module: `up @ down` for the weight, and `bias` for the bias."""

    down: torch.Tensor | None = None
    """Down projection, [r, I]. None: the adapter does not change the weight."""
    up: torch.Tensor | None = None
    """Up projection, [O, r], already multiplied by the adapter's scaling factor. None: the adapter
    does not change the weight."""
    bias: torch.Tensor | None = None
    """Bias delta, [O]. None: the adapter does not change the bias."""

    @property
    def rank(self) -> int:
        return 0 if self.down is None else self.down.shape[0]

    @property
    def is_finite(self) -> bool:
        return all(_is_finite(one) for one in (self.down, self.up, self.bias) if one is not None)


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter's full (unsharded) tensors in host memory. Modules that this rank holds no part of
    are omitted.
    """

    matrices: Mapping[TargetName, LowRank]
    """Deltas for linear layers."""
    vectors: Mapping[TargetName, torch.Tensor]
    """Deltas for gains, norm biases and modulation, fp32."""
    digest: str
    """Digest of the weights; see `UsedLora.digest`."""
    skipped: tuple[str, ...] = ()
    """Stored names of tensors that do not match the model."""

    @cached_property
    def layout(self) -> Hashable:
        """Return a key that is equal for adapters that change the same modules with the same
        shapes.
        """
        matrices = (
            (position, one.rank, one.bias is None) for position, one in self.matrices.items()
        )
        return frozenset(matrices), frozenset(self.vectors)


def load_adapter(
    path: str,
    targets: Mapping[str, AdapterTarget],
    max_rank: int,
    dtype: torch.dtype,
    own: "TargetNames",
) -> AdapterWeights:
    """Read and validate the adapter at `path`.

    Args:
        path: File or directory of the adapter.
        targets: The model's networks, keyed by name.
        max_rank: Maximum LoRA rank.
        dtype: Dtype of the returned deltas for linear layers.
        own: Modules and tensors of which this rank holds a part. All other modules and tensors are
            only validated.

    Raises:
        AdapterError: The adapter does not fit the model. The message is one line.
        ValueError: A file cannot be read. The message is one line.
    """
    matrices: dict[TargetName, LowRank] = {}
    vectors: dict[TargetName, torch.Tensor] = {}
    opened = [(file, read_names(file, targets)) for file in open_adapter(path, targets)]
    skipped: list[str] = []
    for file, contents in opened:
        skipped += contents.strange
        skipped += _check(file, contents, targets, max_rank)
    digest = hashlib.blake2b(str(dtype).encode(), digest_size=16)
    for file, contents in opened:
        wanted = {
            position: keys
            for position, keys in contents.matrices.items()
            if position in own.matrices
        }
        named = {
            position: stored
            for position, stored in contents.vectors.items()
            if position in own.vectors
        }
        stored = [name for keys in wanted.values() for name in keys.names.values()] + list(
            named.values()
        )
        with ThreadPoolExecutor(_DIGESTING_THREADS) as alongside:
            data, digests = _read(file, frozenset(stored), alongside)
            for position, keys in wanted.items():
                matrices[position] = _difference(file, keys, data, dtype)
            digest.update(_settings(file, contents))
            results = {name: each.result() for name, each in digests.items()}
            for each in results.values():
                digest.update(each.digest)
        if bad := [name for name, each in results.items() if not each.is_finite]:
            raise AdapterError(f"{file.source.where} has NaN or Inf in {some(bad)}")
        if bad := [".".join(position) for position in wanted if not matrices[position].is_finite]:
            raise AdapterError(
                f"{file.source.where} is too strong for {dtype}: NaN or Inf in {some(bad)}"
            )
        vectors |= {
            position: data[stored]
            .to(torch.float32, copy=True)
            .reshape(targets[position[0]].shapes[position[1]])
            for position, stored in named.items()
        }
    return AdapterWeights(matrices, vectors, digest.hexdigest(), tuple(skipped))


@dataclass(frozen=True)
class TargetNames:
    matrices: frozenset[TargetName]
    vectors: frozenset[TargetName]


def _read(
    file: AdapterFile, wanted: Collection[str], alongside: Executor
) -> tuple[dict[str, torch.Tensor], dict[str, "Future[_Checked]"]]:
    """Read the whole file, so that every rank computes the same digest and detects the same errors.

    Args:
        file: The file.
        wanted: Stored names of the tensors to return.
        alongside: Executor that computes the digests concurrently.

    Returns:
        The tensors in `wanted`, and the digests of all tensors in file order.
    """
    data, digests = {}, {}
    for name, tensor in file.source.read_tensors(sorted(file.source.shapes)):
        digests[name] = alongside.submit(_checked, name, tensor)
        if name in wanted:
            data[name] = tensor
    return data, digests


@dataclass(frozen=True)
class _Checked:
    digest: bytes
    is_finite: bool


def _checked(name: str, tensor: torch.Tensor) -> _Checked:
    digest = hashlib.blake2b(
        f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16
    )
    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return _Checked(digest.digest(), _is_finite(tensor))


def _settings(file: AdapterFile, contents: AdapterFileContents) -> bytes:
    """Return the strengths that a file specifies, as bytes to include in the digest."""
    modules = {keys.settings_name for keys in contents.matrices.values()}
    strengths = (
        [] if file.scaling is None else [(name, file.scaling(name)) for name in sorted(modules)]
    )
    return repr((file.network, strengths)).encode()


def _difference(
    file: AdapterFile, keys: MatrixKeys, data: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> LowRank:
    def read(kind: Kind) -> torch.Tensor | None:
        return data[keys.names[kind]] if kind in keys.names else None

    down, up, alpha, bias, whole = (read(kind) for kind in ("down", "up", "alpha", "bias", "diff"))
    downs, ups = [], []
    if down is not None and up is not None:
        scaling = 1.0 if file.scaling is None else file.scaling(keys.settings_name)
        if alpha is not None:
            scaling = float(alpha) / down.shape[0]
        downs.append(down.flatten(1))
        ups.append(up.flatten(1) if scaling == 1 else up.flatten(1).float() * scaling)
    if whole is not None:
        first, second = _factors(whole.flatten(1).float())
        downs.append(first)
        ups.append(second)
    return LowRank(
        _used_tensors(downs, 0, dtype),
        _used_tensors(ups, 1, dtype),
        None if bias is None else _used_tensors([bias.flatten()], 0, dtype),
    )


def _used_tensors(
    parts: Sequence[torch.Tensor], dim: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Concatenate the parts into newly allocated memory, because the parts may be views of the
    file.
    """
    if len(parts) > 1:
        return torch.cat([part.float() for part in parts], dim=dim).to(dtype)
    return parts[0].to(dtype, copy=True).contiguous() if parts else None


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all elements are finite. One pass over memory is usually enough: the sum is
    NaN or Inf if any element is NaN or Inf, and a sum of finite elements rarely overflows.
    """
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(
        torch.isfinite(tensor.float()).all()
    )


def _factors(whole_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor a full delta exactly into (down, up). The rank is the smaller dimension of the
    delta.
    """
    outputs, inputs = whole_OI.shape
    if outputs <= inputs:
        return whole_OI, torch.eye(outputs)
    return torch.eye(inputs), whole_OI


def _check(
    file: AdapterFile,
    contents: AdapterFileContents,
    targets: Mapping[str, AdapterTarget],
    max_rank: int,
) -> list[str]:
    """Remove from `contents` the modules whose shapes do not match the model, and return the stored
    names of their tensors.

    Raises:
        AdapterError: The file is malformed, or none of its modules match the model. The message
            contains a count and three examples for each kind of problem.
    """
    shapes = file.source.shapes
    if not shapes:
        raise AdapterError(f"{file.source.where} holds no tensor")
    misfits, skipped = _take_misfits(contents, shapes, targets)
    problems: dict[str, list[str]] = {
        "of no LoRA adapter": contents.unread,
        "of a dtype that is no float": [
            name
            for name, dtype in file.source.dtypes.items()
            if not dtype.is_floating_point and name not in {*contents.strange, *skipped}
        ],
        "without their other half": [],
        "misshapen": [],
        "of rank 0": [],
        f"of a rank above --max-lora-rank {max_rank}": [],
    }
    *_, halves, misshapen, empty, too_high = problems.values()
    for (_, module), keys in contents.matrices.items():
        rank = _check_matrix(keys, shapes, halves, misshapen)
        if rank > max_rank:
            too_high.append(f"{module} {rank}")
        elif rank == 0 and "down" in keys.names:
            empty.append(keys.names["down"])
    if not contents.matrices and not contents.vectors:
        problems["for modules that this model lacks or keeps as they are"] = contents.strange
        misshapen += misfits
    found = {kind: names for kind, names in problems.items() if names}
    if found:
        listed = "; ".join(f"tensors {kind}: {some(names)}" for kind, names in found.items())
        raise AdapterError(f"{file.source.where} does not fit this model: {listed}")
    if file.scaling is not None:
        for keys in contents.matrices.values():
            file.scaling(keys.settings_name)  # raises if a strength is not a finite number
    return skipped


def _take_misfits(
    contents: AdapterFileContents, shapes: Mapping[str, Shape], targets: Mapping[str, AdapterTarget]
) -> tuple[list[str], list[str]]:
    """Remove all deltas whose shapes do not match the model. Return an error line for each removed
    delta, and the stored names of all removed tensors.
    """
    lines: list[str] = []
    names: list[str] = []
    for (network, module), keys in list(contents.matrices.items()):
        expected = targets[network].matrix(module)
        assert expected is not None
        if line := _misfit(keys.names, shapes, expected):
            lines.append(line)
            names += contents.matrices.pop((network, module)).names.values()
    for (network, tensor), stored in list(contents.vectors.items()):
        wanted = targets[network].vector(tensor)
        assert wanted is not None
        if _squeezed(shapes[stored]) != _squeezed(wanted):
            lines.append(f"{stored} {tuple(shapes[stored])} instead of {wanted}")
            names.append(contents.vectors.pop((network, tensor)))
    return lines, names


def _misfit(
    names: Mapping[Kind, str], shapes: Mapping[str, Shape], expected: tuple[int, int]
) -> str | None:
    """Return an error line if a module and its delta differ in their number of inputs or outputs,
    otherwise None.
    """
    outputs, inputs = expected
    if "down" in names and _flat(down := shapes[names["down"]])[1:] != (inputs,):
        return f"{names['down']} {tuple(down)} instead of {(*down[:1], inputs)}"
    if "up" in names and _flat(up := shapes[names["up"]])[:1] != (outputs,):
        return f"{names['up']} {tuple(up)} instead of {(outputs, *_flat(up)[1:])}"
    if "diff" in names and _flat(shapes[names["diff"]]) != (outputs, inputs):
        return f"{names['diff']} {tuple(shapes[names['diff']])} instead of {(outputs, inputs)}"
    if "bias" in names and _squeezed(shapes[names["bias"]]) != (outputs,):
        return f"{names['bias']} {tuple(shapes[names['bias']])} instead of {(outputs,)}"
    return None


def _check_matrix(
    keys: MatrixKeys, shapes: Mapping[str, Shape], halves: list[str], misshapen: list[str]
) -> int:
    """Append inconsistencies in one module's delta to `halves` and `misshapen`, and return the
    delta's rank.
    """
    names, rank = keys.names, 0
    if "down" in names and "up" in names:
        up, rank = shapes[names["up"]], shapes[names["down"]][0]
        if _flat(up)[1:] != (rank,):
            misshapen.append(f"{names['up']} {tuple(up)} instead of {(*up[:1], rank)}")
    elif "down" in names or "up" in names or set(names) == {"alpha"}:
        halves.append(next(iter(names.values())))
    if "diff" in names:
        rank += min(_flat(shapes[names["diff"]]))
    if "alpha" in names and _squeezed(shapes[names["alpha"]]) != ():
        misshapen.append(f"{names['alpha']} {tuple(shapes[names['alpha']])} instead of one number")
    return rank


def _flat(shape: Shape) -> tuple[int, ...]:
    """Return a matrix's shape with all dimensions after the first flattened into one."""
    inputs = 1
    for size in shape[1:]:
        inputs *= size
    return (*shape[:1], inputs) if len(shape) > 1 else tuple(shape)


def _squeezed(shape: Shape) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
