# SPDX-License-Identifier: Apache-2.0
"""Describes the `lingbot_world` family for the command line, the config parser and the
endpoints.
"""

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Refusal, Refusals
from vllm_omni.model_executor.models.lingbot_world.camera import ACTION_SPACE
from vllm_omni.model_executor.models.lingbot_world.checkpoint import (
    LAYOUTS,
    find_layout,
    hf_config,
    is_checkpoint,
)
from vllm_omni.model_executor.models.lingbot_world.config import (
    ACTION_FOCAL,
    NATIVE_HEIGHT,
    NATIVE_WIDTH,
    PRESETS,
    LingBotStream,
    read_stream,
)
from vllm_omni.model_executor.models.lingbot_world.plan import PLAN
from vllm_omni.model_executor.models.wan.checkpoint.layout import check_tiny_vae
from vllm_omni.model_executor.models.wan.splits import check_split, parallel_decode_refusal
from vllm_omni.model_executor.models.wan.vae.latents import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.streaming.degradations import TINY_VAE, ladder_refusals
from vllm_omni.model_executor.streaming.family import streaming_family


def _check_parallel(stream: LingBotStream, omni: OmniConfig, ranks: int, stages: int) -> None:
    check_split(
        stream.config, omni, ranks, stages, sequence_parallel=stream.options.sequence_parallel
    )


def _refusals(stream: LingBotStream, omni: OmniConfig, stages: int) -> Refusals:
    options = stream.options
    ladder = ladder_refusals(stream)
    if options.choices.vae_continuation == "restart":
        ladder[TINY_VAE] = Refusal(
            f"convention {options.convention!r} restarts decoder 'wan' at each chunk"
        )
    return Refusals(
        vae_stage=None,
        vae_parallel=parallel_decode_refusal(options.decoder),
        kv_growth=None,
        **ladder,
    )


FAMILY = streaming_family(
    name="lingbot_world",
    title="LingBot World Fast: causal, camera-controlled image-to-video",
    architecture="LingBotWorldPipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=read_stream,
    presets=PRESETS,
    check_tiny_decoder=lambda path, option: check_tiny_vae(find_layout(path), option),
    refusals=_refusals,
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
