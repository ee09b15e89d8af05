# SPDX-License-Identifier: Apache-2.0
"""Moves layers between pipeline stages at start, before there are sessions.

`omni.pipeline_partition` "measured" takes each stage's time for the warm-up chunk, decode and head included, and moves
layers so that the slowest stage is as fast as possible. Knows no model. Held by tests/engine/test_rebalance.py.
"""

import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group

from vllm_omni.model_executor.interfaces import LayeredModel
from vllm_omni.model_executor.layers.layer_moves import LayerMove, balanced_partition, stage_costs
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

logger = logging.getLogger("vllm." + __name__)

StageTimes = Mapping[str, Sequence[float]]
"""`StageTimer.milliseconds` of one chunk."""


def rebalance(runner: DiffusionGPUModelRunner, times: StageTimes) -> None:
    """Collective. Balance layers by the stage times of a warm-up chunk (`times` is this rank's).

    Raises ValueError, on all ranks alike, if the model's layers cannot move.
    """
    model, pp = runner.model, runner.pp
    if not isinstance(model, LayeredModel):
        raise ValueError(f"omni.pipeline_partition 'measured': the layers of {type(model).__name__} cannot move")
    partition = _measured_partition(runner, model, times)
    stages = len(partition)
    if pp.rank_in_group < stages and partition != list(model.partition):
        model.move_layers(LayerMove(pp.ranks[:stages], pp.rank_in_group, model.partition, partition, pp.device_group))
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
            torch.cuda.empty_cache()
    runner.partition = tuple(partition)


def _measured_partition(runner: DiffusionGPUModelRunner, model: LayeredModel, times: StageTimes) -> list[int]:
    pp = runner.pp
    stages = pp.world_size - runner.omni.vae_stage
    steps = times.get("steps", [0.0])
    mine = (pp.rank_in_group, median(steps), len(steps), sum(times.get("decode", [0.0])))
    everybody: list[Any] = [None] * get_world_group().world_size
    dist.all_gather_object(everybody, mine, group=get_world_group().cpu_group)
    # Ranks that share a stage's layers are as slow as the slowest of them.
    of_stage = [[entry for entry in everybody if entry[0] == stage] for stage in range(stages)]
    costs = stage_costs(
        [max(step_ms for _, step_ms, _, _ in entries) for entries in of_stage],
        model.partition,
        max(passes for _, _, passes, _ in of_stage[0]),
        [max(decode_ms for *_, decode_ms in entries) for entries in of_stage],
    )
    partition = balanced_partition(costs, model.num_layers)
    logger.info("pipeline stages cost %s: %s layers each", costs, partition)
    return partition
