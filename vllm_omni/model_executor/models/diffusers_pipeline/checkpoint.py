# SPDX-License-Identifier: Apache-2.0
"""Check a diffusers pipeline directory: `model_index.json`, components and weight files.

Only JSON files and file headers are read, so `vllm serve --omni` can reject a broken directory
within a second. Weights must be safetensors files. Pickled weights and code inside a checkpoint are
rejected.
"""

import json
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model_index.json"
_WEIGHTLESS = (
    "Tokenizer",
    "TokenizerFast",
    "Scheduler",
    "Processor",
    "FeatureExtractor",
    "ProcessorFast",
)
_DENOISERS = ("transformer", "unet", "prior")
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_MAX_HEADER_BYTES = 100 << 20


@dataclass(frozen=True)
class PipelineIndex:
    """Parsed content of `model_index.json`."""

    class_name: str
    """Name of the pipeline class."""
    components: dict[str, tuple[str, str]]
    """`(library, class)` of each component, keyed by component name."""
    absent: tuple[str, ...] = ()
    """Names of the components that are null in the file. The pipeline's constructor receives None
    for these components."""

    @classmethod
    def read_folder(cls, path: Path) -> "PipelineIndex":
        """Read a directory's `model_index.json`. Raises a one-line ValueError if the file is
        missing or malformed.
        """
        file = path / INDEX
        try:
            index = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read as JSON ({error})") from error
        if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
            raise ValueError(
                f"{file} names no pipeline: '_class_name' must be a class of diffusers"
            )
        components, absent = {}, []
        for name, value in index.items():
            if name.startswith("_") or not isinstance(value, list):
                continue
            if len(value) != 2:
                raise ValueError(
                    f"{file}: component {name!r} must be [library, class], got {value}"
                )
            if value[0] is None:
                absent.append(name)
            else:
                components[name] = (str(value[0]), str(value[1]))
        return cls(index["_class_name"], components, tuple(absent))


def is_pipeline(path: Path) -> bool:
    """Return whether a directory contains a pipeline in the diffusers layout."""
    try:
        PipelineIndex.read_folder(path)
    except ValueError:
        return False
    return True


def check_class(name: str) -> None:
    """Raise ValueError if the installed diffusers version has no pipeline with this name. No
    pipeline is imported.
    """
    import diffusers

    if not name.endswith("Pipeline") or name not in dir(diffusers):
        raise ValueError(f"{name!r} is no pipeline of diffusers {diffusers.__version__}")


def check_components(path: Path, index: PipelineIndex, without: Collection[str] = ()) -> None:
    """Raise ValueError if a component is missing or contains code. The message names the first
    component that fails the check.
    """
    unknown = sorted(set(without) - set(index.components))
    if unknown:
        raise ValueError(
            f"omni.model.without: {unknown[0]!r} is none of {', '.join(index.components)}"
        )
    for name, (library, class_name) in index.components.items():
        if name in without:
            continue
        folder = path / name
        if not folder.is_dir():
            raise ValueError(
                f"{path} lacks the component {name!r} ({class_name}): there is no folder {name}/"
            )
        if (folder / f"{library}.py").exists():
            raise ValueError(
                f"component {name!r} brings its own code ({name}/{library}.py), which is not run"
            )


def has_weights(class_name: str) -> bool:
    """Return whether a component of this class has weights. Tokenizers, schedulers and processors
    have no weights.
    """
    return not class_name.endswith(_WEIGHTLESS)


def check_weights(path: Path, index: PipelineIndex, without: Collection[str] = ()) -> None:
    """Raise ValueError if weight files are missing or pickled. The message names the first affected
    component.
    """
    for name, (_, class_name) in index.components.items():
        if name not in without and has_weights(class_name) and (path / name).is_dir():
            _check_weights(path / name, name)


def _check_weights(folder: Path, name: str) -> None:
    if not any(folder.glob("*.safetensors")):
        pickled = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
        what = "only pickled weights, which are not loaded; convert them to" if pickled else "no"
        raise ValueError(f"component {name!r}: {folder} holds {what} *.safetensors")
    for listing in folder.glob("*.safetensors.index.json"):
        try:
            files = set(json.loads(listing.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"component {name!r}: {listing} cannot be read ({error})") from error
        missing = sorted(file for file in files if not (folder / file).is_file())
        if missing:
            raise ValueError(
                f"component {name!r}: {len(missing)} of {len(files)} files are missing, e.g. "
                f"{missing[0]}"
            )


def stored_dtype(path: Path, index: PipelineIndex) -> str:
    """Return the dtype that takes up the most bytes in the denoiser's first weight file, or float32
    if there is no denoiser.
    """
    for name in _DENOISERS:
        if name in index.components:
            for file in sorted((path / name).glob("*.safetensors")):
                sizes: dict[str, int] = {}
                for entry in _header(file).values():
                    start, end = entry["data_offsets"]
                    sizes[entry["dtype"]] = sizes.get(entry["dtype"], 0) + end - start
                if sizes:
                    return _DTYPES.get(max(sizes, key=sizes.__getitem__), "float32")
    return "float32"


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is no safetensors file")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file} is no safetensors file ({error})") from error
    header.pop("__metadata__", None)
    return dict(header)


def component_config(path: Path, name: str) -> dict[str, Any]:
    """Return a component's `config.json`, or {} if it has none."""
    try:
        config = json.loads((path / name / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def temporal_stride(path: Path) -> int:
    """Return the number of video frames per latent frame, from the VAE's config. Default: 4, as for
    Wan and HunyuanVideo.
    """
    vae = component_config(path, "vae")
    for key in ("scale_factor_temporal", "temporal_compression_ratio"):
        if isinstance(vae.get(key), int):
            return int(vae[key])
    return 4
