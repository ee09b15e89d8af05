# SPDX-License-Identifier: Apache-2.0
"""Check whether a Wan network can be parallelized as configured, before any process starts. Only
the network's dimensions are required.
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
    """Raise a ValueError that states the reason if the layers or heads cannot be divided among the
    ranks.

    Args:
        config: The network's dimensions.
        omni: Options of the server.
        ranks: Number of ranks that share each layer.
        stages: Number of pipeline stages, including the VAE stage.
        sequence_parallel: Whether the ranks shard tokens instead of heads and channels.
        others: Additional numbers that must be divisible by `ranks`, keyed by their names in error
            messages.
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
    """Raise ValueError if a network cannot be divided among the ranks and stages. The network need
    not be a Wan network.

    Args:
        num_layers: Number of layers in the network.
        counts: Numbers that must be divisible by `ranks`, keyed by their names in error messages.
        omni: Options of the server.
        ranks: Number of ranks that share each layer.
        stages: Number of pipeline stages, including the VAE stage.
        layer_stages: Number of stages that hold layers.
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
    """Return why a stage's ranks cannot split the decoding, or None if they can."""
    if decoder == "tiny":
        return Refusal("decoder 'tiny' is too small to gain", "set omni.model.decoder to 'wan'")
    return None
