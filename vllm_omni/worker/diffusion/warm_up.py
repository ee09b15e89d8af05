# SPDX-License-Identifier: Apache-2.0
"""Warm-up of one rank: run the largest shape once and determine the memory for sessions.

All ranks warm up together, outside of vLLM's engine loop, so this module sends and receives tensors
between stages itself. This module names no model.
"""

import logging
import time

from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsBatchedDecode
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.worker.diffusion.memory import MemoryBudget
from vllm_omni.worker.diffusion.runner import DiffusionGPUModelRunner

logger = logging.getLogger("vllm." + __name__)

_REQUEST_ID = "warm-up"


def warm_up(runner: DiffusionGPUModelRunner, used_before: int = 0) -> float:
    """Connect the stages, run the warm-up chunks and set `runner.sessions.max_bytes` (collective).

    Args:
        runner: Runner of this rank.
        used_before: See `MemoryBudget`.

    Returns:
        Duration in seconds.

    Raises:
        RuntimeError: A chunk failed.
        ValueError: Not even one session of the largest shape fits.
    """
    start = time.perf_counter()
    runner.role.connect()
    budget = MemoryBudget(runner.vllm_config, runner.device, used_before)
    with budget.measure():
        session_bytes = _run_session(runner)
        if runner.omni.degradations:  # one chunk with all degradations, then one at full quality
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


def _run_session(runner: DiffusionGPUModelRunner, degradations: tuple[str, ...] = ()) -> int:
    """Run a temporary session of the largest shape.

    Args:
        runner: Runner of this rank.
        degradations: Degradations of the first chunk.

    Returns:
        Bytes of the session on this rank.
    """
    session_bytes = 0
    inputs = runner.model.warmup_inputs()
    for number, (params, tensors) in enumerate(inputs):
        without = degradations if number == 0 else ()
        state = RequestState(f"{_REQUEST_ID}-{number}", params, dict(tensors), degradations=without)
        runner.admission.admit(state, {})
        if state.chunk is None:
            raise RuntimeError(f"warm-up failed: {state.failure}")
        session_bytes = state.chunk.session.nbytes
        while not state.done:
            _step(runner, state)
        runner.role.receive_results([state.request_id])
        if number == len(inputs) - 1:
            _decode_together(runner, state.chunk)
        runner.admission.release(state)
    runner.sessions.close_all()
    return session_bytes


def _decode_together(runner: DiffusionGPUModelRunner, request: DiffusionRequest) -> None:
    """Decode as many chunks as may share a decode, because its memory counts too."""
    omni, model = runner.omni, runner.model
    if omni.batch_invariant or not isinstance(model, SupportsBatchedDecode):
        return
    most = min(model.most_decoded_together(request), omni.max_requests_per_step, omni.max_sessions)
    if most > 1:
        model.post_decode_together([request] * most)


def _step(runner: DiffusionGPUModelRunner, state: RequestState) -> None:
    """Run one micro-step, with the send and receive that the worker does in the engine loop."""
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
