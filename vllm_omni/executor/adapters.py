# SPDX-License-Identifier: Apache-2.0
"""`PipelineAdapters`: loads, selects and unloads a pipeline's LoRA adapters.

An adapter is loaded into the pipeline's modules once and is disabled by default. A request selects
adapters by name and may give each a strength. A request that selects no adapters has the same
result as if no adapters were loaded.
"""

import logging
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_omni.model_executor.checkpoint.tensor_files import copy_unchanged
from vllm_omni.model_executor.models.diffusers_pipeline.options import LoraSource
from vllm_omni.outputs import RequestFailed

logger = logging.getLogger("vllm." + __name__)

Selection = tuple[tuple[str, float], ...]
"""Names and strengths of a request's adapters, in request order."""


class PipelineAdapters:
    """One pipeline's LoRA adapters.

    Args:
        sources: Adapters to load with the pipeline, by name.
    """

    def __init__(self, sources: Mapping[str, LoraSource]) -> None:
        self._sources = dict(sources)
        self._ids: dict[int, str] = {}
        self._active: Selection | None = None
        """Adapters that are currently enabled in the pipeline. None: unknown, because adapters have
        been loaded or unloaded since the last call to `activate`.
        """

    @property
    def names(self) -> list[str]:
        return list(self._sources)

    @property
    def ids(self) -> set[int]:
        """Ids of the adapters that were added through vLLM's own LoRA calls."""
        return set(self._ids)

    def load_all(self, pipeline: Any) -> None:
        """Load all adapters into a newly loaded pipeline.

        Raises:
            ValueError: An adapter cannot be loaded. The message names the adapter.
        """
        self._active = ()
        for name, source in self._sources.items():
            _load(pipeline, name, source)
            self._active = None
        self.activate(pipeline, ())

    def add_adapter(
        self, pipeline: Any, name: str, source: LoraSource, number: int | None = None
    ) -> bool:
        """Load an additional adapter.

        Args:
            pipeline: Pipeline into which to load the adapter.
            name: Adapter name.
            source: The adapter's files and default strength.
            number: vLLM's id for the adapter, if it was added through vLLM's own LoRA calls.

        Returns:
            False if an adapter with this name and source is already loaded.

        Raises:
            ValueError: The name is already in use, or the adapter cannot be loaded.
        """
        if name in self._sources:
            if self._sources[name] != source:
                raise ValueError(f"an adapter {name!r} is loaded from other files; unload it first")
            return False
        self._active = None
        _load(pipeline, name, source)
        self._sources[name] = source
        if number is not None:
            self._ids[number] = name
        self.activate(pipeline, ())
        return True

    def remove(self, pipeline: Any, name: str) -> bool:
        """Unload an adapter. Return False if no adapter has that name."""
        if name not in self._sources:
            return False
        self._active = None
        pipeline.delete_adapters(name)
        del self._sources[name]
        self._ids = {number: other for number, other in self._ids.items() if other != name}
        self.activate(pipeline, ())
        return True

    def remove_number(self, pipeline: Any, number: int) -> bool:
        """Unload the adapter with the given vLLM id. Return False if no adapter has that id."""
        return number in self._ids and self.remove(pipeline, self._ids[number])

    def select(self, wanted: Any) -> Selection:
        """Parse a request's `lora` option: a name, a list of names, or names with strengths.

        Raises:
            RequestFailed: The option is invalid (code `invalid_request`).
        """
        if wanted is None:
            return ()
        if isinstance(wanted, str):
            wanted = [wanted]
        if isinstance(wanted, list) and all(isinstance(name, str) for name in wanted):
            wanted = {
                name: self._sources[name].scale if name in self._sources else 1.0 for name in wanted
            }
        if not isinstance(wanted, Mapping) or not all(
            isinstance(name, str)
            and isinstance(scale, int | float)
            and not isinstance(scale, bool)
            and abs(scale) <= 100
            for name, scale in wanted.items()
        ):
            raise RequestFailed(
                "invalid_request",
                "options.lora must be a name, a list of names or an object of names and strengths "
                "from -100 to 100",
            )
        for name in wanted:
            if name not in self._sources:
                known = ", ".join(self._sources) or "none is loaded"
                raise RequestFailed(
                    "invalid_request", f"options.lora: no adapter {name!r}; available: {known}"
                )
        return tuple((name, float(scale)) for name, scale in wanted.items())

    def activate(self, pipeline: Any, selection: Selection) -> None:
        """Enable the selected adapters and disable all others. If exactly these adapters are
        already enabled, do nothing.
        """
        if selection == self._active:
            return
        if selection:
            pipeline.enable_lora()
            pipeline.set_adapters(
                [name for name, _ in selection], [scale for _, scale in selection]
            )
        elif self._sources:
            pipeline.disable_lora()
        self._active = selection


def _load(pipeline: Any, name: str, source: LoraSource) -> None:
    if not hasattr(pipeline, "load_lora_weights"):
        raise ValueError(
            f"LoRA adapter {name!r}: {type(pipeline).__name__} does not support adapters"
        )
    try:
        import peft  # noqa: F401 - without peft, diffusers would fail only after loading half of the weights
    except ImportError as error:
        raise ValueError(
            f"LoRA adapter {name!r} requires the package 'peft': pip install peft"
        ) from error
    path = Path(source.path)
    if not path.exists():
        raise ValueError(f"LoRA adapter {name!r}: {path} does not exist")
    folder, weight_name = (path.parent, path.name) if path.is_file() else (path, source.weight_name)
    if weight_name is None:
        files = sorted(file.name for file in folder.glob("*.safetensors"))
        if len(files) != 1:
            raise ValueError(
                f"LoRA adapter {name!r}: {folder} holds {len(files)} *.safetensors files; name one "
                "with weight_name"
            )
        weight_name = files[0]
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-omni-adapter-") as private:
            # diffusers memory-maps the file, so load a copy that other processes cannot overwrite.
            copy_unchanged(folder / weight_name, Path(private) / Path(weight_name).name)
            pipeline.load_lora_weights(
                private,
                weight_name=Path(weight_name).name,
                adapter_name=name,
                use_safetensors=True,
                local_files_only=True,
            )
    except Exception as error:  # boundary: the loader may raise any exception for a malformed file
        raise ValueError(
            f"LoRA adapter {name!r} from {folder / weight_name} does not fit: {error}"
        ) from error
    if not any(name in names for names in pipeline.get_list_adapters().values()):
        raise ValueError(
            f"LoRA adapter {name!r}: {folder / weight_name} has no weights for "
            f"{type(pipeline).__name__}"
        )
    if problem := _not_finite(pipeline, name):
        pipeline.delete_adapters(name)
        raise ValueError(
            f"LoRA adapter {name!r} from {folder / weight_name} has NaN or Inf: {problem}"
        )
    logger.info("LoRA adapter %s loaded from %s", name, folder / weight_name)


def _not_finite(pipeline: Any, name: str) -> str | None:
    """Describe an adapter's first non-finite strength or tensor. Return None if all are finite."""
    from peft.tuners.lora import LoraLayer

    for component in pipeline.components.values():
        for position, module in (
            component.named_modules() if isinstance(component, nn.Module) else ()
        ):
            if not isinstance(module, LoraLayer) or name not in module.scaling:
                continue
            if not math.isfinite(module.scaling[name]):
                return f"the strength of {position} is {module.scaling[name]}"
            halves = [half[name] for half in (module.lora_A, module.lora_B) if name in half]
            if not all(
                torch.isfinite(tensor).all() for half in halves for tensor in half.parameters()
            ):
                return f"the tensors of {position}"
    return None
