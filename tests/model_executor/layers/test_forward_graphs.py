# SPDX-License-Identifier: Apache-2.0
"""Forward passes replayed from CUDA graphs equal eager forward passes.

On a CPU, a simulated "graph" reruns the forward pass with the host-side decisions made during
capture.
"""

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from helpers.host_capture import hold

from vllm_omni.model_executor.layers.cuda_graphs import (
    CudaCapture,
    ForwardGraphs,
    Inputs,
    Replay,
    between_graphs,
    identity,
    persistent_buffer,
    persistent_copy,
)


class Adder:
    """Computes `x + offset`, where the host chooses the offset, and records every host-side
    call.
    """

    def __init__(self) -> None:
        self.calls: list[float] = []

    def at(self, offset: float) -> Callable[[Inputs], torch.Tensor]:
        def forward(inputs: Inputs) -> torch.Tensor:
            self.calls.append(offset)
            return inputs["x"] + offset

        return forward


def test_the_second_forward_of_a_key_is_captured() -> None:
    graphs = ForwardGraphs(capture=hold)
    results = [graphs("key", {"x": torch.tensor([float(n)])}, Adder().at(10)) for n in range(5)]
    assert [float(result) for result in results] == [10, 11, 12, 13, 14] and len(graphs) == 1


def test_a_known_kind_is_captured_at_the_first_forward_of_a_new_key() -> None:
    """A forward pass of a known kind is captured at its first call with a new key, because it
    differs only in its tensors and has nothing left to compile. A forward pass that has a new kind,
    a new shape or no kind runs eagerly first.
    """
    graphs = ForwardGraphs(capture=hold)

    def call(key: str, kind: str | None, size: int = 1) -> int:
        graphs((kind, key), {"x": torch.zeros(size)}, Adder().at(1), kind=kind)
        return len(graphs)

    assert [call("a", "plain"), call("b", "plain"), call("b", "plain"), call("a", "plain")] == [
        0,
        1,
        1,
        2,
    ]
    assert [call("c", "other"), call("c", "plain", size=2), call("d", None), call("e", None)] == [
        2
    ] * 4
    graphs.clear_graphs()
    assert call("f", "plain") == 0


def test_a_partial_forward_does_not_count_as_a_run_of_its_kind() -> None:
    """A forward pass that stops early can be captured once a complete pass of its kind has run. If
    only partial passes have run, a complete pass still runs eagerly first.
    """
    graphs = ForwardGraphs(capture=hold)

    def call(key: str, whole: bool) -> int:
        graphs(key, {"x": torch.zeros(1)}, Adder().at(1), kind="kind", whole=whole)
        return len(graphs)

    assert [call("a", False), call("b", True), call("c", False), call("d", True)] == [0, 0, 1, 2]


def test_each_shape_has_its_graph_and_no_key_means_no_graph() -> None:
    graphs, adder = ForwardGraphs(capture=hold), Adder()
    for _ in range(3):
        for size in (1, 2):
            assert graphs("key", {"x": torch.zeros(size)}, adder.at(1)).shape == (size,)
        assert float(graphs(None, {"x": torch.zeros(1)}, adder.at(float(len(adder.calls))))) > 0
    assert len(graphs) == 2


