# SPDX-License-Identifier: Apache-2.0
"""StreamBatchScheduler on its own: one micro-step in flight, session order, batch limit,
spreading over stages.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from scheduler_harness import Harness
from vllm.pooling_params import PoolingParams
from vllm.utils.serial_utils import tensor2binary
from vllm.v1.request import Request, RequestStatus

from vllm_omni.inputs import DiffusionParams


@pytest.fixture(params=["fifo", "deadline"])
def new_harness(request: pytest.FixtureRequest, null_world: Path) -> Callable[..., Harness]:
    """Everything here holds under both policies: without deadlines they do the same."""
    return partial(Harness, null_world, scheduling=request.param)


def test_a_request_is_scheduled_until_it_has_a_result(new_harness: Callable[..., Harness]) -> None:
    """Each step once; after the result never again."""
    harness = new_harness()
    harness.add("r", "s")
    assert [harness.step(), harness.step(), harness.step(done="r"), harness.step()] == [
        ["r"],
        ["r"],
        ["r"],
        [],
    ]


def test_a_request_never_has_two_steps_in_flight(new_harness: Callable[..., Harness]) -> None:
    """While its output is outstanding a second schedule() leaves it out; others may go."""
    harness = new_harness(stages=2)
    harness.add("a", "a")
    harness.add("b", "b")
    first, first_output = harness.schedule()
    second, second_output = harness.schedule()
    third, _ = harness.schedule()
    assert (first, second, third) == (["a"], ["b"], [])
    harness.response(first_output)
    assert harness.schedule()[0] == ["a"]
    harness.response(second_output)
    assert harness.schedule()[0] == ["b"]


def test_vllms_bound_on_tokens_is_a_bound_on_the_batch(new_harness: Callable[..., Harness]) -> None:
    """`--max-num-batched-tokens`: one token is one micro-step; the smaller of both bounds holds."""
    for max_tokens, expected in ((2, 2), (9, 3), (0, 3)):
        harness = new_harness(max_requests_per_step=3, max_tokens=max_tokens)
        for name in "abcd":
            harness.add(name, name)
        assert len(harness.step()) == expected


def test_chunks_of_a_session_run_in_the_order_of_their_index(
    new_harness: Callable[..., Harness],
) -> None:
    """2 arrived before 1 and before it could start; other sessions are not held up."""
    harness = new_harness()
    harness.add("s2", "s", 2)
    harness.add("s1", "s", 1)
    harness.add("t", "t", 0)
    assert harness.step() == ["s1", "t"]
    assert harness.step(done=["s1"]) == ["s1", "t"]
    assert sorted(harness.step(done=["s2", "t"])) == ["s2", "t"]


def test_a_chunk_that_runs_is_not_overtaken(new_harness: Callable[..., Harness]) -> None:
    """An earlier index that arrives late waits for the running one (the runner then says it is
    out of order).
    """
    harness = new_harness()
    harness.add("s2", "s", 2)
    assert harness.step() == ["s2"]
    harness.add("s1", "s", 1)
    assert harness.step(done=["s2"]) == ["s2"]
    assert harness.step() == ["s1"]


def test_chunks_without_index_run_in_order_of_arrival(new_harness: Callable[..., Harness]) -> None:
    harness = new_harness()
    harness.add("first", "s")
    harness.add("second", "s")
    assert harness.step(done=["first"]) == ["first"]
    assert harness.step() == ["second"]


@pytest.mark.parametrize("aborted", ["s1", "s2"])
def test_aborting_a_chunk_lets_the_next_one_go(
    new_harness: Callable[..., Harness], aborted: str
) -> None:
    """Whether the aborted chunk was running or waiting; nothing of it stays behind."""
    harness = new_harness()
    harness.add("s1", "s", 1)
    harness.add("s2", "s", 2)
    harness.step()
    harness.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
    left = "s2" if aborted == "s1" else "s1"
    assert harness.step(done=[left]) == [left]
    assert not harness.scheduler.has_unfinished_requests() and not len(harness.scheduler._streams)


def test_a_batch_has_at_most_the_configured_number_of_requests(
    new_harness: Callable[..., Harness],
) -> None:
    harness = new_harness(max_requests_per_step=2)
    for name in "abc":
        harness.add(name, name)
    assert harness.step() == ["a", "b"]
    assert harness.step(done="a") == ["a", "b"]
    assert harness.step() == ["b", "c"]


def test_requests_are_spread_over_the_stages(new_harness: Callable[..., Harness]) -> None:
    """Four sessions on two stages: two batches of two in flight, not one of four; queued chunks
    do not count.
    """
    harness = new_harness(stages=2)
    for name in "abcd":
        harness.add(name, name, 0)
        harness.add(f"{name}-next", name, 1)
    first, _ = harness.schedule()
    second, _ = harness.schedule()
    assert (first, second) == (["a", "b"], ["c", "d"])


def test_the_next_chunk_starts_while_the_last_result_is_on_its_way(
    new_harness: Callable[..., Harness],
) -> None:
    """The one that only delivers takes no place of one that works, and ends its session's turn
    only once.
    """
    harness = new_harness(max_requests_per_step=1)
    for index in range(3):
        harness.add(f"s{index}", "s", index)
    assert harness.step(denoised=["s0"]) == ["s0"]
    assert sorted(harness.step(done=["s0"])) == ["s0", "s1"]
    assert harness.step(denoised=["s1"]) == ["s1"]
    harness.scheduler.finish_requests("s1", RequestStatus.FINISHED_ABORTED)
    assert harness.step(done=["s2"]) == ["s2"]
    assert not harness.scheduler.has_unfinished_requests()
    assert not len(harness.scheduler._streams) and not harness.scheduler._delivering


def test_a_worker_of_stock_vllm_is_understood(new_harness: Callable[..., Harness]) -> None:
    """Its outputs are read as stock: no result means another step."""
    harness = new_harness()
    harness.add("a", "a")
    for done, left in ((), ["a"]), (("a",), []):
        names, output = harness.schedule()
        harness.stock_response(output, done)
        assert names == ["a"] and list(harness.scheduler.requests) == left


def test_a_chunk_that_is_denoised_when_it_has_been_aborted_leaves_nothing(
    new_harness: Callable[..., Harness],
) -> None:
    harness = new_harness()
    harness.add("a", "a")
    harness.add("b", "b")
    _, output = harness.schedule()
    harness.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    harness.response(output, denoised=["a"])
    assert not harness.scheduler._delivering and harness.step(done="b") == ["b"]


def test_malformed_requests_still_reach_the_runner(new_harness: Callable[..., Harness]) -> None:
    """Fields of the wrong type must not upset the scheduler: the runner answers them."""
    harness = new_harness()
    for number, extra in enumerate(
        ({}, {"omni": 1}, {"omni": {"session_id": 3, "chunk_index": "x"}})
    ):
        params = DiffusionParams(session_id="s").to_pooling_params()
        params.extra_kwargs = extra
        harness.scheduler.add_request(
            Request(
                request_id=str(number),
                prompt_token_ids=[0],
                sampling_params=None,
                pooling_params=params,
            )
        )
    assert harness.step(done="012") == ["0", "1", "2"]


def test_a_request_without_params_ends_with_data_that_pooling_cannot_response_with(
    new_harness: Callable[..., Harness],
) -> None:
    """vLLM's own `/pooling` sends such requests, and would answer 200 with the bytes of an error
    as data.
    """
    harness = new_harness()
    harness.add("ours", "s")
    bare = PoolingParams(task="plugin")
    harness.scheduler.add_request(
        Request(request_id="bare", prompt_token_ids=[0], sampling_params=None, pooling_params=bare)
    )
    _, output = harness.schedule()
    responses = harness.stock_response(output, done=("ours", "bare"))
    data = {response.request_id: response.pooling_output for response in responses[0].outputs}
    assert data["ours"].dtype == torch.uint8
    with pytest.raises(RuntimeError):
        data["bare"].tolist()
    with pytest.raises(NotImplementedError):
        tensor2binary(data["bare"], "float32", "native")
    assert not harness.scheduler._without_params


def test_a_request_without_params_that_is_aborted_leaves_nothing(
    new_harness: Callable[..., Harness],
) -> None:
    harness = new_harness()
    bare = PoolingParams(task="plugin")
    harness.scheduler.add_request(
        Request(request_id="bare", prompt_token_ids=[0], sampling_params=None, pooling_params=bare)
    )
    harness.scheduler.finish_requests("bare", RequestStatus.FINISHED_ABORTED)
    assert not harness.scheduler._without_params
