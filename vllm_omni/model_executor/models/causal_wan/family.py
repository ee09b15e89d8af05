# SPDX-License-Identifier: Apache-2.0
"""The `causal_wan` family: what the command line, the config parser and the doors ask about it."""

from pathlib import Path
from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.model_executor.models.causal_wan.checkpoint import LAYOUTS, hf_config, is_checkpoint
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions, ChunkPlan
from vllm_omni.model_executor.models.registry import ModelFamily
from vllm_omni.model_executor.models.wan.chunk_plan import VAE_SPATIAL, VAE_TEMPORAL
from vllm_omni.model_executor.models.wan.splits import check_split


def _make_tiny(out: Path, seed: int, layout: str) -> None:
    from vllm_omni.model_executor.models.causal_wan.tiny import make_tiny  # transformers and diffusers

    make_tiny(out, seed, layout)


def _verify(golden: Path) -> Any:
    from vllm_omni.model_executor.models.causal_wan import parity

    return parity.verify(golden)


def _plan(config: dict[str, Any], omni: OmniConfig) -> tuple[CausalWanConfig, ChunkPlan]:
    options = CausalWanOptions.parse(omni.model)
    transformer = CausalWanConfig.from_checkpoint(config["causal_wan"]["transformer"])
    return transformer, ChunkPlan.resolve(transformer, options)


def _check_options(config: dict[str, Any], omni: OmniConfig) -> None:
    transformer, _ = _plan(config, omni)
    transformer.latent_size(omni.height, omni.width)


def _check_parallel(config: dict[str, Any], omni: OmniConfig, ranks: int, stages: int) -> None:
    from vllm_omni.model_executor.models.causal_wan import degradations, in_flight

    transformer, plan = _plan(config, omni)
    options = CausalWanOptions.parse(omni.model)
    reason = None
    if omni.ahead is not None:
        reason = in_flight.refuse_chunks_in_flight(options, plan)
    if reason is None and omni.pipeline == "temporal":
        reason = in_flight.refuse_temporal_pipeline(options, stages - omni.vae_stage)
    if reason is not None:
        raise ValueError(f"omni.{omni.ahead}: causal Wan cannot do that: {reason}")
    for name in omni.degradations:
        refusal = degradations.refuse_degradation(name, options, plan)
        if refusal is not None:
            raise ValueError(f"omni.degradations: causal Wan cannot do {name!r}: {refusal}")
    if options.decoder == "tiny" and omni.vae_parallel:
        raise ValueError("omni.vae_parallel splits decoder 'wan' over ranks; decoder 'tiny' is too small to gain")
    check_split(transformer, omni, ranks, stages, sequence_parallel=options.sequence_parallel)


def _world_facts(config: dict[str, Any], omni: OmniConfig) -> dict[str, Any]:
    _, plan = _plan(config, omni)
    return {
        "camera": False,
        "needs_image": False,
        "latent_frames_per_chunk": plan.chunk_frames,
        "first_chunk_latent_frames": plan.first_chunk_frames,
        "vae_stride": (VAE_TEMPORAL, VAE_SPATIAL, VAE_SPATIAL),
    }


def _capabilities(config: dict[str, Any], omni: OmniConfig) -> Capabilities:
    return Capabilities(tasks=("world", "text_to_video"))


FAMILY = ModelFamily(
    name="causal_wan",
    title="Causal Wan 2.1: streaming text-to-video and video-to-video (Self-Forcing, CausVid, StreamDiffusionV2)",
    architecture="CausalWanPipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    make_tiny=_make_tiny,
    layouts=LAYOUTS,
    verify=_verify,
    check_options=_check_options,
    check_parallel=_check_parallel,
    world_facts=_world_facts,
    capabilities=_capabilities,
)
