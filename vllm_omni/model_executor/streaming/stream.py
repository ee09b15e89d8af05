# SPDX-License-Identifier: Apache-2.0
"""`Stream`: a checkpoint's architecture, the options it is served with, and how its streams are cut
into chunks.

Each family has one function that reads it (`read_stream` of its `config.py`), for the command line
and the worker.
Held by tests/test_combinations.py and the models' own configuration tests.
"""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.options import StreamingOptions


class Architecture(Protocol):
    @property
    def hidden_size(self) -> int:
        """Channels of a token."""
        ...

    @property
    def native_size(self) -> tuple[int, int]:
        """Height and width, in pixels, of the videos that the model was trained for: the
        default.
        """
        ...

    def latent_size(self, height: int, width: int) -> tuple[int, int]: ...


Config = TypeVar("Config", bound=Architecture)
Options = TypeVar("Options", bound=StreamingOptions)


@dataclass(frozen=True)
class StreamModelSetup(Generic[Config, Options]):
    """One checkpoint as it is served."""

    config: Config
    options: Options
    plan: ChunkPlan
