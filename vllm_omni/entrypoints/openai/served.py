# SPDX-License-Identifier: Apache-2.0
"""`ServedModel`: names, capabilities and sizes of the model that the OpenAI routes serve.

If a model family does not set a field, such as the default size or the maximum number of pixels,
this module derives it from the deployment. The routes therefore always have a value for such a
field.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.engine.session_placement import num_data_parallel_ranks
from vllm_omni.entrypoints.errors import not_found
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.inputs import Lora
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.model_executor.models.registry import get_family

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class SizeLimits:
    """Default size and size limits of generated images or videos."""

    width: int
    """Default width in pixels."""
    height: int
    """Default height in pixels."""
    max_pixels: int
    """Maximum number of pixels in a generated image or frame."""
    max_side: int
    """Maximum width and height in pixels."""
    multiple: tuple[int, int]
    """Width and height in pixels must be multiples of these two values, respectively."""


@dataclass(frozen=True)
class ServedModel:
    """The served model's properties, with every default resolved to a value."""

    names: tuple[str, ...]
    """Served model names. Replies contain the first name."""
    capabilities: Capabilities
    """The model family's capabilities."""
    width: int
    """Default video width in pixels."""
    height: int
    """Default video height in pixels."""
    max_pixels: int
    """Maximum number of pixels in a frame."""
    max_sessions: int
    """Maximum number of sessions across all data-parallel ranks."""
    world: StreamInfo | None = None
    """Stream metadata of a world model. None: the model has no sessions."""
    adapters: Callable[[], Collection[str]] = tuple
    """Function that returns the names of the LoRA adapters that are currently loaded."""

    def adapter_named(self, model: str | None) -> list[Lora]:
        """Return the LoRA adapter that a request selects with its `model` field, as in stock vLLM.

        Returns:
            A list that contains the adapter, or [] if `model` names the served model itself.

        Raises:
            ApiError: Status 404 if the name is unknown.
        """
        if model is None or model in self.names:
            return []
        adapters = self.adapters()
        if model not in adapters:
            served = ", ".join([*self.names, *adapters])
            raise not_found(
                f"The model {model[:100]!r} does not exist; served: {served}",
                "model",
                "model_not_found",
            )
        return [Lora(name=model)]

    @property
    def videos(self) -> SizeLimits:
        return self._sizes(self.width, self.height, self.max_pixels)

    @property
    def images(self) -> SizeLimits:
        sizes = self.capabilities.pictures
        if sizes is None:
            return self.videos
        return self._sizes(sizes.width, sizes.height, sizes.max_pixels)

    def _sizes(self, width: int, height: int, max_pixels: int) -> SizeLimits:
        return SizeLimits(
            width, height, max_pixels, self.capabilities.max_side, self.capabilities.size_multiple
        )

    @classmethod
    def from_vllm_config(cls, vllm_config: "VllmConfig", names: Sequence[str]) -> "ServedModel":
        hf_config: dict[str, Any] = vllm_config.model_config.hf_config.to_dict()
        omni = OmniConfig.from_additional_config(vllm_config.additional_config)
        family = get_family(hf_config["omni_family"])
        capabilities = (
            Capabilities() if family.capabilities is None else family.capabilities(hf_config, omni)
        )
        world = None
        if capabilities.is_world:
            world = StreamInfo.from_vllm_config(vllm_config, model=names[0])
            capabilities = msgspec.structs.replace(
                capabilities, size_multiple=world.size_multiple, fps=world.fps
            )
        return cls(
            names=tuple(names),
            capabilities=capabilities,
            width=capabilities.width or omni.width,
            height=capabilities.height or omni.height,
            max_pixels=capabilities.max_pixels or omni.max_area,
            max_sessions=omni.max_sessions * num_data_parallel_ranks(vllm_config),
            world=world,
        )
