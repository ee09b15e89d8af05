# SPDX-License-Identifier: Apache-2.0
"""Describes the `causal_wan` family for the command line, the config parser and the endpoints."""

from typing import Any

from vllm_omni.actions import ActionSpace
from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Capabilities, Refusal, Refusals
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import (
    LAYOUTS,
    find_layout,
    hf_config,
    is_checkpoint,
    why_not,
)
from vllm_omni.model_executor.models.causal_wan.config import (
    PRESETS,
    CausalWanOptions,
    CausalWanStream,
    read_stream,
)
from vllm_omni.model_executor.models.causal_wan.plan import PLAN
from vllm_omni.model_executor.models.wan.checkpoint.layout import check_tiny_vae
from vllm_omni.model_executor.models.wan.splits import check_split, parallel_decode_refusal
from vllm_omni.model_executor.models.wan.vae.latents import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.streaming.degradations import FEWER_STEPS, ladder_refusals
from vllm_omni.model_executor.streaming.family import streaming_family


def _refusals(stream: CausalWanStream, omni: OmniConfig, stages: int) -> Refusals:
    options = stream.options
    in_flight = temporal = None
    num_steps, num_stages = options.text_schedule().num_steps, stages - omni.vae_stage
    if options.cache == "strict":
        in_flight = temporal = Refusal(
            "cache 'strict' shows a chunk the clean chunk before it, which must be complete",
            "set omni.model.cache to 'noise_matched'",
        )
    elif num_steps != num_stages:
        temporal = Refusal(
            f"a chunk has {num_steps} denoise steps and every stage with layers runs one, got "
            f"{num_stages}",
            f"pass --pipeline-parallel-size {num_steps}, or one more with omni.vae_stage",
        )
    ladder = ladder_refusals(stream)
    if options.cache != "strict":
        ladder[FEWER_STEPS] = Refusal(
            f"cache {options.cache!r} has a window for every step, so each chunk needs all steps"
        )
    return Refusals(
        vae_stage=None,
        vae_parallel=parallel_decode_refusal(options.decoder),
        chunks_in_flight=in_flight,
        temporal_pipeline=temporal,
        **ladder,
    )


def _check_parallel(stream: CausalWanStream, omni: OmniConfig, ranks: int, stages: int) -> None:
    ulysses = stream.options.sequence_parallel
    check_split(stream.config, omni, ranks, stages, sequence_parallel=ulysses)


def _capabilities(config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    options = CausalWanOptions.of_checkpoint(config["causal_wan"], omni.model)
    if options.video_input and options.cache == "strict":
        return Capabilities(tasks=("world", "text_to_video", "image_to_video"))
    return Capabilities(tasks=("world", "text_to_video"))


FAMILY = streaming_family(
    name="causal_wan",
    title="Causal Wan 2.1: streaming video from text, an image or a video (Self-Forcing, "
    "LongLive, CausVid, ...)",
    architecture="CausalWanPipeline",
    detect=is_checkpoint,
    why_not=why_not,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=read_stream,
    presets=PRESETS,
    check_tiny_decoder=lambda path, option: check_tiny_vae(find_layout(path), option),
    refusals=_refusals,
    check_parallel=_check_parallel,
    action_space=lambda stream: ActionSpace(image="none"),
    info=lambda _: {"vae_stride": (VAE_TEMPORAL, VAE_SPATIAL, VAE_SPATIAL)},
    capabilities=_capabilities,
    takes_adapters=True,
    plan=PLAN,
)
