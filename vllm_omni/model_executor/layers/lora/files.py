# SPDX-License-Identifier: Apache-2.0
"""An adapter's files, and the naming styles that their tensors follow: diffusers, PEFT, kohya and
the Wan community's.

    transformer.blocks.0.attn1.to_q.lora_A.weight
        diffusers; `transformer_2.` for a second network
    base_model.model.blocks.0.self_attn.q.lora_A.weight
        PEFT, with adapter_config.json in the same directory
    lora_unet_blocks_0_self_attn_q.lora_down.weight, .alpha       kohya, musubi-tuner
    diffusion_model.blocks.0.self_attn.q.lora_down.weight, .alpha ComfyUI and others
    ... .diff, .diff_b, .diff_m
        full deltas of a weight, a bias, or modulation

Names are parsed and compared with the model's names before any data is read (`adapter.py`). Adapter
files are untrusted, so they are opened through `tensor_files.py`. Diffusers' converters for musubi
and ComfyUI are not used, because they require every block and all data, drop deltas for norms, and
fail on layers that Wan lacks, such as LingBot World's camera layers.
tests/model_executor/layers/lora/test_adapter_files.py covers the naming styles.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import get_adapter_absolute_path

from vllm_omni.model_executor.checkpoint.tensor_files import (
    TensorSource,
    UnmappedSource,
    confined,
    read_json,
)
from vllm_omni.model_executor.layers.lora.target import AdapterTarget

Kind = Literal["down", "up", "alpha", "bias", "diff"]

_PEFT_CONFIG, _PEFT_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
_DIFFUSERS_SETTINGS = "lora_adapter_metadata"
"""Metadata key that holds the PEFT settings in diffusers' files. Each module name in the settings
is prefixed with the name of its network.
"""
_KOHYA = "lora_unet_"
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "pipe.dit.", "dit.")
_KINDS: tuple[tuple[str, Kind], ...] = (
    (r"\.lora_(?:B|up)(?:\.[\w-]+)?\.bias\Z|\.diff_b\Z", "bias"),
    (r"\.lora_(?:A|down)(?:\.[\w-]+)?\.weight\Z|\.lora\.down\.weight\Z", "down"),
    (r"\.lora_(?:B|up)(?:\.[\w-]+)?\.weight\Z|\.lora\.up\.weight\Z", "up"),
    (r"\.alpha\Z", "alpha"),
    (r"\.diff(?:_m)?\Z", "diff"),
)
"""Suffixes of tensor names. Some versions of PEFT insert the adapter's name before `.weight`."""


class AdapterError(ValueError):
    """An adapter does not fit the model. The one-line message lists the kinds of tensors found in
    the adapter's files, the kinds that the model accepts, and three examples.
    """


@dataclass
class MatrixKeys:
    """The stored names of the tensors that make up one module's delta."""

    settings_name: str
    """Name of the module in PEFT's settings."""
    names: dict[Kind, str] = field(default_factory=dict)
    """Stored tensor names, keyed by kind."""


@dataclass(frozen=True)
class AdapterFile:
    """One file of an adapter."""

    source: TensorSource
    """The open file."""
    network: str | None
    """The network that the file applies to. None: the tensor names determine the network."""
    scaling: Callable[[str], float] | None
    """Function that maps a module's stored name to its strength in the PEFT settings. None:
    strengths are stored in tensors.
    """


@dataclass
class AdapterFileContents:
    """The parsed tensor names of a file."""

    matrices: dict[tuple[str, str], MatrixKeys] = field(default_factory=dict)
    """Stored names of each linear layer's delta, keyed by (network, module)."""
    vectors: dict[tuple[str, str], str] = field(default_factory=dict)
    """Stored name of the delta for each gain, norm bias or modulation, keyed by (network, tensor).
    """
    strange: list[str] = field(default_factory=list)
    """Stored names of modules or networks that the model lacks or that adapters may not change."""
    unread: list[str] = field(default_factory=list)
    """Stored names that belong to the model's modules but have an unsupported suffix."""


