# SPDX-License-Identifier: Apache-2.0
"""`StreamBatchScheduler`: steps in flight, the order within a session, the batch limit and pipeline
stages.
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
    """Return a harness factory for one of the two scheduling policies. When requests have no
    deadlines, both policies behave the same.
    """
    return partial(Harness, null_world, scheduling=request.param)


def test_a_request_is_scheduled_until_it_has_a_result(new_harness: Callable[..., Harness]) -> None:
    """A request is scheduled once per step until it has a result, and never afterwards."""
    harness = new_harness()
    harness.add("r", "s")
    assert [harness.step(), harness.step(), harness.step(done="r"), harness.step()] == [
        ["r"],
        ["r"],
        ["r"],
        [],
    ]


def test_a_request_never_has_two_steps_in_flight(new_harness: Callable[..., Harness]) -> None:
    """While the output of a request's step is pending, the scheduler may schedule other requests
    but not this one.
    """
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


def test_max_num_batched_tokens_limits_the_batch(new_harness: Callable[..., Harness]) -> None:
    """Each request's step counts as one token towards `--max-num-batched-tokens`. If this option is
    smaller than the batch limit, the option applies instead.
    """
    for max_tokens, expected in ((2, 2), (9, 3), (0, 3)):
        harness = new_harness(max_requests_per_step=3, max_tokens=max_tokens)
        for name in "abcd":
            harness.add(name, name)
        assert len(harness.step()) == expected


def test_chunks_of_a_session_run_in_the_order_of_their_index(
    new_harness: Callable[..., Harness],
) -> None:
    """If chunk 2 of a session arrives before chunk 1, chunk 1 still runs first, and other sessions
    are not held up.
    """
    harness = new_harness()
    harness.add("s2", "s", 2)
    harness.add("s1", "s", 1)
    harness.add("t", "t", 0)
    assert harness.step() == ["s1", "t"]
    assert harness.step(done=["s1"]) == ["s1", "t"]
    assert sorted(harness.step(done=["s2", "t"])) == ["s2", "t"]


@pytest.mark.parametrize("aborted", ["s1", "s2"])
def test_aborting_a_chunk_starts_the_next_one(
    new_harness: Callable[..., Harness], aborted: str
) -> None:
    """When a running or a waiting chunk is aborted, the next chunk of its session starts."""
    harness = new_harness()
    harness.add("s1", "s", 1)
    harness.add("s2", "s", 2)
    harness.step()
    harness.scheduler.finish_requests(aborted, RequestStatus.FINISHED_ABORTED)
    left = "s2" if aborted == "s1" else "s1"
    assert harness.step(done=[left]) == [left]
    assert not harness.scheduler.has_unfinished_requests() and not len(harness.scheduler._streams)


def test_requests_are_spread_over_the_stages(new_harness: Callable[..., Harness]) -> None:
    """Four sessions on two pipeline stages run as two batches of two. Chunks that wait for their
    predecessors do not count towards a batch.
    """
    harness = new_harness(stages=2)
    for name in "abcd":
        harness.add(name, name, 0)
        harness.add(f"{name}-next", name, 1)
    first, _ = harness.schedule()
    second, _ = harness.schedule()
    assert (first, second) == (["a", "b"], ["c", "d"])


def test_the_next_chunk_starts_while_a_result_is_pending(
    new_harness: Callable[..., Harness],
) -> None:
    """A request that only has to deliver its result does not count towards the batch limit, so the
    next chunk starts.
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


def test_stock_worker_outputs_are_accepted(new_harness: Callable[..., Harness]) -> None:
    """If a stock worker's output has no result for a request, the request is scheduled again."""
    harness = new_harness()
    harness.add("a", "a")
    for done, left in ((), ["a"]), (("a",), []):
        names, output = harness.schedule()
        harness.stock_response(output, done)
        assert names == ["a"] and list(harness.scheduler.requests) == left


def test_an_aborted_chunk_in_its_last_step_is_removed(
    new_harness: Callable[..., Harness],
) -> None:
    harness = new_harness()
    harness.add("a", "a")
    harness.add("b", "b")
    _, output = harness.schedule()
    harness.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    harness.response(output, denoised=["a"])
    assert not harness.scheduler._delivering and harness.step(done="b") == ["b"]


def test_malformed_requests_reach_the_runner(new_harness: Callable[..., Harness]) -> None:
    """The scheduler ignores request fields of the wrong type, because the runner reports them."""
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


def test_a_request_without_params_makes_pooling_fail(
    new_harness: Callable[..., Harness],
) -> None:
    """A `/pooling` request without this package's parameters fails.

    vLLM would otherwise return status 200 with the error's bytes as data.
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
