# SPDX-License-Identifier: Apache-2.0
"""`StreamModelSetup`: architecture, options and chunk plan of a served streaming model.

Each family has one function that creates its `StreamModelSetup`, for both the command line and the
worker: `read_stream` in the family's `config.py`.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.options import StreamingOptions


class StreamArchitecture(Protocol):
    """Architecture of a streaming model, as described by its checkpoint."""

    @property
    def hidden_size(self) -> int:
        """Number of channels per token."""
        ...

    @property
    def native_size(self) -> tuple[int, int]:
        """Default height and width in pixels: the size of the training videos."""
        ...

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the latents for a video size.

        Raises:
            ValueError: The model does not support this size.
        """
        ...


Config = TypeVar("Config", bound=StreamArchitecture)
Options = TypeVar("Options", bound=StreamingOptions)


@dataclass(frozen=True)
class StreamModelSetup(Generic[Config, Options]):
    """Architecture, options and chunk plan of one served checkpoint."""

    config: Config
    """Architecture of the checkpoint."""
    options: Options
    """Streaming options of the server."""
    plan: ChunkPlan
    """Chunk plan of the model's streams."""
    few_steps: int | None = None
    """Number of denoise steps in a chunk without degradations, or None if the model always needs
    all steps.
    """