def open_adapter(path: str, targets: Mapping[str, AdapterTarget]) -> list[AdapterFile]:
    """Open an adapter without reading its data. An adapter is a file, or a directory that contains
    either a single file or one file per network.

    Args:
        path: Path from vLLM's `--lora-modules`.
        targets: The model's networks, keyed by name.

    Raises:
        AdapterError: The adapter does not exist or is not a safetensors file. The message is one
            line.
        ValueError: A file cannot be read. The message is one line.
    """
    where = Path(get_adapter_absolute_path(path))
    if not where.exists():
        raise AdapterError(f"{where} does not exist; name a directory or a .safetensors file")
    config = where / _PEFT_CONFIG
    if where.is_dir() and config.is_file():
        helper = _helper(read_json(config), str(config))
        return [AdapterFile(_opened(where / _PEFT_WEIGHTS), None, _scaling(helper, str(config)))]
    paths = _files_in(where, targets) if where.is_dir() else [where]
    if paths[0].suffix != ".safetensors":
        raise AdapterError(f"{paths[0]} is no .safetensors file; convert it")
    return [
        AdapterFile(source, _marked_network(file, targets), _stored_scaling(source, targets))
        for file, source in ((file, _opened(file)) for file in paths)
    ]


def _opened(file: Path) -> UnmappedSource:
    """Open a file without memory-mapping it, because it may be overwritten with a new version while
    the server runs.
    """
    return UnmappedSource.open(confined(file.parent, file.name))


def read_names(file: AdapterFile, targets: Mapping[str, AdapterTarget]) -> AdapterFileContents:
    """Group a file's tensor names by network, module and kind. Names that do not match the model
    are recorded in the result and do not raise an error.
    """
    contents = AdapterFileContents()
    kohya = {name: _flat_names(target) for name, target in targets.items()}
    for stored in file.source.shapes:
        name, networks = _networks(stored, file.network, targets)
        found = next(
            ((match, kind) for end, kind in _KINDS if (match := re.search(end, name))), None
        )
        if found is None:
            is_here = any(
                _has_module(name, targets[network], kohya[network]) for network in networks
            )
            (contents.unread if is_here else contents.strange).append(stored)
            continue
        match, kind = found
        module = name[: match.start()]
        placed = False
        for network in networks:
            target = targets[network]
            own = (
                kohya[network].get(module.removeprefix(_KOHYA), module)
                if module.startswith(_KOHYA)
                else module
            )
            placed |= _target_of(
                contents, network, target, (stored, own, kind), modulation=name.endswith(".diff_m")
            )
        if not placed:
            contents.strange.append(stored)
    return contents


def _target_of(
    contents: AdapterFileContents,
    network: str,
    target: AdapterTarget,
    key: tuple[str, str, Kind],
    *,
    modulation: bool,
) -> bool:
    """Record one tensor name in `contents`. Return False if the network lacks the module that the
    name belongs to.
    """
    stored, named, kind = key
    module = target.module_named(named)
    if modulation:
        module = f"{module}.modulation"
    if target.matrix(module) is not None:
        keys = contents.matrices.setdefault((network, module), MatrixKeys(named))
        keys.names[kind] = stored
        return True
    tensors = {"diff": (f"{module}.weight", module), "bias": (f"{module}.bias",)}.get(kind, ())
    tensor = next((tensor for tensor in tensors if target.vector(tensor) is not None), None)
    if tensor is None:
        return False
    contents.vectors[network, tensor] = stored
    return True


def _has_module(name: str, target: AdapterTarget, flat_names: Mapping[str, str]) -> bool:
    """Return whether `name` starts with the name of a module that an adapter may change."""
    parts = name.split(".")
    modules = [".".join(parts[:count]) for count in range(1, len(parts))]
    return parts[0].removeprefix(_KOHYA) in flat_names or any(
        target.matrix(target.module_named(module)) is not None for module in modules
    )


