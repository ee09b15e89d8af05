# SPDX-License-Identifier: Apache-2.0
"""Tests of the assignment of layers to pipeline stages and of decoding to ranks."""

import pytest

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext


def contexts(stages: int, *, vae_stage: bool = False, **fields: object) -> list[ParallelContext]:
    return [
        ParallelContext(stage=stage, num_stages=stages - vae_stage, vae_stage=vae_stage, **fields)  # type: ignore[arg-type]
        for stage in range(stages)
    ]


@pytest.mark.parametrize(
    ("stages", "fields", "lengths"),
    [
        (1, {}, [7]),
        (3, {}, [3, 2, 2]),
        (3, {"partition": (1, 5, 1)}, [1, 5, 1]),
        (2, {"vae_stage": True}, [7, 0]),
        (4, {"vae_stage": True}, [3, 2, 2, 0]),
        (3, {"vae_stage": True, "partition": (2, 5)}, [2, 5, 0]),
    ],
)
def test_stages_hold_every_layer_once(
    stages: int, fields: dict[str, object], lengths: list[int]
) -> None:
    ranks = contexts(stages, **fields)  # type: ignore[arg-type]
    held = [rank.layers(7) for rank in ranks]
    assert [len(layers) for layers in held] == lengths
    assert [layer for layers in held for layer in layers] == list(range(7))
    with_layers = [rank for rank in ranks if not rank.is_vae_stage]
    assert [rank.first_stage for rank in with_layers] == [True] + [False] * (len(with_layers) - 1)
    assert [rank.last_stage for rank in with_layers] == [False] * (len(with_layers) - 1) + [True]
    assert [rank.decodes for rank in ranks] == [False] * (stages - 1) + [True]


def test_a_vae_stage_is_neither_first_nor_last() -> None:
    """The network's embedding and head are not on the VAE stage. Exactly one rank of the VAE stage
    decodes.
    """
    vae = ParallelContext(rank=0, size=1, stage=2, num_stages=2, vae_stage=True)
    assert not vae.first_stage and not vae.last_stage and vae.decodes
    assert not ParallelContext(rank=1, stage=2, num_stages=2, vae_stage=True).decodes


@pytest.mark.parametrize("partition", [(3, 3), (7,), (6, 1, 0), (8, -1)])
def test_a_partition_that_does_not_fit_is_refused(partition: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="7 layers over 2 stages that hold layers"):
        ParallelContext(stage=0, num_stages=2, partition=partition).layers(7)


@pytest.mark.parametrize(
    ("options", "stages", "reason"),
    [
        ({"vae_stage": True}, 1, "--pipeline-parallel-size 2 or more"),
        ({"pipeline_partition": [3, 4]}, 3, "lists 2 stages, but 3 hold layers"),
        (
            {"pipeline_partition": [3, 4], "vae_stage": True},
            2,
            "1 hold layers .*one of them for the VAE",
        ),
    ],
)
def test_options_that_do_not_fit_the_pipeline_are_refused(
    options: dict[str, object], stages: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        OmniConfig.from_additional_config({"omni": options}).check_stages(stages)