def test_graphs_in_use_are_not_evicted() -> None:
    """When the number of alternating keys exceeds the maximum number of graphs, the first keys keep
    their graphs, and no graph is captured more than once.
    """
    captures = 0

    def count(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        nonlocal captures
        captures += 1
        return hold(run)

    graphs = ForwardGraphs(capacity=2, capture=count)
    for _ in range(50):
        for key in "abcde":
            graphs(key, {"x": torch.zeros(1)}, Adder().at(1))
    assert (len(graphs), captures) == (2, 2)


def test_an_unused_graph_is_evicted() -> None:
    graphs, adder = ForwardGraphs(capacity=2, capture=hold), Adder()
    for key in ("a", "a", "b", "b", *"a" * 20, "c", "c"):
        graphs(key, {"x": torch.zeros(1)}, adder.at(ord(key)))
    assert len(graphs) == 2
    assert float(graphs("a", {"x": torch.zeros(1)}, adder.at(0))) == ord("a")
    assert float(graphs("c", {"x": torch.zeros(1)}, adder.at(0))) == ord("c")
    assert float(graphs("b", {"x": torch.zeros(1)}, adder.at(0))) == 0, "b made room for c"


def test_graphs_of_freed_tensors_are_evicted_at_once() -> None:
    graphs = ForwardGraphs(capacity=2, capture=hold)
    lasting, gone = torch.zeros(1), torch.zeros(1)
    for position in (gone, gone, lasting, lasting):
        graphs("key", {"x": torch.zeros(1)}, Adder().at(1), buffers=[position])
    other = torch.zeros(1)
    for position in (other, other):
        assert float(graphs("key", {"x": torch.zeros(1)}, Adder().at(2), buffers=[position])) == 2
    assert float(graphs("key", {"x": torch.zeros(1)}, Adder().at(0), buffers=[other])) == 0, (
        "there is no room"
    )
    del gone, position
    for _ in range(2):
        graphs("key", {"x": torch.zeros(1)}, Adder().at(2), buffers=[other])
    assert len(graphs) == 2
    assert [
        float(graphs("key", {"x": torch.zeros(1)}, Adder().at(0), buffers=[each]))
        for each in (lasting, other)
    ] == [
        1,
        2,
    ]


def test_a_steady_input_is_copied_when_its_tensor_changes() -> None:
    """When two sessions alternate, each forward pass reads its own session's prompt embeddings."""
    graphs = ForwardGraphs(capture=hold)
    prompts = [torch.full((1,), float(n)) for n in range(2)]
    for n in (0, 0, 1, 1, 0, 1, 0, 0):
        inputs = {"x": torch.zeros(1), "prompt": prompts[n]}
        assert (
            float(graphs("key", inputs, lambda own: own["x"] + own["prompt"], steady=["prompt"]))
            == n
        )
    assert len(graphs) == 1


def test_a_forward_that_cannot_be_captured_runs_eagerly() -> None:
    def refuse(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs, adder = ForwardGraphs(capture=refuse), Adder()
    results = [graphs("key", {"x": torch.zeros(1)}, adder.at(offset)) for offset in (1, 2, 3)]
    assert [float(result) for result in results] == [1, 2, 3] and len(graphs) == 0


def test_an_error_of_a_forward_reaches_the_caller() -> None:
    def broken(inputs: Inputs) -> torch.Tensor:
        raise ValueError("broken")

    for calls in (1, 2):
        graphs = ForwardGraphs(capture=hold)
        for _ in range(calls):
            with pytest.raises(ValueError, match="broken"):
                graphs("key", {"x": torch.zeros(1)}, broken)


def test_identities_of_freed_tensors_are_not_reused() -> None:
    """A new session may reuse a closed session's memory, but it never replays that session's
    graph.
    """
    seen = set()
    for _ in range(50):
        # The next iteration frees this tensor and very likely allocates the same address again.
        tensor = torch.empty(1 << 20)
        number = identity(tensor)
        assert number == identity(tensor) and number not in seen
        seen.add(number)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_graphs_equal_plain_launches() -> None:
    """Forward passes replayed from CUDA graphs produce the same results and in-place writes as
    eager forward passes. All graphs share one memory pool.
    """
    weight, ring = torch.randn(64, 64, device="cuda"), torch.zeros(4, 8, 64, device="cuda")
    expected = ring.clone()

    def forward(target: torch.Tensor, slot: int, x: torch.Tensor) -> torch.Tensor:
        target[slot].copy_(x @ weight)
        return torch.relu(target.sum(0))

    graphs = ForwardGraphs()
    for n in range(12):
        x, slot = torch.randn(8, 64, device="cuda"), n % 4
        want = forward(expected, slot, x)
        got = graphs(slot, {"x": x}, lambda own, slot=slot: forward(ring, slot, own["x"]))  # type: ignore[misc]
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(graphs) == 4
    torch.testing.assert_close(ring, expected, rtol=0, atol=0)


def exchanged_twice(x: torch.Tensor) -> torch.Tensor:
    """Run two computations. Each is followed by an operation that cannot be part of a graph,
    because it adds a counter stored on the host.
    """
    for factor in (2.0, 3.0):
        sent = persistent_copy("sent", (x * factor).t())
        received = persistent_buffer("received", sent.shape, sent)
        between_graphs(lambda sent=sent, received=received: received.copy_(sent + next(COUNTER)))  # type: ignore[misc]
        x = received.t() + 1
    return x


COUNTER = itertools.count(1)


def test_a_capture_is_split_at_operations_between_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host operations split a capture into several graphs, which are replayed in order with these
    operations between them. The operations read tensors at fixed addresses and do not run during
    the capture.
    """
    log: list[str] = []

    class Graph:
        def __init__(self) -> None:
            self.name = f"graph {sum(word == 'begin' for word in log)}"

        def capture_begin(self, **how: object) -> None:
            log.append("begin")

        def capture_end(self) -> None:
            log.append("end")

        def replay(self) -> None:
            log.append(self.name)

    class Stream:
        def __init__(self, priority: int = -1) -> None:
            self.priority = priority
            log.append(f"stream of priority {priority}")

        def wait_stream(self, other: object) -> None: ...

    fakes = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": Stream,
        "graph_pool_handle": object,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    seen: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        for value in (1.0, 2.0):
            seen.append(persistent_copy("sent", torch.full((2, 3), value).t()))
            between_graphs(lambda value=value: log.append(f"exchange {value:g}"))  # type: ignore[misc]
        return persistent_buffer("received", (2,), seen[0])

    capture = CudaCapture()
    _, replay = capture(forward)
    current, own, *parts = log
    assert own == current == "stream of priority -1", (
        "kernels keep the priority of the stream on which they were captured"
    )
    assert parts == ["begin", "end"] * 3 and seen[0] is seen[1] and seen[0].is_contiguous()
    log.clear()
    replay()
    assert log == ["graph 0", "exchange 1", "graph 1", "exchange 2", "graph 2"]
    capture(forward)
    assert seen[2] is seen[0], "captures share the buffers that are read between graphs"
    assert persistent_buffer("sent", (3, 2), seen[0]) is not seen[0], (
        "outside a capture no buffer is cached"
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_operations_between_graphs_run_at_each_replay() -> None:
    """Operations between graphs run in order, once per forward pass, on the current pass's values.
    The first forward pass runs eagerly and the second is captured.
    """
    graphs = ForwardGraphs()
    for _ in range(5):
        first, x = next(COUNTER) + 1, torch.randn(2, 3, device="cuda")
        want = (x * 2 + first + 1) * 3 + first + 1 + 1
        got = graphs("key", {"x": x}, lambda own: exchanged_twice(own["x"]))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert next(COUNTER) == first + 2
    assert len(graphs) == 1
    graphs.clear_graphs()
    for _ in range(3):
        graphs(
            "key", {"x": torch.randn(2, 3, device="cuda")}, lambda own: exchanged_twice(own["x"])
        )
    assert len(graphs) == 1, "captured again, in another pool"
