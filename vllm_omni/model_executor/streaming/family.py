# SPDX-License-Identifier: Apache-2.0
"""`streaming_family`: creates the registry entry of a streaming model from the parts that differ
between models.

It reads configs and options and loads no weights.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_omni.actions import ActionSpace
from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.dtypes import KV_CACHE_DTYPES
from vllm_omni.model_executor.models.capabilities import Capabilities
from vllm_omni.model_executor.models.registry import ModelFamily
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
    check_options: Callable[[OmniConfig], None],
    check_parallel: Callable[[StreamModelSetup[Config, Options], OmniConfig, int, int], None],
    info: Callable[[StreamModelSetup[Config, Options]], Mapping[str, Any]],
    action_space: Callable[[StreamModelSetup[Config, Options]], ActionSpace] | None = None,
    capabilities: Callable[[dict[str, Any], OmniConfig], Capabilities] | None = None,
    why_not: Callable[[Path], str | None] | None = None,
    takes_adapters: bool = False,
    session_windows: bool = False,
    plan: FamilyPlan | None = None,
) -> ModelFamily:
    """Return the family of the package `models/{name}`.

    Args:
        name: Name of the family and its package.
        title: Name for display.
        architecture: Architecture in the registry.
        detect: Whether a directory is a checkpoint of the family.
        hf_config: Reads a checkpoint's configuration, under the key `name`.
        layouts: Layouts of tiny checkpoints.
        read: Combines the family's part of `hf_config` with the options.
        check_options: Refuses options. `read` and the size of the video are checked as well.
        check_parallel: Refuses a number of ranks that share layers and a number of stages.
        info: Fields of `StreamInfo` other than the lengths of chunks.
        action_space: Controls of the model. Default: it has none.
        capabilities: Capabilities of the model.
        why_not: Explains why a directory is not a checkpoint of the family.
        takes_adapters: Whether the model supports LoRA.
        session_windows: Whether the model is `SupportsSessionWindows`.
        plan: Networks of the family, for `vllm-omni plan`.
    """

    def default_size(config: dict[str, Any]) -> tuple[int, int]:
        return read(config[name], OmniConfig()).config.native_size

    def check_served(config: dict[str, Any], omni: OmniConfig) -> None:
        read(config[name], omni).config.latent_size(omni.height, omni.width)
        check_options(omni)

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
        check_parallel=check_split,
        stream_info=stream_info,
        action_space=None if action_space is None else space,
        capabilities=capabilities,
        kv_cache_dtypes=KV_CACHE_DTYPES,
        takes_adapters=takes_adapters,
        plan=plan,
    )
