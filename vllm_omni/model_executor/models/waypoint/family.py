# SPDX-License-Identifier: Apache-2.0
"""The `waypoint` family's entry for the command line, the config parser and the doors."""

from collections.abc import Mapping
from typing import Any

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.model_executor.models.waypoint.checkpoint import LAYOUTS, hf_config, is_checkpoint
from vllm_omni.model_executor.models.waypoint.config import SIZE_MULTIPLE, WaypointConfig, action_space, read_options
from vllm_omni.model_executor.streaming.family import Stream, streaming_family
from vllm_omni.model_executor.streaming.options import StreamingOptions

WaypointStream = Stream[WaypointConfig, StreamingOptions]


def _read(checkpoint: Mapping[str, Any], omni: OmniConfig) -> WaypointStream:
    config, options = WaypointConfig.from_checkpoint(checkpoint["transformer"]), read_options(omni.model)
    return Stream(config, options, config.plan)


def check_split(config: WaypointConfig, omni: OmniConfig, ranks: int, stages: int) -> None:
    """Raise ValueError, with the reason, unless heads and layers divide over `stages` stages of `ranks` ranks."""
    omni.refuse_chunks_in_flight("Waypoint")
    omni.refuse_vae_parallel("Waypoint")
    layer_stages = stages - omni.vae_stage
    place = ParallelContext(size=ranks, num_stages=layer_stages, partition=omni.partition)
    place.check_divisible(config.n_kv_heads, "n_kv_heads")
    if layer_stages > config.n_layers:
        raise ValueError(
            f"--pipeline-parallel-size {stages}: {config.n_layers} layers can not be cut into {layer_stages} stages"
        )
    place.layers(config.n_layers)


def _facts(stream: WaypointStream) -> dict[str, Any]:
    stride = stream.plan.rate.later
    return {"fps": float(stream.config.inference_fps), "vae_stride": (stride, SIZE_MULTIPLE, SIZE_MULTIPLE)}


FAMILY = streaming_family(
    name="waypoint",
    title="Waypoint 1 and 1.5: worlds played with keys, mouse and wheel",
    architecture="WaypointPipeline",
    detect=is_checkpoint,
    hf_config=hf_config,
    layouts=LAYOUTS,
    read=_read,
    check_options=lambda omni: omni.refuse_degradations("Waypoint"),
    check_parallel=lambda stream, omni, ranks, stages: check_split(stream.config, omni, ranks, stages),
    action_space=lambda stream: action_space(stream.config),
    facts=lambda stream: {"patch_size": (1, 1, 1), **_facts(stream)},
    capabilities=lambda config, omni: Capabilities(
        tasks=("world", "text_to_video", "image_to_video"),
        size_multiple=(SIZE_MULTIPLE, SIZE_MULTIPLE),
        fps=_facts(_read(config["waypoint"], omni))["fps"],
    ),
)
