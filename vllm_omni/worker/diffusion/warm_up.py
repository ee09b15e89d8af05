# SPDX-License-Identifier: Apache-2.0
"""Warm-up of one rank: runs the largest shape once and determines how much memory sessions may use.

All ranks warm up together, outside of vLLM's engine loop, so this module itself sends and receives
tensors between stages. If `omni.pipeline_partition` is "measured", an additional session runs
first. Based on the times of that session's last chunk, including decode and head, layers are then
moved between stages so that the slowest stage is as fast as possible. This module does not depend
on a model.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_world_group
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import (
    DiffusionRequest,
    LayeredModel,
    SupportsBatchedDecode,
    WarmsUpTwice,
)
from vllm_omni.model_executor.layers.layer_moves import LayerMove, balanced_partition, stage_costs
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.worker.diffusion.memory import MemoryBudget
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

logger = logging.getLogger("vllm." + __name__)

_REQUEST_ID = "warm-up"

StageTimes = Mapping[str, Sequence[float]]
"""Stage times of one chunk, as returned by `StageTimer.milliseconds`."""


class SessionBytes(NamedTuple):
    """Size of a session on this rank."""

    nbytes: int
    """Size of the session in bytes; see `SessionState.nbytes`."""
    growing_nbytes: int
    """Number of bytes in a window that can grow; see `SessionState.growing_nbytes`."""


def warm_up(runner: DiffusionGPUModelRunner, used_before: int = 0) -> float:
    """Connect the stages, run the warm-up chunks and set `runner.sessions.max_bytes` (collective).

    Args:
        runner: Runner of this rank.
        used_before: Number of bytes in use on the device before the worker loaded anything; see
            `MemoryBudget`.

    Returns:
        Duration of the warm-up in seconds.

    Raises:
        RuntimeError: A warm-up chunk failed.
        ValueError: The memory is not sufficient for one session of the largest shape.
    """
    start = time.perf_counter()
    runner.role.connect()
    if runner.omni.pipeline_partition == "measured":
        _, times = _run_session(runner)
        rebalance(runner, times)
    budget = MemoryBudget(runner.vllm_config, runner.device, used_before)
    with budget.measure():
        twice = isinstance(runner.model, WarmsUpTwice) and runner.model.warms_up_twice
        for _ in range(2 if twice else 1):
            session, _ = _run_session(runner)
            if runner.omni.degradations:  # the first chunk uses all degradations, later ones none
                _run_session(runner, runner.omni.degradations)
    runner.sessions.max_bytes = runner.agreement.budget(
        budget.session_bytes(session.nbytes, runner.omni.max_session_bytes, session.growing_nbytes),
        session.nbytes,
    )
    logger.info(
        "sessions may hold %.2f GiB (%.2f GiB for one of the largest shape, at most %d sessions)",
        runner.sessions.max_bytes / 2**30,
        session.nbytes / 2**30,
        runner.omni.max_sessions,
    )
    return time.perf_counter() - start


def _run_session(
    runner: DiffusionGPUModelRunner, degradations: tuple[str, ...] = ()
) -> tuple[SessionBytes, StageTimes]:
    """Run the warm-up chunks of the largest shape in a temporary session.

    Args:
        runner: Runner of this rank.
        degradations: Degradations of the first chunk. Later chunks run at full quality.

    Returns:
        Size of the session on this rank, and stage times of its last chunk on this rank.
    """
    session_bytes, times = SessionBytes(0, 0), {}
    inputs = runner.model.warmup_inputs()
    for number, (params, tensors) in enumerate(inputs):
        without = degradations if number == 0 else ()
        state = RequestState(f"{_REQUEST_ID}-{number}", params, dict(tensors), degradations=without)
        runner.admission.grow_sessions([state], runner.agreement)
        runner.admission.admit(state, {})
        if state.chunk is None:
            raise RuntimeError(f"warm-up failed: {state.failure}")
        session = state.chunk.session
        session_bytes = SessionBytes(session.nbytes, session.growing_nbytes)
        while not state.done:
            _step(runner, state)
        runner.role.receive_results([state.request_id])
        times = state.chunk.timer.milliseconds()
        if number == len(inputs) - 1:
            _decode_together(runner, state.chunk)
        runner.admission.release(state)
    runner.sessions.close_all()
    return session_bytes, times


def _decode_together(runner: DiffusionGPUModelRunner, request: DiffusionRequest) -> None:
    """Decode as many chunks together as a shared decode allows, so that the measured memory
    includes a shared decode.
    """
    omni, model = runner.omni, runner.model
    if omni.batch_invariant or not isinstance(model, SupportsBatchedDecode):
        return
    most = min(model.most_decoded_together(request), omni.max_requests_per_step, omni.max_sessions)
    if most > 1:
        model.post_decode_together([request] * most)


def _step(runner: DiffusionGPUModelRunner, state: RequestState) -> None:
    """Run one micro-step, including the transfers between stages that the worker performs in the
    engine loop.
    """
    received = None
    if not runner.pp.is_first_rank:
        tensors = runner.pp.recv_tensor_dict(all_gather_group=runner.tp)
        assert tensors is not None
        received = IntermediateTensors(tensors)
    runner.role.receive_results([state.request_id])
    hidden = runner.role.micro_step([state], received, {})
    if state.failure is not None:
        raise RuntimeError(f"warm-up failed: {state.failure}")
    if hidden is not None:
        runner.pp.send_tensor_dict(hidden.tensors, all_gather_group=runner.tp)
        runner.role.listen()


def rebalance(runner: DiffusionGPUModelRunner, times: StageTimes) -> None:
    """Rebalance the layers between the stages according to measured times (collective).

    Args:
        runner: Runner of this rank.
        times: Stage times of a warm-up chunk on this rank.

    Raises:
        ValueError: The model's layers cannot be moved. The error is raised on all ranks.
    """
    model, pp = runner.model, runner.pp
    if not isinstance(model, LayeredModel):
        raise ValueError(
            f"omni.pipeline_partition 'measured': the layers of {type(model).__name__} cannot "
            "be moved"
        )
    partition = _measured_partition(runner, model, times)
    stages = len(partition)
    if pp.rank_in_group < stages and partition != list(model.partition):
        model.move_layers(
            LayerMove(
                pp.ranks[:stages], pp.rank_in_group, model.partition, partition, pp.device_group
            )
        )
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)
            torch.cuda.empty_cache()
    runner.partition = tuple(partition)


def _measured_partition(
    runner: DiffusionGPUModelRunner, model: LayeredModel, times: StageTimes
) -> list[int]:
    pp = runner.pp
    stages = pp.world_size - runner.omni.vae_stage
    steps = times.get("steps", [0.0])
    mine = (pp.rank_in_group, median(steps), len(steps), sum(times.get("decode", [0.0])))
    everybody: list[Any] = [None] * get_world_group().world_size
    dist.all_gather_object(everybody, mine, group=get_world_group().cpu_group)
    # The time of a stage is that of the slowest rank among those that share its layers.
    of_stage = [[entry for entry in everybody if entry[0] == stage] for stage in range(stages)]
    costs = stage_costs(
        [max(step_ms for _, step_ms, _, _ in entries) for entries in of_stage],
        model.partition,
        max(passes for _, _, passes, _ in of_stage[0]),
        [max(decode_ms for *_, decode_ms in entries) for entries in of_stage],
    )
    partition = balanced_partition(costs, model.num_layers)
    logger.info("costs of the pipeline stages: %s; layers of each stage: %s", costs, partition)
    return partition
