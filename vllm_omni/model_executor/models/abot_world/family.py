# SPDX-License-Identifier: Apache-2.0
"""Describes the `abot_world` family for the command line, the config parser and the endpoints."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_omni.model_executor.models.abot_world.checkpoint import (
    LAYOUTS,
    find_layout,
    hf_config,
    is_checkpoint,
    transformer_shapes,
)
from vllm_omni.model_executor.models.abot_world.config import (
    FPS,
    PRESETS,
    STEPS,
    WINDOW_FRAMES,
    AbotWorldConfig,
    read_stream,
    space_of,
)
from vllm_omni.model_executor.models.capabilities import Capabilities, Refusals
from vllm_omni.model_executor.models.wan.checkpoint.layout import check_tiny_vae
from vllm_omni.model_executor.models.wan.plan import check_world, transformer_sizes
from vllm_omni.model_executor.models.wan.splits import check_split, parallel_decode_refusal
from vllm_omni.model_executor.models.wan.vae.latents import VAE_TEMPORAL
from vllm_omni.model_executor.streaming.degradations import ladder_refusals
from vllm_omni.model_executor.streaming.family import streaming_family
from vllm_omni.planning.stream_model import (
    WAN_2_2_AUTOENCODER,
    AutoencoderMemory,
    Changes,
    FamilyPlan,
    StreamModel,
)

_SPATIAL = AbotWorldConfig.pixels_per_cell
_MULTIPLE = 2 * _SPATIAL
_TINY: AutoencoderMemory = WAN_2_2_AUTOENCODER.tiny or WAN_2_2_AUTOENCODER


def _planned(name: str, transformer: Mapping[str, Any], changes: Changes) -> StreamModel:
    """Return the model description for `vllm-omni plan`. Sessions of this model have no encoder
    cache.
    """
    check_world("abot_world", changes)
    config = AbotWorldConfig.from_checkpoint(transformer)
    fields = {
        "window": config.window_frames or WINDOW_FRAMES,
        "sinks": 0,
        "denoise": len(STEPS),
        "latent_cell": _SPATIAL,
        "pinned_tokens": config.reference_tokens,
        "autoencoder": replace(_TINY, tiny=_TINY),
        **changes,
    }
    return StreamModel(name, **transformer_sizes(config, transformer_shapes(config)) | fields)


FAMILY = streaming_family(
    name="abot_world",
    title="ABot-World-0: a world played with eight keys, from an image and reference images",
    architecture="AbotWorldPipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=read_stream,
    presets=PRESETS,
    check_tiny_decoder=lambda path, option: check_tiny_vae(find_layout(path), option),
    refusals=lambda stream, omni, stages: Refusals(
        vae_stage=None,
        vae_parallel=parallel_decode_refusal(stream.options.decoder),
        kv_growth=None,
        **ladder_refusals(stream),
    ),
    check_parallel=lambda stream, omni, ranks, stages: check_split(
        stream.config, omni, ranks, stages, sequence_parallel=stream.options.sequence_parallel
    ),
    action_space=lambda stream: space_of(stream.config),
    info=lambda stream: {
        "fps": FPS,
        "vae_stride": (VAE_TEMPORAL, _SPATIAL, _SPATIAL),
        "latent_channels": stream.config.in_channels,
    },
    capabilities=lambda config, omni: Capabilities(fps=FPS, size_multiple=(_MULTIPLE, _MULTIPLE)),
    takes_adapters=True,
    session_windows=True,
    plan=FamilyPlan(
        sizes=("abot_world",),
        named=lambda name, changes: _planned(name, {}, changes),
        of_checkpoint=lambda name, stored, changes: _planned(name, stored["transformer"], changes),
    ),
)
