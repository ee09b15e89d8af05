# SPDX-License-Identifier: Apache-2.0
"""Creates the components of a pipeline directory with random weights, generated on their device.

Only configs are read.

This is used for `--load-format dummy`, to measure real sizes without weights. 20 billion parameters
take seconds on a GPU, because nothing is initialised on the host. The values depend only on the
name of the component.
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
    """Return the model components of a pipeline with random weights.

    Args:
        path: Pipeline directory.
        index: Its components.
        without: Components to omit.
        dtypes: Dtypes of individual components.
        dtype: Dtype of the other components.
        device: Device of the weights.

    Raises:
        ValueError: The library of a component is not supported.
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
    # Parameters are created as meta tensors; tables that a constructor computes stay real.
    with init_empty_weights(include_buffers=False):
        if library == "diffusers":
            model: Any = model_class.from_config(model_class.load_config(folder))
        else:
            model = model_class(model_class.config_class.from_pretrained(folder))
    generator = torch.Generator(device).manual_seed(zlib.crc32(folder.name.encode()))
    drawn: dict[int, nn.Parameter] = {}  # by id, so that tied parameters stay tied
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
            # As in `from_pretrained`: a buffer that is not saved keeps the dtype it was computed
            # in.
            persistent = name not in module._non_persistent_buffers_set
            wanted = dtype if persistent and buffer.is_floating_point() else buffer.dtype
            module.register_buffer(
                name, buffer.to(device=device, dtype=wanted), persistent=persistent
            )
    return model.eval()


def _stays_in_float32(model_class: Any, library: str, dtype: torch.dtype) -> set[str]:
    """Return the modules that the model's class keeps in float32 when it is loaded with another
    dtype.
    """
    names = (
        _names(model_class, "_keep_in_fp32_modules")
        if library == "diffusers" or dtype == torch.float16
        else set()
    )
    return names | _names(model_class, "_keep_in_fp32_modules_strict")


def _names(model_class: Any, name: str) -> set[str]:
    """Return a class attribute that holds names, or an empty result if the class has no such
    attribute.
    """
    return set(getattr(model_class, name, None) or ())