def _networks(
    stored: str, marked: str | None, targets: Mapping[str, AdapterTarget]
) -> tuple[str, list[str]]:
    """Strip the prefixes from a tensor name. Return the stripped name, and the networks that it
    applies to: the network that the name starts with (none if the model lacks it), otherwise
    `marked`, otherwise all networks.
    """
    name, networks = stored, list(targets) if marked is None else [marked]
    while prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    first, _, rest = name.partition(".")
    if re.fullmatch(r"transformer(_\d)?", first):
        return rest, [first] if first in targets else []
    return name, networks


def _flat_names(target: AdapterTarget) -> dict[str, str]:
    """Return the module names, keyed by their kohya names. Kohya replaces dots with underscores, so
    a kohya name alone does not show where the dots were.
    """
    return {module.replace(".", "_"): module for module in target.matrices()}


def _files_in(folder: Path, targets: Mapping[str, AdapterTarget]) -> list[Path]:
    """Return the adapter files in a directory: one file, or one file per network."""
    if (folder / _DIFFUSERS_WEIGHTS).is_file():
        return [folder / _DIFFUSERS_WEIGHTS]
    files = sorted(folder.glob("*.safetensors"))
    marks = [_marked_network(file, targets) for file in files]
    if len(files) == 1 or (files and None not in marks and len(set(marks)) == len(marks)):
        return files
    names = ", ".join(file.name for file in files[:3]) or "none"
    raise AdapterError(
        f"{folder} holds {len(files)} *.safetensors files ({names}); name one of them"
    )


def _marked_network(file: Path, targets: Mapping[str, AdapterTarget]) -> str | None:
    """Return the network that the file name denotes, or None if it does not denote one."""
    name = file.name.lower()
    return next(
        (
            network
            for network, one in targets.items()
            if one.file_mark and re.search(one.file_mark, name)
        ),
        None,
    )


def _stored_scaling(
    file: UnmappedSource, targets: Mapping[str, AdapterTarget]
) -> Callable[[str], float] | None:
    """Return a function that looks up strengths in the PEFT settings that diffusers stores in a
    file's metadata. Return None if the file has no such settings.
    """
    text = file.metadata.get(_DIFFUSERS_SETTINGS)
    if text is None:
        return None
    try:
        settings = json.loads(text)
        own = {
            key.split(".", 1)[1]: value
            for key, value in settings.items()
            if key.split(".", 1)[0] in targets
        }
    except (ValueError, AttributeError, IndexError) as error:
        raise AdapterError(
            f"{file.where}: its metadata {_DIFFUSERS_SETTINGS!r} is no table of settings"
        ) from error
    return _scaling(_helper(own, file.where), file.where) if own else None


def _helper(settings: dict[str, Any], where: str) -> PEFTHelper:
    try:
        helper = PEFTHelper.from_dict(
            {**settings, "target_modules": settings.get("target_modules") or []}
        )
    except Exception as error:  # vLLM's reader raises arbitrary errors on malformed settings
        raise AdapterError(f"{where}: its settings cannot be read ({error})") from error
    # Call only the part of `validate_legal` that does not check the rank, because the tensors
    # determine the rank.
    if problems := helper._validate_features():
        raise AdapterError(f"{where}: {' '.join(problems)}")
    return helper


def _scaling(helper: PEFTHelper, where: str) -> Callable[[str], float]:
    def scaling(module: str) -> float:
        try:
            found = float(helper.get_rank_and_scaling(module)[1])
        # The file supplies the regular expressions and the numbers, so any error is possible.
        except Exception as error:
            raise AdapterError(
                f"{where}: its settings of {module} cannot be read ({error})"
            ) from error
        if not math.isfinite(found):
            raise AdapterError(
                f"{where}: the strength of {module} (lora_alpha over r) is {found}, not a "
                "finite number"
            )
        return found

    return scaling
