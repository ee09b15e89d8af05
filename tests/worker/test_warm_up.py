# SPDX-License-Identifier: Apache-2.0
"""The warm-up: the chunks that it runs, the session byte limit that it sets, and the layer
partition that it derives from measured times.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.logged import logged
from vllm.distributed import parallel_state
from vllm.sequence import IntermediateTensors

from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion import warm_up as module
from vllm_omni.worker.diffusion.warm_up import rebalance, warm_up


def admitted(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[RequestState]:
    """A list of the requests admitted from now on."""
    found: list[RequestState] = []
    admit = runner.admission.admit

    def noted(state: RequestState, *args: Any) -> None:
        found.append(state)
        admit(state, *args)

    monkeypatch.setattr(runner.admission, "admit", noted)
    return found


def test_a_warm_up_sets_the_byte_limit_of_sessions(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up sets the session byte limit to the lowest budget on any rank, capped at
    `max_session_bytes`.

    No session remains after the warm-up.
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


def test_a_warm_up_runs_with_and_without_degradations(
    make_runner: Any, null_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up runs one session without degradations and one whose first chunk has all
    degradations, because both kinds of chunks need memory.
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
        assert state.chunk.state is None, "its working set is freed"
        assert not runner.sessions.is_pinned(state.chunk.session.session_id)


def test_a_warm_up_with_cuda_graphs_runs_a_second_session(
    make_runner: Any, lingbot_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CUDA graphs, the warm-up runs two sessions. The second one captures the passes that the
    first one ran only once, so no real session has to.
    """
    runner = make_runner(lingbot_world)
    assert runner.model.warms_up_twice is False, "there are no CUDA graphs on a CPU"
    chunks = len(runner.model.warmup_inputs())
    for twice in (False, True):
        monkeypatch.setattr(runner.model, "warms_up_twice", twice)
        found = admitted(runner, monkeypatch)
        warm_up(runner)
        assert len(found) == (2 if twice else 1) * chunks


