# SPDX-License-Identifier: Apache-2.0
"""`WorldSetup`: checkpoint, options and ranks of one `LingBotWorld`, resolved and checked before anything is built.

Held by tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions, LingBotWorldConfig, read_stream
from vllm_omni.model_executor.models.wan.chunk_setup import WanChunkSetup


class WorldSetup(WanChunkSetup[LingBotWorldConfig, LingBotOptions, CheckpointLayout]):
    """Everything a `LingBotWorld` is built from: of `hf_config(...)["lingbot_world"]`."""

    read_stream = staticmethod(read_stream)
