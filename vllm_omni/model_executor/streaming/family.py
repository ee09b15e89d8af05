# SPDX-License-Identifier: Apache-2.0
"""`streaming_family` builds a streaming model's registry entry from its model-specific functions
and values.

`streaming_family` reads configs and options but loads no weights.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_omni.actions import ActionSpace
from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.dtypes import KV_CACHE_DTYPES
from vllm_omni.model_executor.models.capabilities import Capabilities, Refusals
from vllm_omni.model_executor.models.registry import ModelFamily
from vllm_omni.model_executor.presets import Preset, PresetName, ServedPreset, served_preset
from vllm_omni.model_executor.streaming.degradations import needs_tiny_decoder
from vllm_omni.model_executor.streaming.stream import Config, Options, StreamModelSetup
from vllm_omni.planning.stream_model import FamilyPlan


def streaming_family(
    *,
    name: str,
    title: str,
    architecture: str,
    detect: Callable[[Path], bool],
    hf_config: Callable[[Path], dict[str, Any]],
    layouts: tuple[str, ...],
    read: Callable[[Mapping[str, Any], OmniConfig], StreamModelSetup[Config, Options]],
    refusals: Callable[[StreamModelSetup[Config, Options], OmniConfig, int], Refusals],
    check_parallel: Callable[[StreamModelSetup[Config, Options], OmniConfig, int, int], None],
    info: Callable[[StreamModelSetup[Config, Options]], Mapping[str, Any]],
    presets: Mapping[PresetName, Preset],
    check_tiny_decoder: Callable[[Path, str], None] | None = None,
    action_space: Callable[[StreamModelSetup[Config, Options]], ActionSpace] | None = None,
    capabilities: Callable[[dict[str, Any], OmniConfig], Capabilities] | None = None,
    why_not: Callable[[Path], str | None] | None = None,
    takes_adapters: bool = False,
    session_windows: bool = False,
    plan: FamilyPlan | None = None,
) -> ModelFamily:
    """Return the family that the `models/{name}` package implements.

    Arguments without a description are fields of `ModelFamily`. Below, "stream" means the result of
    `read`, which depends on the checkpoint and the options.

    Args:
        read: Function that returns the stream for the family's part of `hf_config` and the options.
            It raises ValueError if they are invalid.
        refusals: Function that returns the server options that the model does not support. Its
            arguments are the stream, the options and the number of stages.
        check_parallel: Function that raises ValueError if the model does not support the
            parallelism. Its arguments are the stream, the options, the number of ranks that share
            layers and the number of stages.
        info: Function that returns the fields of `StreamInfo` for a stream, except the chunk
            lengths.
        check_tiny_decoder: Function that raises ValueError if the tiny decoder is missing. Its
            arguments are the checkpoint directory and the option that needs the tiny decoder.
            Default: the model has no tiny decoder.
        action_space: Function that returns the model's controls for a stream.
        session_windows: Whether a session may choose its own window (`SupportsSessionWindows`).
    """

    def default_size(config: dict[str, Any]) -> tuple[int, int]:
        return read(config[name], OmniConfig()).config.native_size

    def check_served(config: dict[str, Any], omni: OmniConfig) -> None:
        read(config[name], omni).config.latent_size(omni.height, omni.width)

    def preset_of(config: dict[str, Any], omni: OmniConfig) -> ServedPreset:
        stream = read(config[name], omni)
        options, channels = stream.options, stream.config.hidden_size
        return served_preset(
            presets, options.preset, omni.model, channels=channels, fp8=options.fp8
        )

    def check_files(path: Path, config: dict[str, Any], omni: OmniConfig) -> None:
        option = needs_tiny_decoder(read(config[name], omni).options, omni)
        if option is not None and check_tiny_decoder is not None:
            check_tiny_decoder(path, option)

    def declared_refusals(config: dict[str, Any], omni: OmniConfig, stages: int) -> Refusals:
        return refusals(read(config[name], omni), omni, stages)

    def check_split(config: dict[str, Any], omni: OmniConfig, ranks: int, stages: int) -> None:
        check_parallel(read(config[name], omni), omni, ranks, stages)

    def stream_info(config: dict[str, Any], omni: OmniConfig) -> dict[str, Any]:
        stream = read(config[name], omni)
        chunks = stream.plan
        return {
            "latent_frames_per_chunk": chunks.chunk_frames,
            "first_chunk_latent_frames": chunks.first_chunk_frames,
            "first_stride": chunks.rate.first,
            "window_frames": chunks.window_frames if session_windows else None,
            "sink_frames": chunks.sink_frames if session_windows else None,
            **info(stream),
        }

    def space(config: dict[str, Any], omni: OmniConfig) -> ActionSpace:
        assert action_space is not None
        return action_space(read(config[name], omni))

    return ModelFamily(
        name=name,
        title=title,
        architecture=architecture,
        detect=detect,
        why_not=why_not,
        hf_config=hf_config,
        layouts=layouts,
        default_size=default_size,
        check_options=check_served,
        refusals=declared_refusals,
        check_parallel=check_split,
        stream_info=stream_info,
        action_space=None if action_space is None else space,
        capabilities=capabilities,
        presets=presets,
        served_preset=preset_of,
        check_files=check_files,
        kv_cache_dtypes=KV_CACHE_DTYPES,
        takes_adapters=takes_adapters,
        plan=plan,
    )
