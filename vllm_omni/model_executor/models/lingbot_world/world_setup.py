# SPDX-License-Identifier: Apache-2.0
"""`WorldSetup`: checkpoint, options and ranks of one `LingBotWorld`, resolved and checked before anything is built.

Reads no weights and asks the device only whether it is there. Held by
tests/model_executor/models/lingbot_world/test_lingbot_pipeline.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions, LingBotWorldConfig
from vllm_omni.model_executor.models.wan.components import VAEConfig
from vllm_omni.model_executor.vllm_model import compiles


@dataclass(frozen=True)
class WorldSetup:
    """Everything a `LingBotWorld` is built from, resolved and checked. dtype: the transformer's.

    compiled: what `options.compile` comes to.
    """

    config: LingBotWorldConfig
    vae_config: VAEConfig
    text_config: Mapping[str, Any]
    tokenizer: Path | None
    options: LingBotOptions
    omni: OmniConfig
    parallel: ParallelContext
    dtype: torch.dtype
    compiled: bool = False

    @classmethod
    def of(
        cls,
        checkpoint: Mapping[str, Any],
        layout: CheckpointLayout,
        omni: OmniConfig,
        dtype: torch.dtype,
        parallel: ParallelContext | None = None,
        eager: bool = True,
    ) -> "WorldSetup":
        """Read a checkpoint's `hf_config(...)["lingbot_world"]`; `parallel` None = vLLM's groups. Raises ValueError.

        eager: the engine was told not to compile anything.
        """
        options = LingBotOptions.parse(omni.model, checkpoint["version"])
        return cls(
            config=LingBotWorldConfig.from_checkpoint(checkpoint["transformer"]),
            vae_config=VAEConfig.from_dict(checkpoint["vae"]),
            text_config=checkpoint["umt5"],
            tokenizer=layout.tokenizer,
            options=options,
            omni=omni,
            parallel=parallel
            or ParallelContext.from_vllm(options.sequence_parallel, omni.vae_stage, omni.partition, omni.vae_parallel),
            dtype=dtype,
            compiled=compiles(options.compile, eager),
        )
