# SPDX-License-Identifier: Apache-2.0
"""Warm-up of one rank: the largest shape runs once in a throw-away session, and fixes the bytes that sessions may hold.

All ranks warm up together, outside vLLM's engine loop, so tensors between stages are sent and received here. With
`omni.pipeline_partition` "measured" a session runs before, and its last chunk's times decide which layers move. Knows
no model by name. Held by tests/worker/test_diffusion_model_runner.py and tests/engine/test_parallel.py.
"""

import logging
import time

from vllm.sequence import IntermediateTensors

from vllm_omni.worker.diffusion.memory import MemoryBudget
from vllm_omni.worker.diffusion.rebalance import StageTimes, rebalance
from vllm_omni.worker.diffusion.requests import RequestState
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

logger = logging.getLogger("vllm." + __name__)

_REQUEST_ID = "warm-up"


def warm_up(runner: DiffusionGPUModelRunner, used_before: int = 0) -> float:
    """Collective. Connects the stages, runs the warm-up chunks, sets `runner.sessions.max_bytes`; returns seconds.

    used_before: see `MemoryBudget`. Raises RuntimeError if a chunk fails, ValueError if not even one session of the
    largest shape fits.
    """
    start = time.perf_counter()
    runner.role.connect()
    if runner.omni.pipeline_partition == "measured":
        _, times = _run_session(runner)
        rebalance(runner, times)
    budget = MemoryBudget(runner.vllm_config, runner.device, used_before)
    with budget.measure():
        session_bytes, _ = _run_session(runner)
        if runner.omni.degradations:  # a chunk with all degradations, then one at full quality
            _run_session(runner, runner.omni.degradations)
    runner.sessions.max_bytes = runner.agreement.budget(
        budget.session_bytes(session_bytes, runner.omni.max_session_bytes), session_bytes
    )
    logger.info(
        "sessions may hold %.2f GiB (%.2f GiB for one of the largest shape, at most %d sessions)",
        runner.sessions.max_bytes / 2**30,
        session_bytes / 2**30,
        runner.omni.max_sessions,
    )
    return time.perf_counter() - start


def _run_session(runner: DiffusionGPUModelRunner, degradations: tuple[str, ...] = ()) -> tuple[int, StageTimes]:
    """Returns the bytes of a session of the largest shape, and its last chunk's stage times on this rank.

    degradations: of its first chunk.
    """
    session_bytes, times = 0, {}
    for number, (params, tensors) in enumerate(runner.model.warmup_inputs()):
        without = degradations if number == 0 else ()
        state = RequestState(f"{_REQUEST_ID}-{number}", params, dict(tensors), degradations=without)
        runner.admission.admit(state, {})
        if state.chunk is None:
            raise RuntimeError(f"warm-up failed: {state.failure}")
        session_bytes = state.chunk.session.nbytes
        while not state.done:
            _step(runner, state)
        runner.role.take_answers([state.request_id])
        times = state.chunk.timer.milliseconds()
        runner.admission.release(state)
    runner.sessions.close_all()
    return session_bytes, times


def _step(runner: DiffusionGPUModelRunner, state: RequestState) -> None:
    """One micro-step, with the send and receive that the worker does in the engine loop."""
    received = None
    if not runner.pp.is_first_rank:
        tensors = runner.pp.recv_tensor_dict(all_gather_group=runner.tp)
        assert tensors is not None
        received = IntermediateTensors(tensors)
    runner.role.take_answers([state.request_id])
    hidden = runner.role.micro_step([state], received, {})
    if state.failure is not None:
        raise RuntimeError(f"warm-up failed: {state.failure}")
    if hidden is not None:
        runner.pp.send_tensor_dict(hidden.tensors, all_gather_group=runner.tp)
        runner.role.listen()
