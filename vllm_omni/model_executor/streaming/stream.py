# SPDX-License-Identifier: Apache-2.0
"""`StreamModelSetup`: architecture, options and chunk plan of a served streaming model.

Each family has one function that creates it, for the command line and the worker (`read_stream` in
its `config.py`).
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.options import StreamingOptions


class StreamArchitecture(Protocol):
    """Architecture of a streaming model, as stated by its checkpoint."""

    @property
    def hidden_size(self) -> int:
        """Number of channels of a token."""
        ...

    @property
    def native_size(self) -> tuple[int, int]:
        """Default height and width in pixels: those of the training videos."""
        ...

    def latent_size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the latents of a video.

        Raises:
            ValueError: The model does not support this size.
        """
        ...


Config = TypeVar("Config", bound=StreamArchitecture)
Options = TypeVar("Options", bound=StreamingOptions)


@dataclass(frozen=True)
class StreamModelSetup(Generic[Config, Options]):
    """One checkpoint as it is served."""

    config: Config
    """Architecture of the checkpoint."""
    options: Options
    """Options of the server."""
    plan: ChunkPlan
    """Chunks of its streams."""
    few_steps: int | None = None
    """Denoise steps of a chunk without degradations. None: the model always needs all its steps."""