@pytest.mark.parametrize(("where", "fails_at"), [("prepare_encode", 0), ("denoise_step", 2)])
def test_a_failed_warm_up_ends_the_start(
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
def test_a_warm_up_decodes_the_largest_shared_batch(
    make_runner: Any,
    lingbot_world: Path,
    monkeypatch: pytest.MonkeyPatch,
    omni: dict[str, Any],
    model_allows: int,
    together: list[int],
) -> None:
    """The warm-up decodes its last chunk in the largest batch that the model, the session limit and
    the limit on requests per step allow.
    """
    runner = make_runner(lingbot_world, {"batch_invariant": False, **omni})
    found = admitted(runner, monkeypatch)
    decoded: list[list[Any]] = []
    monkeypatch.setattr(runner.model, "most_decoded_together", lambda request: model_allows)
    monkeypatch.setattr(runner.model, "post_decode_together", decoded.append)
    warm_up(runner)
    assert len(found) > 1
    assert decoded == [count * [found[-1].chunk] for count in together]


def test_a_later_stage_uses_the_received_tensors_in_the_warm_up() -> None:
    """In the warm-up, a later stage exchanges tensors through vLLM's messages, and starts to
    receive results only after it has sent its tensors.
    """
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


def test_a_measured_partition_requires_movable_layers(make_runner: Any, null_world: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"^omni\.pipeline_partition 'measured': the layers of NullWorldPipeline cannot",
    ):
        make_runner(null_world, {"pipeline_partition": "measured"})


class Pipeline:
    """One rank of a pipeline with two stages of two ranks each and one more rank that only decodes.

    `times` holds the other ranks' measured times.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, times: dict[int, tuple[int, float, int, float]]
    ) -> None:
        self.times = times
        self.shared: list[Any] = []
        self.model = mock.MagicMock(partition=(5, 5), num_layers=10)
        self.moves: list[Any] = []
        monkeypatch.setattr(module, "LayerMove", lambda *args: args)
        self.model.move_layers.side_effect = self.moves.append
        monkeypatch.setattr(
            parallel_state, "_WORLD", SimpleNamespace(world_size=5, cpu_group="all")
        )
        monkeypatch.setattr(dist, "all_gather_object", self.gather)

    def gather(self, found: list[Any], mine: Any, group: str) -> None:
        assert group == "all"
        assert len(found) == 5
        self.shared.append(mine)
        found[:] = [*self.times.values(), mine]

    def runner(self, stage: int) -> Any:
        pp = SimpleNamespace(
            rank_in_group=stage, world_size=3, ranks=[1, 3, 4], device_group="stages"
        )
        omni = SimpleNamespace(vae_stage=True)
        return SimpleNamespace(
            pp=pp, omni=omni, model=self.model, device=torch.device("cpu"), partition=()
        )


def others(*of_stages: tuple[int, float, int, float]) -> dict[int, tuple[int, float, int, float]]:
    return dict(enumerate(of_stages))


@pytest.mark.parametrize(
    ("mine", "rest", "partition"),
    [
        # A step of the second stage takes 5 ms longer, which is the time of 5 layers.
        ((5.0, 0.0), [(0, 4.0, 3, 0.0), (1, 10.0, 3, 0.0), (1, 9.0, 3, 0.0)], [8, 2]),
        # The slower rank of the second stage decodes for 12 ms per chunk, which is the time of 4
        # layers in 3 passes.
        ((5.0, 0.0), [(0, 5.0, 3, 0.0), (1, 5.0, 3, 12.0), (1, 5.0, 3, 1.0)], [7, 3]),
        ((5.0, 12.0), [(0, 5.0, 3, 0.0), (1, 5.0, 3, 0.0), (1, 5.0, 3, 0.0)], [3, 7]),
        ((5.0, 0.0), [(0, 5.0, 3, 0.0), (1, 5.0, 3, 0.0), (1, 5.0, 3, 0.0)], [5, 5]),
    ],
)
def test_layers_move_to_balance_the_stages(
    monkeypatch: pytest.MonkeyPatch,
    mine: tuple[float, float],
    rest: list[tuple[int, float, int, float]],
    partition: list[int],
) -> None:
    """Layers move between stages to balance the stages' costs, which are their median step times
    and their decode times. A VAE stage's times are ignored.
    """
    step_ms, decode_ms = mine
    pipeline = Pipeline(monkeypatch, others(*rest, (2, 0.0, 1, 1000.0)))
    runner = pipeline.runner(0)
    times = {"steps": [step_ms, 100.0, step_ms], "decode": [decode_ms / 2] * 2}
    with logged(module.logger) as messages:
        rebalance(runner, times)
    assert pipeline.shared == [(0, step_ms, 3, decode_ms)]
    assert runner.partition == tuple(partition)
    moved = [([1, 3], 0, (5, 5), partition, "stages")] if partition != [5, 5] else []
    assert pipeline.moves == moved
    (message,) = messages
    assert message.startswith("costs of the pipeline stages: [StageCost(")
    assert message.endswith(f")]; layers of each stage: {partition}")


def test_a_stage_without_layers_only_stores_the_partition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stage without layers only stores the partition, because every snapshot contains it."""
    rest = [(0, 5.0, 3, 0.0), (0, 5.0, 3, 0.0), (1, 10.0, 3, 0.0), (1, 10.0, 3, 0.0)]
    pipeline = Pipeline(monkeypatch, others(*rest))
    runner = pipeline.runner(2)
    rebalance(runner, {})
    assert pipeline.shared == [(2, 0.0, 1, 0.0)]
    assert runner.partition == (8, 2)
    assert pipeline.moves == []


def test_one_stage_keeps_all_layers(make_runner: Any, causal_wan: Path) -> None:
    runner = make_runner(causal_wan, {"pipeline_partition": "measured"})
    assert runner.partition == (runner.model.num_layers,)


def test_memory_of_moved_layers_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of layers that have moved to another stage is freed before the session budget is
    measured.

    The allocator's cache is emptied after the device has been synchronized.
    """
    pipeline = Pipeline(
        monkeypatch,
        others((0, 5.0, 3, 0.0), (1, 10.0, 3, 0.0), (1, 10.0, 3, 0.0), (2, 0.0, 1, 0.0)),
    )
    runner = pipeline.runner(0)
    runner.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "synchronize", pipeline.moves.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pipeline.moves.append(("empty",)))
    rebalance(runner, {"steps": [5.0] * 3})
    assert pipeline.moves[1:] == [runner.device, ("empty",)]
