# SPDX-License-Identifier: Apache-2.0
"""How chunks are grouped for shared decodes, and how failed shared decodes are handled. The tests
use a mock model.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.requests import RequestState
from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.worker.diffusion.decode import ChunkEnd, ResultStream


class Model:
    """A mock model that decodes chunks with the same prompt together.

    Args:
        most: For each request id, the maximum number of chunks in a decode that contains this
            request's chunk.
        fails: Prompt for which a shared decode raises an error.
    """

    def __init__(self, most: dict[str, int], fails: str = "") -> None:
        self.most, self.fails = most, fails
        self.decoded: list[str] = []

    def batch_key(self, request: Any) -> str:
        return str(request.params.prompt)

    def most_decoded_together(self, request: Any) -> int:
        return self.most[request.request_id]

    def post_decode_together(
        self, batch: Any
    ) -> list[tuple[dict[str, Any], dict[str, torch.Tensor]]]:
        if self.batch_key(batch[0]) == self.fails:
            raise RuntimeError("no room for so many")
        self.decoded.append("".join(request.request_id for request in batch))
        return [
            ({"of": request.request_id}, {"frames": torch.tensor(int(request.request_id))})
            for request in batch
        ]


def states(letters: str) -> list[RequestState]:
    """Return request states for chunks 0, 1, 2, ..., started one second apart. Each letter in
    `letters` is the prompt of one chunk.
    """
    found = []
    for number, letter in enumerate(letters):
        params = DiffusionParams(session_id=f"s{number}", prompt=letter)
        session = SimpleNamespace(session_id=f"s{number}", chunk_index=number)
        request: DiffusionRequest[Any, Any] = DiffusionRequest(str(number), params, {}, session)
        found.append(RequestState(str(number), params, {}, chunk=request, started_s=-float(number)))
    return found


def chunk_end(model: Any, *, decodes: bool = True) -> ChunkEnd:
    results = ResultStream(torch.device("cpu"), overlap=False)
    unused: Any = None
    return ChunkEnd(
        model, unused, unused, unused, results, decodes=decodes, shares_decode=False, overlap=False
    )


@pytest.mark.parametrize(
    ("letters", "most", "groups"),
    [
        ("a", [4], []),
        ("aa", [4, 4], ["01"]),
        ("aaa", [4, 4, 4], ["012"]),
        ("aaa", [2, 4, 4], ["01"]),
        ("aaaa", [4, 2, 4, 4], ["01", "23"]),
        ("aaa", [1, 4, 4], ["12"]),
        ("abab", [4, 4, 4, 4], ["02", "13"]),
    ],
)
def test_compatible_chunks_share_a_decode(letters: str, most: list[int], groups: list[str]) -> None:
    """No group is larger than any of its chunks allows.

    A chunk that fits into no group is decoded by itself later.
    """
    model = Model({str(number): each for number, each in enumerate(most)})
    chunks = states(letters)
    chunk_end(model).decode_together(chunks)
    assert model.decoded == groups
    assert [state.request_id for state in chunks if state.pending] == sorted("".join(groups))
    for state in chunks:
        if state.pending is not None:
            meta, tensors = unpack(state.pending.envelope())
            assert (meta["session_id"], meta["chunk_index"]) == (
                f"s{state.request_id}",
                int(state.request_id),
            )
            assert (meta["of"], int(tensors["frames"])) == (state.request_id, int(state.request_id))
            assert list(meta["timings_ms"]) == ["decode", "total"]


def test_every_result_reports_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk's total time is measured from its own start, even if its decode is shared."""
    chunks = states("aaa")
    chunk_end(Model(dict.fromkeys("012", 4))).decode_together(chunks)
    monkeypatch.setattr(
        "vllm_omni.model_executor.results.time", SimpleNamespace(perf_counter=lambda: 1.0)
    )
    totals = [
        unpack(state.pending.envelope())[0]["timings_ms"]["total"]
        for state in chunks
        if state.pending
    ]
    assert totals == [[1000.0], [2000.0], [3000.0]]


def test_failed_and_decoded_chunks_are_not_decoded_again() -> None:
    """Chunks that have failed or already have a result are not decoded again."""
    model, chunks = Model(dict.fromkeys("01234", 4)), states("aaaaa")
    end = chunk_end(model)
    end.decode_together(chunks[:2])
    chunks[2].failure = RequestFailed("non_finite", "of another rank")
    first = [state.pending for state in chunks[:2]]
    end.decode_together(chunks)
    assert model.decoded == ["01", "34"]
    assert [state.pending for state in chunks[:2]] == first
    assert chunks[2].pending is None


def test_a_failed_shared_decode_does_not_affect_other_groups(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If a shared decode fails, its chunks are later decoded one at a time. Other groups are
    unaffected.

    The cause of the failure is logged.
    """
    model, chunks = Model(dict.fromkeys("01234", 4), fails="a"), states("aaabb")
    chunk_end(model).decode_together(chunks)
    assert model.decoded == ["34"]
    assert [state.pending is None for state in chunks] == [True, True, True, False, False]
    (record,) = caplog.records
    assert record.getMessage() == "a shared decode of 3 chunks failed; decoding them separately"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "no room for so many"


MIB = 1 << 20


def test_results_beyond_one_message_wait_for_later_steps() -> None:
    """Results that exceed the limit of 20 MiB per message are sent in later steps.

    A result that exceeds the limit by itself is still sent, and small results fill the remaining
    space in a message.
    """
    sizes = {"0": 12 * MIB, "1": 12 * MIB, "2": 8 * MIB, "3": 1}
    outputs = {name: torch.empty(size, dtype=torch.uint8) for name, size in sizes.items()}
    requests = states("aaaa")
    assert chunk_end(None).deliver(requests, outputs) == {
        name: outputs[name] for name in ("0", "2")
    }
    assert [state.deferred is None for state in requests] == [True, False, True, False]
    assert chunk_end(None).deliver([requests[1], requests[3]], {}) == {
        name: outputs[name] for name in ("1", "3")
    }
