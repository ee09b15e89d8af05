# SPDX-License-Identifier: Apache-2.0
"""`HiddenStateCollector` copies the hidden states of a step and returns them with the sampled
tokens.
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


def make_collector(**options: Any) -> HiddenStateCollector:
    return HiddenStateCollector(LAYERS, (0, 2, LAYERS), **options)


def hidden(num_rows: int, layer: int = LAYERS) -> torch.Tensor:
    """Return hidden states in which every value for token i in layer k is 100 k + i."""
    return (100.0 * layer + torch.arange(num_rows))[:, None].expand(num_rows, WIDTH).clone()


def sources(num_rows: int) -> dict[int, torch.Tensor]:
    return {layer: hidden(num_rows, layer) for layer in (0, 2, LAYERS)}


def output(sampled: list[list[int]]) -> ModelRunnerOutput:
    names = [f"r{i}" for i in range(len(sampled))]
    return ModelRunnerOutput(
        names, {name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
    )


def take(
    collector: HiddenStateCollector,
    counts: list[int],
    computed: list[int],
    sampled: list[list[int]],
    drafts: Any = None,
) -> list[Any]:
    """Run one step for requests r0, r1, ... and return the values in column 0 for each request and
    layer.
    """
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    names = [f"r{i}" for i in range(len(counts))]
    # The last 3 tokens are padding, which data parallelism and CUDA graphs add to a batch.
    step = StepHiddenStates(names, offsets, computed, drafts or {}, sources(offsets[-1] + 3))
    entries = collector.copy_step(step).attach_to_output(output(sampled)).pooler_output
    assert entries is None or len(entries) == len(counts)
    return [None if e is None else e[:, :, 0].tolist() for e in entries or [None] * len(counts)]


def test_requests_without_hidden_states_are_ignored() -> None:
    """A request that does not ask for hidden states creates no entry, no output field and no
    copy.
    """
    collector = make_collector()
    pooled = replace(new_request("r2", "all"), sampling_params=None)
    collector.update(
        scheduler_output(
            new=[new_request("r0", None), new_request("r1", None, {"other": 1}), pooled]
        )
    )
    assert not collector and collector.bytes_copied == 0


def test_mode_all_returns_every_scheduled_token() -> None:
    """In `all` mode, the hidden states of every scheduled token are returned. Requests that do not
    ask for hidden states get none.
    """
    collector = make_collector()
    collector.update(scheduler_output(new=[new_request("r1", "all", prompt_len=5)]))
    assert take(collector, [2, 3], [0, 0], [[7], []]) == [None, [[402.0], [403.0], [404.0]]]
    assert take(collector, [1, 2], [2, 3], [[7], [8]]) == [None, [[401.0], [402.0]]]
    assert take(collector, [1, 1], [3, 5], [[7], [9]]) == [None, [[401.0]]]


def test_mode_generated_starts_after_the_prompt() -> None:
    """In `generated` mode, the hidden states of the prompt are not copied."""
    collector = make_collector()
    collector.update(scheduler_output(new=[new_request("r0", "generated", prompt_len=5)]))
    assert take(collector, [3], [0], [[]]) == [None]
    assert take(collector, [2], [3], [[8]]) == [None]
    assert collector.bytes_copied == 0
    assert take(collector, [1], [5], [[9]]) == [[[400.0]]]
    assert collector.bytes_copied == WIDTH * 4


def test_mode_generated_after_a_preemption() -> None:
    """After a preemption, the prompt and the generated tokens are computed together.

    In `generated` mode, only the hidden states of the generated tokens are returned.
    """
    collector = make_collector()
    collector.update(scheduler_output(new=[new_request("r0", "generated", prompt_len=5)]))
    assert take(collector, [8], [0], [[9]]) == [[[405.0], [406.0], [407.0]]]


def test_mode_last_returns_one_token_per_step() -> None:
    """In `last` mode, each step returns the hidden states of its last token only. Prefill chunks
    before the last one return none.
    """
    collector = make_collector()
    collector.update(scheduler_output(new=[new_request("r0", "last", prompt_len=5)]))
    assert take(collector, [3], [0], [[]]) == [None]
    assert take(collector, [2], [3], [[8]]) == [[[401.0]]]
    assert take(collector, [1], [5], [[8]]) == [[[400.0]]]


@pytest.mark.parametrize(
    ("mode", "sampled", "expected"),
    [
        ("all", [1, 2], [[400.0], [401.0]]),
        ("all", [1, 2, 3, 4], [[400.0], [401.0], [402.0], [403.0]]),
        ("generated", [1, 2], [[400.0], [401.0]]),
        ("last", [1, 2, 3], [[402.0]]),
    ],
)
def test_hidden_states_of_rejected_drafts_are_dropped(
    mode: str, sampled: list[int], expected: list[Any]
) -> None:
    """Hidden states of rejected drafts are dropped. If a step with three drafts samples n tokens,
    it has accepted n - 1 drafts.
    """
    collector = make_collector()
    collector.update(scheduler_output(new=[new_request("r0", mode, prompt_len=5)]))
    assert take(collector, [4], [6], [sampled], {"r0": 3}) == [expected]


@pytest.mark.parametrize("sampled", [[], [[]]], ids=["no request", "not this one"])
def test_drafts_are_retained_if_nothing_was_sampled(sampled: list[list[int]]) -> None:
    """If no token was sampled, no draft has been rejected, so all hidden states are returned."""
    collector = make_collector()
    collector.update(scheduler_output(new=[new_request("r0", "all", prompt_len=5)]))
    assert take(collector, [2], [6], sampled, {"r0": 1}) == [[[400.0], [401.0]]]


def test_layers_are_returned_in_the_requested_order() -> None:
    """Layers are returned in the requested order and numbered as in Hugging Face Transformers.
    Negative numbers count from the last layer.
    """
    collector = make_collector()
    collector.update(
        scheduler_output(
            new=[
                new_request("r0", "all", prompt_len=1, layers=(-1, 0)),
                new_request("r1", "all", prompt_len=1, layers=(2, LAYERS)),
                new_request("r2", "all", prompt_len=1, layers=(-1, -LAYERS - 1)),
            ]
        )
    )
    assert take(collector, [1, 1, 1], [0, 0, 0], [[1], [1], [1]]) == [
        [[400.0, 0.0]],
        [[201.0, 401.0]],
        [[402.0, 2.0]],
    ]
    assert collector.bytes_copied == 3 * 2 * WIDTH * 4


def test_requests_of_one_copy_get_their_own_hidden_states() -> None:
    """Requests whose hidden states are copied together each get their own hidden states.

    The batch starts with a request that asks for no hidden states, so no offset is zero.
    """
    collector = make_collector()
    asking = [
        new_request(name, mode, prompt_len=3)
        for name, mode in (("r1", "all"), ("r2", "all"), ("r3", "last"))
    ]
    collector.update(scheduler_output(new=asking))
    found = take(collector, [4, 3, 3, 3], [0, 0, 0, 0], [[1], [1], [1], [1]])
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
def test_a_refused_request_affects_no_other(requested: Any, code: str, named: str) -> None:
    """The error for a refused request is in that request's own entry, and other requests still get
    their hidden states.
    """
    collector = make_collector()
    bad = new_request(
        "r0", "all", requested.get("extra"), prompt_len=2, layers=requested.get("layers", (-1,))
    )
    collector.update(scheduler_output(new=[bad, new_request("r1", "all", prompt_len=2)]))
    step = StepHiddenStates(["r0", "r1"], [0, 2, 4], [0, 0], {}, sources(4))
    entries = collector.copy_step(step).attach_to_output(output([[1], [1]])).pooler_output
    assert entries is not None and entries[1] is not None and entries[1].shape == (2, 1, WIDTH)
    with pytest.raises(RequestFailed, match=named) as failed:
        unpack(entries[0])
    assert failed.value.code == code
    collector.update(scheduler_output(finished=["r0", "r1"]))
    assert not collector


def test_an_unsupported_configuration_refuses_every_request() -> None:
    """In an unsupported configuration, every request for hidden states is refused with the
    collector's error.
    """
    collector = make_collector(refusal="not with this option")
    collector.update(scheduler_output(new=[new_request("r0", "all")]))
    step = StepHiddenStates(["r0"], [0, 1], [0], {}, sources(1))
    with pytest.raises(RequestFailed, match="not with this option") as failed:
        unpack(collector.copy_step(step).attach_to_output(output([[1]])).pooler_output[0])  # type: ignore[index]
    assert failed.value.code == "unsupported"


def test_ranks_without_a_reader_copy_nothing() -> None:
    """Tensor-parallel ranks other than the first one track the requests but copy no hidden
    states.
    """
    collector = make_collector(copies=False)
    collector.update(scheduler_output(new=[new_request("r0", "all", prompt_len=2)]))
    assert take(collector, [2], [0], [[1]]) == [None] and collector.bytes_copied == 0 and collector


def test_copied_hidden_states_outlive_the_buffers_of_the_model() -> None:
    """Copied hidden states stay unchanged when CUDA graphs and the next step overwrite the model's
    output in place.
    """
    collector = make_collector()
    collector.update(scheduler_output(new=[new_request("r0", "all", prompt_len=2)]))
    buffers = sources(2)
    taken = collector.copy_step(StepHiddenStates(["r0"], [0, 2], [0], {}, buffers))
    buffers[LAYERS].fill_(-1)
    entries = taken.attach_to_output(output([[1]])).pooler_output
    assert (
        entries is not None
        and entries[0] is not None
        and entries[0][:, 0, 0].tolist() == [400.0, 401.0]
    )
