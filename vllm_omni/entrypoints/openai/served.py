# SPDX-License-Identifier: Apache-2.0
"""`ServedModel`: names, capabilities and (of a world) geometry of the model behind the OpenAI routes, fully resolved.

Fields a family leaves open (default size, largest area) is filled in from the deployment here, so that routes compare
numbers and never ask twice.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.openai.errors import not_found
from vllm_omni.entrypoints.ranks import num_ranks
from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.inputs import Lora
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.model_executor.models.registry import get_family

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Sizes:
    """Default width and height of a result in pixels, and its limits. multiple: (width, height) are multiples of it."""

    width: int
    height: int
    max_pixels: int
    max_side: int
    multiple: tuple[int, int]


@dataclass(frozen=True)
class ServedModel:
    """names: the served model's names, the first in replies. width, height, max_pixels: never None here.

    max_sessions: over all data-parallel ranks. adapters: names of the LoRA adapters that are loaded now.
    """

    names: tuple[str, ...]
    capabilities: Capabilities
    width: int
    height: int
    max_pixels: int
    max_sessions: int
    world: WorldFacts | None = None
    adapters: Callable[[], Collection[str]] = tuple

    def adapter_named(self, model: str | None) -> list[Lora]:
        """Return the adapter that a request selects by its `model`, as vLLM's clients do; [] for the model itself.

        Raises `ApiError` 404 for any other name.
        """
        if model is None or model in self.names:
            return []
        adapters = self.adapters()
        if model not in adapters:
            served = ", ".join([*self.names, *adapters])
            raise not_found(f"The model {model[:100]!r} does not exist; served: {served}", "model", "model_not_found")
        return [Lora(name=model)]

    @property
    def videos(self) -> Sizes:
        return self._sizes(self.width, self.height, self.max_pixels)

    @property
    def pictures(self) -> Sizes:
        own = self.capabilities.pictures
        return self.videos if own is None else self._sizes(own.width, own.height, own.max_pixels)

    def _sizes(self, width: int, height: int, max_pixels: int) -> Sizes:
        return Sizes(width, height, max_pixels, self.capabilities.max_side, self.capabilities.size_multiple)

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig", names: Sequence[str]) -> "ServedModel":
        hf_config: dict[str, Any] = vllm_config.model_config.hf_config.to_dict()
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        family = get_family(hf_config["omni_family"])
        capabilities = Capabilities() if family.capabilities is None else family.capabilities(hf_config, omni)
        world = None
        if capabilities.is_world:
            world = WorldFacts.from_vllm_config(vllm_config, model=names[0])
            capabilities = msgspec.structs.replace(capabilities, size_multiple=world.size_multiple, fps=world.fps)
        return cls(
            names=tuple(names),
            capabilities=capabilities,
            width=capabilities.width or omni.width,
            height=capabilities.height or omni.height,
            max_pixels=capabilities.max_pixels or omni.max_area,
            max_sessions=omni.max_sessions * num_ranks(vllm_config),
            world=world,
        )
