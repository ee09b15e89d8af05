# SPDX-License-Identifier: Apache-2.0
"""`WorldSetup`: checkpoint, options and ranks of one `LingBotWorld`, resolved and checked before anything is built.

Held by tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from collections.abc import Mapping
from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions, LingBotWorldConfig
from vllm_omni.model_executor.models.wan.chunk_setup import WanChunkSetup


class WorldSetup(WanChunkSetup[LingBotWorldConfig, LingBotOptions, CheckpointLayout]):
    """Everything a `LingBotWorld` is built from: of `hf_config(...)["lingbot_world"]`."""

    @classmethod
    def _read(cls, checkpoint: Mapping[str, Any], omni: OmniConfig) -> tuple[LingBotWorldConfig, LingBotOptions]:
        options = LingBotOptions.of(checkpoint, omni.model)
        return LingBotWorldConfig.from_checkpoint(checkpoint["transformer"]), options
