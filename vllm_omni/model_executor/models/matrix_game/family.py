# SPDX-License-Identifier: Apache-2.0
"""Describes the `matrix_game` family for the command line, the config parser and the endpoints."""

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Capabilities, Refusals
from vllm_omni.model_executor.models.matrix_game.checkpoint import (
    LAYOUTS,
    find_layout,
    hf_config,
    is_checkpoint,
)
from vllm_omni.model_executor.models.matrix_game.config import (
    FPS,
    PRESETS,
    MatrixGameStream,
    read_stream,
)
from vllm_omni.model_executor.models.matrix_game.plan import PLAN
from vllm_omni.model_executor.models.wan.checkpoint.layout import check_tiny_vae
from vllm_omni.model_executor.models.wan.splits import check_split, parallel_decode_refusal
from vllm_omni.model_executor.models.wan.vae.latents import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.streaming.degradations import ladder_refusals
from vllm_omni.model_executor.streaming.family import streaming_family


def _check_parallel(stream: MatrixGameStream, omni: OmniConfig, ranks: int, stages: int) -> None:
    others = {"action_config.heads_num": stream.config.action_heads}
    ulysses = stream.options.sequence_parallel
    check_split(stream.config, omni, ranks, stages, sequence_parallel=ulysses, others=others)


def _refusals(stream: MatrixGameStream, omni: OmniConfig, stages: int) -> Refusals:
    return Refusals(
        vae_stage=None,
        vae_parallel=parallel_decode_refusal(stream.options.decoder),
        kv_growth=None,
        **ladder_refusals(stream),
    )


FAMILY = streaming_family(
    name="matrix_game",
    title="Matrix-Game 2.0: a world played with keys and mouse, from an image",
    architecture="MatrixGamePipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=read_stream,
    presets=PRESETS,
    check_tiny_decoder=lambda path, option: check_tiny_vae(find_layout(path), option),
    refusals=_refusals,
    check_parallel=_check_parallel,
    action_space=lambda stream: stream.config.variant.space,
    info=lambda _: {"fps": FPS, "vae_stride": (VAE_TEMPORAL, VAE_SPATIAL, VAE_SPATIAL)},
    capabilities=lambda config, omni: Capabilities(fps=FPS),
    takes_adapters=True,
    session_windows=True,
    plan=PLAN,
)
