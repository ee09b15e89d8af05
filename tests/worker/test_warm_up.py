# SPDX-License-Identifier: Apache-2.0
"""The warm-up: its chunks, the bytes that sessions may hold, and layers that move by its times."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.logged import logged
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion import warm_up as module
from vllm_omni.worker.diffusion.warm_up import warm_up


def admitted(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[RequestState]:
    """The requests that are admitted from now on."""
    found: list[RequestState] = []
    admit = runner.admission.admit

    def noted(state: RequestState, *args: Any) -> None:
        found.append(state)
        admit(state, *args)

    monkeypatch.setattr(runner.admission, "admit", noted)
    return found


def test_a_warm_up_fixes_the_bytes_of_sessions(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The budget of this rank, and no more than `max_session_bytes`; all ranks take the least.

    No session is left.
    """
    runner = make_runner(null_world, {"max_session_bytes": 3 << 28, "max_sessions": 5})
    one = 4 * 4 * 6 * 4
    budgets: list[tuple[int, int]] = []
    monkeypatch.setattr(
        runner.agreement, "budget", lambda *requested: budgets.append(requested) or (1 << 29)
    )
    runner.model_config.dtype = torch.float32
    runner.vllm_config.cache_config.kv_cache_memory_bytes = 1 << 30
    with logged(module.logger) as messages:
        seconds = warm_up(runner)
    assert 0 < seconds < 600
    assert budgets == [(3 << 28, one)]
    assert runner.sessions.max_bytes == 1 << 29
    assert len(runner.sessions) == 0
    assert messages == [
        "sessions may hold 0.50 GiB (0.00 GiB for one of the largest shape, at most 5 sessions)"
    ]


def test_the_first_chunk_of_a_warm_up_loses_all_that_it_may(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session at full quality, then one whose first chunk has every degradation: both take
    memory.
    """
    runner = make_runner(null_world, {"scheduling": "deadline", "degradations": ["fewer_steps"]})
    chunks = 2
    inputs = chunks * list(runner.model.warmup_inputs())
    monkeypatch.setattr(runner.model, "warmup_inputs", lambda: inputs)
    found = admitted(runner, monkeypatch)
    warm_up(runner)
    assert [state.request_id for state in found] == 2 * [
        f"warm-up-{number}" for number in range(chunks)
    ]
    assert [state.degradations for state in found] == chunks * [()] + [("fewer_steps",)] + (
        chunks - 1
    ) * [()]
    for state in found:
        assert state.done
        assert state.chunk is not None
        assert state.chunk.state is None, "its working set is let go"
        assert not runner.sessions.is_pinned(state.chunk.session.session_id)


@pytest.mark.parametrize(("where", "fails_at"), [("prepare_encode", 0), ("denoise_step", 2)])
def test_a_chunk_that_fails_ends_the_start(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch, where: str, fails_at: int
) -> None:
    runner = make_runner(null_world)
    work, calls = getattr(runner.model, where), []

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > fails_at:
            raise RequestFailed("unsupported", "not on this machine")
        return work(*args)

    monkeypatch.setattr(runner.model, where, fail)
    with pytest.raises(RuntimeError, match=r"^warm-up failed: unsupported: not on this machine$"):
        warm_up(runner)


@pytest.mark.parametrize(
    ("omni", "model_allows", "together"),
    [
        ({"max_sessions": 3}, 8, [3]),
        ({"max_sessions": 8, "max_requests_per_step": 2}, 8, [2]),
        ({"max_sessions": 8}, 3, [3]),
        ({"max_sessions": 8}, 1, []),
    ],
)
def test_a_warm_up_decodes_together_what_will_be_at_most(
    make_runner: Any,
    lingbot_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    omni: dict[str, Any],
    model_allows: int,
    together: list[int],
) -> None:
    """Its last chunk, so often: of sessions there are, in a step, by the model."""
    runner = make_runner(lingbot_world, {"batch_invariant": False, **omni})
    found = admitted(runner, monkeypatch)
    decoded: list[list[Any]] = []
    monkeypatch.setattr(runner.model, "most_decoded_together", lambda request: model_allows)
    monkeypatch.setattr(runner.model, "post_decode_together", decoded.append)
    warm_up(runner)
    assert len(found) > 1
    assert decoded == [count * [found[-1].chunk] for count in together]


def test_a_stage_behind_others_computes_from_what_they_sent() -> None:
    """Through vLLM's own messages, which ranks that share layers divide among them."""
    tp, sent, seen = object(), {"hidden": torch.ones(1)}, []
    received = {"hidden": torch.zeros(1)}

    def recv_tensor_dict(*, all_gather_group: Any) -> Any:
        assert all_gather_group is tp
        return received

    def send_tensor_dict(tensors: Any, *, all_gather_group: Any) -> None:
        assert all_gather_group is tp
        seen.append(tensors)

    def micro_step(states: Any, tensors: Any, outputs: Any) -> IntermediateTensors:
        seen.extend([states, tensors.tensors, outputs])
        return IntermediateTensors(sent)

    state: Any = SimpleNamespace(request_id="r", failure=None)
    pp = SimpleNamespace(
        is_first_rank=False, recv_tensor_dict=recv_tensor_dict, send_tensor_dict=send_tensor_dict
    )
    role = SimpleNamespace(
        receive_results=seen.append, micro_step=micro_step, listen=lambda: seen.append("listens")
    )
    module._step(SimpleNamespace(pp=pp, tp=tp, role=role), state)  # type: ignore[arg-type]
    assert seen == [["r"], [state], received, {}, sent, "listens"]
