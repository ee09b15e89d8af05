# SPDX-License-Identifier: Apache-2.0
"""Another split of the layers over pipeline stages, while no chunk is in flight: after warm-up, or by an RPC.

`omni.pipeline_partition` "measured" takes what the warm-up chunk cost each stage, decode and head included, and moves
layers until the slowest stage is as fast as can be. `collective_rpc("rebalance_pipeline", args=([14, 16],))` does it at
run time, sessions included: their next chunks are those of an engine that was started so, bit for bit. All ranks refuse
alike, before anything moves. Knows no model. Held by tests/engine/test_rebalance.py.
"""

import logging
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group

from vllm_omni.model_executor.interfaces import LayeredModel, SupportsLayerMoves
from vllm_omni.model_executor.layers.layer_moves import LayerMove, balanced_partition, stage_costs
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion.liveness import failing_together
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

logger = logging.getLogger("vllm." + __name__)

StageTimes = Mapping[str, Sequence[float]]
"""`StageTimer.milliseconds` of one chunk."""


def rebalance(runner: DiffusionGPUModelRunner, partition: Sequence[int]) -> list[int]:
    """Collective. Returns the layers of each stage now; raises `RequestFailed`, on all ranks alike."""
    refusals: list[Any] = [None] * get_world_group().world_size
    dist.all_gather_object(refusals, _refusal(runner, partition), group=get_world_group().cpu_group)
    for refusal in refusals:
        if refusal is not None:
            raise RequestFailed(*refusal)
    model, pp = runner.model, runner.pp
    stages = len(partition)
    assert isinstance(model, LayeredModel)
    if pp.rank_in_group < stages and list(partition) != list(model.partition):
        with failing_together(heard=False):  # half-moved layers are nothing to go on with
            move = LayerMove(pp.ranks[:stages], pp.rank_in_group, model.partition, partition, pp.device_group)
            _move(runner, model, move)
    runner.partition = tuple(partition)
    return list(partition)


def _move(runner: DiffusionGPUModelRunner, model: LayeredModel, move: LayerMove) -> None:
    params, _ = model.warmup_inputs()[0]
    before = model.session_nbytes(params)
    for session_id in sorted(runner.sessions.stats()["chunks"]):
        runner.settle(session_id)
    model.move_layers(move, runner.sessions.in_order_of_id())
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)
        torch.cuda.empty_cache()
    if runner.sessions.max_bytes is not None and before:
        after = model.session_nbytes(params)
        runner.sessions.max_bytes = int(runner.sessions.max_bytes / before * after)


def _refusal(runner: DiffusionGPUModelRunner, partition: Sequence[int]) -> tuple[str, str] | None:
    model = runner.model
    if not isinstance(model, SupportsLayerMoves):
        return "unsupported", "this model's layers stay on the stages they were loaded on"
    if runner.omni.pipeline == "temporal":
        return "unsupported", "every stage holds all layers and one denoise step (omni.pipeline 'temporal')"
    stages = runner.pp.world_size - runner.omni.vae_stage
    if len(partition) != stages or sum(partition) != model.num_layers or min(partition) < 1:
        return (
            "invalid_request",
            f"a partition names the layers of {stages} stages, at least one each, {model.num_layers} together; "
            f"got {list(partition)}",
        )
    if any(state.chunk is not None and not (state.done and state.pending is None) for state in runner.requests):
        return "session_busy", "chunks are in flight: ask again between two"
    if runner.device.type == "cuda" and runner.pp.rank_in_group < stages:
        # Sessions move one after the other, each into buffers beside its old ones; weights arrive before others leave.
        torch.cuda.empty_cache()
        held, wanted = model.partition[runner.pp.rank_in_group], partition[runner.pp.rank_in_group]
        session_bytes = max((session.nbytes for session in runner.sessions.in_order_of_id()), default=0)
        needed = session_bytes * wanted // held + runner.model_memory_usage * max(0, wanted - held) // held
        free, _ = torch.cuda.mem_get_info(runner.device)
        if needed > free:
            return (
                "capacity",
                f"moving layers needs {needed / 2**30:.1f} GiB on a rank that has {free / 2**30:.1f} free",
            )
    return None


def measured_partition(runner: DiffusionGPUModelRunner, times: StageTimes) -> list[int]:
    """Collective. The partition that fits what a warm-up chunk cost (`times` is this rank's)."""
    model, pp = runner.model, runner.pp
    if not isinstance(model, SupportsLayerMoves):
        raise ValueError(f"omni.pipeline_partition 'measured': the layers of {type(model).__name__} cannot move")
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
