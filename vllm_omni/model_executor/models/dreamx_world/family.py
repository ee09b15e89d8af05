# SPDX-License-Identifier: Apache-2.0
"""Describes the `dreamx_world` family for the command line, the config parser, the endpoints and
`vllm-omni plan`.
"""

from collections.abc import Mapping
from typing import Any

from vllm_omni.actions import CAMERA_SPACE
from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.capabilities import Capabilities, Refusal, Refusals
from vllm_omni.model_executor.models.dreamx_world.checkpoint import (
    LAYOUTS,
    find_layout,
    hf_config,
    is_checkpoint,
    transformer_shapes,
)
from vllm_omni.model_executor.models.dreamx_world.config import (
    FOCAL_PIXELS,
    FPS,
    PRESETS,
    REFERENCE_SIZE,
    DreamXConfig,
    DreamXStream,
    read_stream,
)
from vllm_omni.model_executor.models.wan.checkpoint.layout import check_tiny_vae
from vllm_omni.model_executor.models.wan.plan import check_world, transformer_sizes
from vllm_omni.model_executor.models.wan.splits import check_split
from vllm_omni.model_executor.models.wan.vae.latents import VAE_TEMPORAL
from vllm_omni.model_executor.streaming.degradations import ladder_refusals
from vllm_omni.model_executor.streaming.family import streaming_family
from vllm_omni.planning.stream_model import (
    WAN_2_2_AUTOENCODER,
    Changes,
    FamilyPlan,
    StreamModel,
)


def _check_parallel(stream: DreamXStream, omni: OmniConfig, ranks: int, stages: int) -> None:
    ulysses = stream.options.sequence_parallel
    check_split(stream.config, omni, ranks, stages, sequence_parallel=ulysses)


def _refusals(stream: DreamXStream, omni: OmniConfig, stages: int) -> Refusals:
    whole = Refusal("its colour correction needs whole frames on one rank")
    return Refusals(vae_stage=None, vae_parallel=whole, **ladder_refusals(stream))


def _info(stream: DreamXStream) -> dict[str, Any]:
    width, _ = REFERENCE_SIZE
    cell = stream.config.pixels_per_cell
    return {
        "fps": FPS,
        "vae_stride": (VAE_TEMPORAL, cell, cell),
        "latent_channels": stream.config.in_channels,
        "intrinsics_reference_size": REFERENCE_SIZE,
        "key_focal": FOCAL_PIXELS * stream.config.native_size[1] / width,
        "key_step": stream.options.key_step,
    }


def _named(name: str, changes: Changes) -> StreamModel:
    return _stream_model(name, DreamXConfig(), changes)


def _of_checkpoint(directory: str, checkpoint: Mapping[str, Any], changes: Changes) -> StreamModel:
    config = DreamXConfig.from_checkpoint(checkpoint["transformer"])
    return _stream_model(directory, config, changes)


def _stream_model(name: str, config: DreamXConfig, changes: Changes) -> StreamModel:
    check_world("dreamx_world", changes)
    sizes = transformer_sizes(config, transformer_shapes(config))
    camera = 4 * config.dim * config.camera_dim * len(config.camera_blocks)
    blocks = config.num_layers * (8 * config.dim**2 + 2 * config.dim * config.ffn_dim)
    fields = {
        "window": config.window_frames or 12,
        "sinks": 3 if config.sink_frames is None else config.sink_frames,
        "moving_sinks": True,
        "linears": blocks + camera,
        "latent_cell": config.pixels_per_cell,
        "autoencoder": WAN_2_2_AUTOENCODER,
        **changes,
    }
    return StreamModel(name, **sizes | fields)


FAMILY = streaming_family(
    name="dreamx_world",
    title="DreamX-World-5B (autoregressive): a camera-controlled world from an image",
    architecture="DreamXWorldPipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=read_stream,
    presets=PRESETS,
    check_tiny_decoder=lambda path, option: check_tiny_vae(find_layout(path), option),
    refusals=_refusals,
    check_parallel=_check_parallel,
    action_space=lambda stream: CAMERA_SPACE,
    info=_info,
    capabilities=lambda config, omni: Capabilities(fps=FPS, size_multiple=(32, 32)),
    takes_adapters=True,
    session_windows=True,
    plan=FamilyPlan(sizes=("dreamx_world",), named=_named, of_checkpoint=_of_checkpoint),
)
