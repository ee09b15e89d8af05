# SPDX-License-Identifier: Apache-2.0
"""HiddenStateCollector: which rows of a step are taken, and what becomes of them once tokens are
known.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ar_steps import new_request, scheduler_output
from vllm.v1.outputs import ModelRunnerOutput

from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.worker.ar.hidden_states import HiddenStateCollector, StepHiddenStates

LAYERS, WIDTH = 4, 8


def make_rows(**options: Any) -> HiddenStateCollector:
    return HiddenStateCollector(LAYERS, (0, 2, LAYERS), **options)


def hidden(num_rows: int, layer: int = LAYERS) -> torch.Tensor:
    """Row i of layer k is filled with 100 k + i."""
    return (100.0 * layer + torch.arange(num_rows))[:, None].expand(num_rows, WIDTH).clone()


def sources(num_rows: int) -> dict[int, torch.Tensor]:
    return {layer: hidden(num_rows, layer) for layer in (0, 2, LAYERS)}


def output(sampled: list[list[int]]) -> ModelRunnerOutput:
    names = [f"r{i}" for i in range(len(sampled))]
    return ModelRunnerOutput(
        names, {name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
    )


def take(
    rows: HiddenStateCollector,
    counts: list[int],
    computed: list[int],
    sampled: list[list[int]],
    drafts: Any = None,
) -> list[Any]:
    """One step of requests r0, r1, ...; per request the values of column 0, per layer if there
    are several.
    """
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    names = [f"r{i}" for i in range(len(counts))]
    # 3 padded rows behind the real ones, as data parallel and CUDA graphs make them
    step = StepHiddenStates(names, offsets, computed, drafts or {}, sources(offsets[-1] + 3))
    entries = rows.copy_step(step).attach_to_output(output(sampled)).pooler_output
    assert entries is None or len(entries) == len(counts)
    return [None if e is None else e[:, :, 0].tolist() for e in entries or [None] * len(counts)]


def test_requests_that_did_not_request_leave_no_trace() -> None:
    """No entry, no output field, no bytes; the object stays false."""
    rows = make_rows()
    pooled = replace(new_request("r2", "all"), sampling_params=None)
    rows.update(
        scheduler_output(
            new=[new_request("r0", None), new_request("r1", None, {"other": 1}), pooled]
        )
    )
    assert not rows and rows.bytes_copied == 0


def test_all_rows_of_a_prompt_in_chunks_and_of_every_step() -> None:
    """Each scheduled token gives its row; other requests of the batch give none."""
    rows = make_rows()
    rows.update(scheduler_output(new=[new_request("r1", "all", prompt_len=5)]))
    assert take(rows, [2, 3], [0, 0], [[7], []]) == [None, [[402.0], [403.0], [404.0]]]
    assert take(rows, [1, 2], [2, 3], [[7], [8]]) == [None, [[401.0], [402.0]]]
    assert take(rows, [1, 1], [3, 5], [[7], [9]]) == [None, [[401.0]]]


def test_generated_rows_start_behind_the_prompt() -> None:
    """A prompt's rows are not even copied."""
    rows = make_rows()
    rows.update(scheduler_output(new=[new_request("r0", "generated", prompt_len=5)]))
    assert take(rows, [3], [0], [[]]) == [None]
    assert take(rows, [2], [3], [[8]]) == [None]
    assert rows.bytes_copied == 0
    assert take(rows, [1], [5], [[9]]) == [[[400.0]]]
    assert rows.bytes_copied == WIDTH * 4


def test_generated_rows_of_a_request_that_starts_again() -> None:
    """After a preemption prompt and generated tokens are computed together: only the latter
    count.
    """
    rows = make_rows()
    rows.update(scheduler_output(new=[new_request("r0", "generated", prompt_len=5)]))
    assert take(rows, [8], [0], [[9]]) == [[[405.0], [406.0], [407.0]]]


def test_the_last_row_is_one_per_step_and_none_for_a_first_chunk() -> None:
    rows = make_rows()
    rows.update(scheduler_output(new=[new_request("r0", "last", prompt_len=5)]))
    assert take(rows, [3], [0], [[]]) == [None]
    assert take(rows, [2], [3], [[8]]) == [[[401.0]]]
    assert take(rows, [1], [5], [[8]]) == [[[400.0]]]


@pytest.mark.parametrize(
    ("mode", "sampled", "expected"),
    [
        ("all", [1], [[400.0]]),
        ("all", [1, 2], [[400.0], [401.0]]),
        ("all", [1, 2, 3, 4], [[400.0], [401.0], [402.0], [403.0]]),
        ("generated", [1, 2], [[400.0], [401.0]]),
        ("last", [1], [[400.0]]),
        ("last", [1, 2, 3], [[402.0]]),
    ],
)
def test_rows_of_rejected_drafts_are_dropped(
    mode: str, sampled: list[int], expected: list[Any]
) -> None:
    """Three drafts: a step that samples n tokens has accepted n - 1 of them."""
    rows = make_rows()
    rows.update(scheduler_output(new=[new_request("r0", mode, prompt_len=5)]))
    assert take(rows, [4], [6], [sampled], {"r0": 3}) == [expected]


