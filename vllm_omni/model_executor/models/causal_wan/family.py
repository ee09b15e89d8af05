# SPDX-License-Identifier: Apache-2.0
"""The `causal_wan` family's entry for the command line, the config parser and the doors."""

from typing import Any

from vllm_omni.actions import ActionSpace
from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import (
    LAYOUTS,
    hf_config,
    is_checkpoint,
    why_not,
)
from vllm_omni.model_executor.models.causal_wan.config import (
    CausalWanOptions,
    CausalWanStream,
    read_stream,
)
from vllm_omni.model_executor.models.causal_wan.plan import PLAN
from vllm_omni.model_executor.models.wan.splits import check_decoder_split, check_split
from vllm_omni.model_executor.models.wan.vae.latents import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.streaming.family import streaming_family


def _check_parallel(stream: CausalWanStream, omni: OmniConfig, ranks: int, stages: int) -> None:
    from vllm_omni.model_executor.models.causal_wan import degradations, in_flight

    options = stream.options
    reason = None
    if omni.ahead is not None:
        reason = in_flight.refuse_chunks_in_flight(options)
    if reason is None and omni.pipeline == "temporal":
        reason = in_flight.refuse_temporal_pipeline(options, stages - omni.vae_stage)
    if reason is not None:
        raise ValueError(f"omni.{omni.ahead}: causal Wan cannot do that: {reason}")
    for name in omni.degradations:
        refusal = degradations.refuse_degradation(name, options)
        if refusal is not None:
            raise ValueError(f"omni.degradations: causal Wan cannot do {name!r}: {refusal}")
    check_decoder_split(options.decoder, omni)
    check_split(stream.config, omni, ranks, stages, sequence_parallel=options.sequence_parallel)


def _capabilities(config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    options = CausalWanOptions.of_checkpoint(config["causal_wan"], omni.model)
    if options.video_input and options.cache == "strict":
        return Capabilities(tasks=("world", "text_to_video", "image_to_video"))
    return Capabilities(tasks=("world", "text_to_video"))


FAMILY = streaming_family(
    name="causal_wan",
    title="Causal Wan 2.1: streaming video from text, a picture or a video (Self-Forcing, "
    "LongLive, CausVid, ...)",
    architecture="CausalWanPipeline",
    detect=is_checkpoint,
    why_not=why_not,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=read_stream,
    check_options=lambda omni: None,
    check_parallel=_check_parallel,
    action_space=lambda stream: ActionSpace(image="none"),
    info=lambda _: {"vae_stride": (VAE_TEMPORAL, VAE_SPATIAL, VAE_SPATIAL)},
    capabilities=_capabilities,
    takes_adapters=True,
    plan=PLAN,
)
