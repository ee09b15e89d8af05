# SPDX-License-Identifier: Apache-2.0
"""Memory and compute of causal Wan for `vllm-omni plan`: two network sizes, and the published
networks with their own denoise steps.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm_omni.model_executor.models.causal_wan.checkpoint.releases import RELEASES, release_named
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions
from vllm_omni.model_executor.models.wan.plan import transformer_sizes
from vllm_omni.model_executor.models.wan.transformer.weights import transformer_shapes
from vllm_omni.planning.stream_model import Changes, FamilyPlan, StreamModel

_WAN_14B: Final[Mapping[str, Any]] = {
    "dim": 5120,
    "ffn_dim": 13824,
    "num_heads": 40,
    "num_layers": 40,
}
_SIZES: Final[Mapping[str, Mapping[str, Any]]] = {"causal_wan_1_3b": {}, "causal_wan_14b": _WAN_14B}
"""`CausalWanConfig` values that differ from the defaults, keyed by model size."""


def _named(name: str, changes: Changes) -> StreamModel:
    if name in _SIZES:
        return _stream_model(name, CausalWanConfig(**_SIZES[name]), changes)
    release = release_named(name)
    config = CausalWanConfig.from_checkpoint(
        {**(_WAN_14B if name.endswith("14b") else {}), **release.transformer}
    )
    steps = len(CausalWanOptions.parse(release.options).denoising_steps)
    return _stream_model(name, config, {"denoise": steps, **changes})


def _of_checkpoint(directory: str, checkpoint: Mapping[str, Any], changes: Changes) -> StreamModel:
    config = CausalWanConfig.from_checkpoint(checkpoint["transformer"])
    # A release may have its own default denoise steps.
    steps = len(CausalWanOptions.of_checkpoint(checkpoint, {}).denoising_steps)
    return _stream_model(directory, config, {"denoise": steps, **changes})


def _stream_model(name: str, config: CausalWanConfig, changes: Changes) -> StreamModel:
    window, sinks = (
        config.window_frames or 21,
        3 if config.sink_frames is None else config.sink_frames,
    )
    fields = {"window": window, "sinks": sinks, "moving_sinks": True, **changes}
    return StreamModel(name, **transformer_sizes(config, transformer_shapes(config)) | fields)


PLAN = FamilyPlan(
    sizes=tuple(_SIZES),
    releases=tuple(release.download_name for release in RELEASES),
    named=_named,
    of_checkpoint=_of_checkpoint,
)