@pytest.mark.parametrize("sampled", [[], [[]]], ids=["no request", "not this one"])
def test_drafts_are_retained_where_nothing_was_sampled(sampled: list[list[int]]) -> None:
    """None of them has been rejected then."""
    rows = make_rows()
    rows.update(scheduler_output(new=[new_request("r0", "all", prompt_len=5)]))
    assert take(rows, [2], [6], sampled, {"r0": 1}) == [[[400.0], [401.0]]]


def test_layers_come_in_the_order_requested() -> None:
    """By transformers' numbers; -1 and the number of blocks are the same layer, as are 0 and the
    lowest.
    """
    rows = make_rows()
    rows.update(
        scheduler_output(
            new=[
                new_request("r0", "all", prompt_len=1, layers=(-1, 0)),
                new_request("r1", "all", prompt_len=1, layers=(2, LAYERS)),
                new_request("r2", "all", prompt_len=1, layers=(-1, -LAYERS - 1)),
            ]
        )
    )
    assert take(rows, [1, 1, 1], [0, 0, 0], [[1], [1], [1]]) == [
        [[400.0, 0.0]],
        [[201.0, 401.0]],
        [[402.0, 2.0]],
    ]
    assert rows.bytes_copied == 3 * 2 * WIDTH * 4


def test_requests_that_share_a_copy_get_their_own_rows() -> None:
    """Behind one that did not ask, so that none begins where the batch begins."""
    rows = make_rows()
    asking = [
        new_request(name, mode, prompt_len=3)
        for name, mode in (("r1", "all"), ("r2", "all"), ("r3", "last"))
    ]
    rows.update(scheduler_output(new=asking))
    found = take(rows, [4, 3, 3, 3], [0, 0, 0, 0], [[1], [1], [1], [1]])
    assert found == [None, [[404.0], [405.0], [406.0]], [[407.0], [408.0], [409.0]], [[412.0]]]


@pytest.mark.parametrize(
    ("requested", "code", "named"),
    [
        ({"layers": (9,)}, "unsupported_layer", "4 blocks"),
        ({"layers": (-6,)}, "unsupported_layer", "4 blocks"),
        ({"layers": (1,)}, "unsupported_layer", "hidden_state_layers"),
        ({"extra": {"omni": {"hidden_states": "?"}}}, "invalid_request", "hidden_states"),
    ],
)
def test_a_refused_request_gets_its_reason_and_no_other_is_touched(
    requested: Any, code: str, named: str
) -> None:
    """The reason stands in that request's entry from its first step on, until it has ended."""
    rows = make_rows()
    bad = new_request(
        "r0", "all", requested.get("extra"), prompt_len=2, layers=requested.get("layers", (-1,))
    )
    rows.update(scheduler_output(new=[bad, new_request("r1", "all", prompt_len=2)]))
    step = StepHiddenStates(["r0", "r1"], [0, 2, 4], [0, 0], {}, sources(4))
    entries = rows.copy_step(step).attach_to_output(output([[1], [1]])).pooler_output
    assert entries is not None and entries[1] is not None and entries[1].shape == (2, 1, WIDTH)
    with pytest.raises(RequestFailed, match=named) as failed:
        unpack(entries[0])
    assert failed.value.code == code
    rows.update(scheduler_output(finished=["r0", "r1"]))
    assert not rows


def test_a_configuration_without_rows_refuses_every_request() -> None:
    rows = make_rows(refusal="not with this option")
    rows.update(scheduler_output(new=[new_request("r0", "all")]))
    step = StepHiddenStates(["r0"], [0, 1], [0], {}, sources(1))
    with pytest.raises(RequestFailed, match="not with this option") as failed:
        unpack(rows.copy_step(step).attach_to_output(output([[1]])).pooler_output[0])  # type: ignore[index]
    assert failed.value.code == "unsupported"


def test_ranks_whose_output_no_one_reads_copy_nothing() -> None:
    """Tensor-parallel ranks other than the first keep the bookkeeping only."""
    rows = make_rows(copies=False)
    rows.update(scheduler_output(new=[new_request("r0", "all", prompt_len=2)]))
    assert take(rows, [2], [0], [[1]]) == [None] and rows.bytes_copied == 0 and rows


def test_taken_rows_outlive_the_models_buffers() -> None:
    """CUDA graphs and the next step overwrite the model's output in place."""
    rows = make_rows()
    rows.update(scheduler_output(new=[new_request("r0", "all", prompt_len=2)]))
    buffers = sources(2)
    taken = rows.copy_step(StepHiddenStates(["r0"], [0, 2], [0], {}, buffers))
    buffers[LAYERS].fill_(-1)
    entries = taken.attach_to_output(output([[1]])).pooler_output
    assert (
        entries is not None
        and entries[0] is not None
        and entries[0][:, 0, 0].tolist() == [400.0, 401.0]
    )
