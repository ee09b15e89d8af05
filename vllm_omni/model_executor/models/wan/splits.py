# SPDX-License-Identifier: Apache-2.0
"""Checks, before any process starts, whether a Wan network can be parallelized as configured. The
checks need only the sizes of the network.
"""

from collections.abc import Mapping

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.capabilities import Refusal
from vllm_omni.model_executor.models.wan.architecture import WanConfig


def check_split(
    config: WanConfig,
    omni: OmniConfig,
    ranks: int,
    stages: int,
    *,
    sequence_parallel: bool,
    others: Mapping[str, int] | None = None,
) -> None:
    """Raise ValueError with the reason unless layers and heads can be divided among the ranks.

    Args:
        config: Sizes of the network.
        omni: Options of the server.
        ranks: Number of ranks that share each layer.
        stages: Number of pipeline stages, including the VAE stage.
        sequence_parallel: Whether the ranks shard tokens instead of heads and channels.
        others: Further numbers that must be divisible by `ranks`. The keys are the names used in
            error messages.
    """
    layer_stages = 1 if omni.pipeline == "temporal" else stages - omni.vae_stage
    counts = {"num_heads": config.num_heads, **(others or {})}
    if not sequence_parallel:
        counts["ffn_dim"] = config.ffn_dim
    check_parts(config.num_layers, counts, omni, ranks, stages, layer_stages)


def check_parts(
    num_layers: int,
    counts: Mapping[str, int],
    omni: OmniConfig,
    ranks: int,
    stages: int,
    layer_stages: int,
) -> None:
    """Raise ValueError unless a network, not necessarily a Wan network, can be divided among the
    ranks and stages.

    Args:
        num_layers: Number of layers of the network.
        counts: Numbers that must be divisible by `ranks`. The keys are the names used in error
            messages.
        omni: Options of the server.
        ranks: Number of ranks that share each layer.
        stages: Number of pipeline stages, including the VAE stage.
        layer_stages: Number of stages with layers.
    """
    position = ParallelContext(size=ranks, num_stages=layer_stages, partition=omni.partition)
    for name, count in counts.items():
        position.check_divisible(count, name)
    if layer_stages > num_layers:
        raise ValueError(
            f"--pipeline-parallel-size {stages}: {num_layers} layers can not be cut into "
            f"{layer_stages} stages"
        )
    position.layers(num_layers)


def parallel_decode_refusal(decoder: str) -> Refusal | None:
    """Return the reason why the ranks of a stage cannot split a decode, or None if they can split
    it.
    """
    if decoder == "tiny":
        return Refusal("decoder 'tiny' is too small to gain", "set omni.model.decoder to 'wan'")
    return None
