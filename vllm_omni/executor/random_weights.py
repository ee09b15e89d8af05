# SPDX-License-Identifier: Apache-2.0
"""Creates a pipeline directory's components with random weights generated on the target device.

With `--load-format dummy`, random weights allow models to be benchmarked at their real size without
their weight files. Only the configs in the directory are read. Generating 20 billion parameters on
a GPU takes seconds, because nothing is initialised on the host. The seed depends only on the
component's name.
"""

import importlib
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_omni.model_executor.models.diffusers_pipeline.checkpoint import PipelineIndex, has_weights

_STD = 0.02


def random_components(
    path: Path,
    index: PipelineIndex,
    without: Collection[str],
    dtypes: Mapping[str, torch.dtype],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, nn.Module]:
    """Return a pipeline's model components, initialised with random weights.

    Args:
        path: Pipeline directory.
        index: Description of the pipeline's components.
        without: Names of components to omit.
        dtypes: Dtypes of individual components, by name.
        dtype: Dtype of all other components.
        device: Device on which to generate the weights.

    Raises:
        ValueError: A component's library is not supported.
    """
    return {
        name: _random(path / name, library, class_name, dtypes.get(name, dtype), device)
        for name, (library, class_name) in index.components.items()
        if name not in without and has_weights(class_name)
    }


def _random(
    folder: Path, library: str, class_name: str, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    from accelerate import init_empty_weights

    if library not in ("diffusers", "transformers"):
        raise ValueError(
            f"component {folder.name!r} of library {library!r} cannot have random weights"
        )
    model_class = getattr(importlib.import_module(library), class_name)
    # Parameters are created as meta tensors. Buffers are allocated, because constructors compute
    # their values.
    with init_empty_weights(include_buffers=False):
        if library == "diffusers":
            model: Any = model_class.from_config(model_class.load_config(folder))
        else:
            model = model_class(model_class.config_class.from_pretrained(folder))
    generator = torch.Generator(device).manual_seed(zlib.crc32(folder.name.encode()))
    drawn: dict[int, nn.Parameter] = {}  # keyed by id, so that tied parameters stay tied
    in_float32 = _stays_in_float32(model_class, library, dtype)
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in drawn:
                keep = in_float32 & {*path.split("."), name}
                data = torch.empty(
                    parameter.shape, dtype=torch.float32 if keep else dtype, device=device
                )
                if data.dim() > 1:
                    data.normal_(std=_STD, generator=generator)
                else:
                    data.fill_(1.0 if name.endswith("weight") else 0.0)
                drawn[id(parameter)] = nn.Parameter(data, requires_grad=False)
            module.register_parameter(name, drawn[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            # As in `from_pretrained`, a non-persistent buffer keeps the dtype in which it was
            # computed.
            persistent = name not in module._non_persistent_buffers_set
            wanted = dtype if persistent and buffer.is_floating_point() else buffer.dtype
            module.register_buffer(
                name, buffer.to(device=device, dtype=wanted), persistent=persistent
            )
    return model.eval()


def _stays_in_float32(model_class: Any, library: str, dtype: torch.dtype) -> set[str]:
    """Return the names of the modules that stay in float32 when the model is loaded with another
    dtype.
    """
    names = (
        _names(model_class, "_keep_in_fp32_modules")
        if library == "diffusers" or dtype == torch.float16
        else set()
    )
    return names | _names(model_class, "_keep_in_fp32_modules_strict")


def _names(model_class: Any, name: str) -> set[str]:
    """Return the names in a class attribute, or an empty set if the class does not have the
    attribute.
    """
    return set(getattr(model_class, name, None) or ())
