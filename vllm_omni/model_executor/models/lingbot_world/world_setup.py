# SPDX-License-Identifier: Apache-2.0
"""`WorldSetup`: checkpoint, options and ranks of one `LingBotWorld`, resolved and checked before anything is built.

Held by tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions, LingBotWorldConfig, read_stream
from vllm_omni.model_executor.models.wan.chunk_setup import WanChunkSetup
from vllm_omni.worlds.served import ServedWorld


class WorldSetup(WanChunkSetup[LingBotWorldConfig, LingBotOptions, CheckpointLayout]):
    """Everything a `LingBotWorld` is built from: of `hf_config(...)["lingbot_world"]`."""

    read_stream = staticmethod(read_stream)

    @property
    def world(self) -> ServedWorld | None:
        """The world that a `world` model's sessions have poses in, read from files. Raises ValueError."""
        return ServedWorld.load(self.layout.root) if self.config.control_type == "world" else None
