# SPDX-License-Identifier: Apache-2.0
"""The `lingbot_world` family, described for the command line, config parser and endpoints."""

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Refusals
from vllm_omni.model_executor.models.lingbot_world.camera import ACTION_SPACE
from vllm_omni.model_executor.models.lingbot_world.checkpoint import (
    LAYOUTS,
    hf_config,
    is_checkpoint,
)
from vllm_omni.model_executor.models.lingbot_world.config import (
    ACTION_FOCAL,
    NATIVE_HEIGHT,
    NATIVE_WIDTH,
    LingBotStream,
    read_stream,
)
from vllm_omni.model_executor.models.lingbot_world.plan import PLAN
from vllm_omni.model_executor.models.wan.splits import check_split, parallel_decode_refusal
from vllm_omni.model_executor.models.wan.vae.latents import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.streaming.family import streaming_family


def _check_parallel(stream: LingBotStream, omni: OmniConfig, ranks: int, stages: int) -> None:
    check_split(
        stream.config, omni, ranks, stages, sequence_parallel=stream.options.sequence_parallel
    )


FAMILY = streaming_family(
    name="lingbot_world",
    title="LingBot World Fast: causal, camera-controlled image-to-video",
    architecture="LingBotWorldPipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=read_stream,
    refusals=lambda stream, omni, stages: Refusals(
        vae_stage=None,
        vae_parallel=parallel_decode_refusal(stream.options.decoder),
        kv_growth=None,
    ),
    check_parallel=_check_parallel,
    action_space=lambda stream: ACTION_SPACE,
    info=lambda _: {
        "vae_stride": (VAE_TEMPORAL, VAE_SPATIAL, VAE_SPATIAL),
        "intrinsics_reference_size": (NATIVE_WIDTH, NATIVE_HEIGHT),
        "key_focal": ACTION_FOCAL,
    },
    takes_adapters=True,
    session_windows=True,
    plan=PLAN,
)
