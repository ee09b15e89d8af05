# SPDX-License-Identifier: Apache-2.0
"""Two pipeline stages in one process. Each stage is a runner with some of the null world's
layers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import execute, new_request, run_to_end, step
from vllm.sequence import IntermediateTensors

from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.worker.diffusion.link import HIDDEN
from vllm_omni.worker.diffusion.roles.layers import LayersStage
from vllm_omni.worker.diffusion.roles.with_layers import EveryStep, LastStage
from vllm_omni.worker.diffusion.shared_text import SharedText

STEPS = 5


class Channel:
    """Both ends of a mock return channel.

    As in `ReturnChannel`, results are flattened and transferred batch by batch, in order.
    """

    def __init__(self) -> None:
        self.expected: list[list[Any]] = []
        self.posted: deque[list[Any]] = deque()
        self.responses: deque[tuple[list[str], list[bool], list[torch.Tensor]]] = deque()

    def send(
        self, requests: Sequence[Any], ok: Sequence[bool], latents: Sequence[torch.Tensor]
    ) -> None:
        assert len(requests) == len(ok) == len(latents)
        copies = [one.float().flatten().clone() for one in latents]
        self.responses.append(([request.request_id for request in requests], list(ok), copies))

    def expect(self, requests: Sequence[Any]) -> None:
        self.expected.append(list(requests))

    def listen(self, model: Any) -> None:
        for batch in self.expected:
            assert all(model.latents(request).numel() for request in batch)
        self.posted.extend(self.expected)
        self.expected.clear()

    def drain(
        self, request_ids: Iterable[str], apply: Callable[[Any, bool, torch.Tensor], None]
    ) -> None:
        assert not self.expected, "no receive was posted"
        wanted = set(request_ids)
        while any(request.request_id in wanted for batch in self.posted for request in batch):
            batch, (names, ok, latents) = self.posted.popleft(), self.responses.popleft()
            assert [request.request_id for request in batch] == names
            for request, fine, one in zip(batch, ok, latents, strict=True):
                apply(request, fine, one)


class Stages:
    def __init__(self, make_runner: Any, model: Path, **omni: Any) -> None:
        self.first, self.last = make_runner(model, omni), make_runner(model, omni)
        layers = list(self.first.model.layers)
        self.first.model.layers, self.last.model.layers = layers[:1], layers[1:]
        self.first.role = LayersStage(
            self.first.parts, EveryStep(self.first.model, ends_steps=False)
        )
        self.last.role = LastStage(self.last.parts, EveryStep(self.last.model, ends_steps=True))
        self.first.role.channel = self.last.role.channel = Channel()
        self.hidden: list[torch.Tensor | None] = []
        forward = self.last.model.denoise_step

        def noted(batch: Any, hidden: torch.Tensor | None) -> torch.Tensor:
            self.hidden.append(hidden)
            return forward(batch, hidden)

        self.last.model.denoise_step = noted

    def execute(self, **requests: Any) -> dict[str, Any]:
        """Run one engine step and return the last stage's results."""
        with torch.inference_mode():
            message = self.first.execute_model(step(**requests))
            self.first.role.listen()
            if not isinstance(message, IntermediateTensors):
                self.last.execute_model(step(**requests))
                return {}
            output = self.last.execute_model(step(**requests), message)
        results: dict[str, Any] = {}
        for name, envelope in zip(output.req_ids, output.pooler_output, strict=True):
            if envelope is not None:
                try:
                    results[name] = unpack(envelope)
                except RequestFailed as failure:
                    results[name] = failure
        return results

    def run(self, *new: Any, steps: int = STEPS) -> dict[str, Any]:
        """Run requests until they have results, and report them as finished."""
        names = [data.req_id for data in new]
        results = self.execute(new=new)
        for _ in range(steps - 1):
            results |= self.execute(running=[name for name in names if name not in results])
        self.execute(finished=names)
        return results

    def sessions(self, name: str) -> tuple[Any, Any]:
        """Return the scalars and tensors of a session on each stage."""
        retained = [runner.sessions.get(name) for runner in (self.first, self.last)]
        first, last = (
            (one.scalars(), {key: x.tolist() for key, x in one.tensors().items()})
            for one in retained
        )
        return first, last


def chunk(name: str, session: str, index: int, **fields: Any) -> Any:
    first = {"prompt": f"field {session}", "seed": ord(session)} if index == 0 else {}
    return new_request(
        name, session_id=session, chunk_index=index, output="latents", **{**first, **fields}
    )


@pytest.fixture
def stages(make_runner: Any, null_world: Path) -> Stages:
    return Stages(make_runner, null_world)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_two_stages_equal_one_rank(
    make_runner: Any, null_world: Path, batch_invariant: bool
) -> None:
    """The latents of two sessions' chunks are bit-identical on two stages and on one rank, even if
    one session starts a step later.

    Both stages have the same session state.
    """
    stages, alone = (
        Stages(make_runner, null_world, batch_invariant=batch_invariant),
        make_runner(null_world),
    )
    results = stages.execute(new=[chunk("a0", "a", 0)])
    results |= stages.execute(running=["a0"], new=[chunk("b0", "b", 0)])
    for _ in range(STEPS - 2):
        results |= stages.execute(running=["a0", "b0"])
    results |= stages.execute(running=["b0"], finished=["a0"])
    stages.execute(finished=["b0"])
    results |= stages.run(chunk("b1", "b", 1), chunk("a1", "a", 1))
    for name in ("a0", "b0", "b1", "a1"):
        expected = run_to_end(alone, chunk(name, name[0], int(name[1])))[name]
        assert torch.equal(results[name][1]["latents"], expected[1]["latents"]), name
    for session in "ab":
        first, last = stages.sessions(session)
        assert first == last
        assert first[0]["chunk_index"] == 2
    assert len(stages.hidden) == (4 * STEPS if batch_invariant else 2 * STEPS + 1)


def test_text_embeddings_are_sent_at_the_first_step_only(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text embeddings are sent only at the first step of a chunk: the first stage computes them,
    and the last stage receives them.
    """
    completed: list[tuple[list[str], bool]] = []
    sent: list[list[str]] = []

    def complete(texts: SharedText, first_part: Any, received: Any) -> None:
        completed.append(([request.request_id for request in first_part], HIDDEN in received))

    def message(texts: SharedText, start_text: Any) -> dict[str, torch.Tensor]:
        sent.append([request.request_id for request in start_text])
        return {}

    monkeypatch.setattr(SharedText, "complete", complete)
    monkeypatch.setattr(SharedText, "message", message)
    stages.execute(new=[chunk("a", "a", 0)])
    stages.execute(running=["a"], new=[chunk("b", "b", 0)])
    stages.execute(running=["a", "b"])
    assert sent == [["a"], ["b"], []]
    assert completed == [(names, received) for names in sent for received in (False, True)]


def test_a_request_that_the_first_stage_refuses_is_refused_by_the_last(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first stage refuses a request, the last stage refuses it too, and neither stage has a
    session for it afterwards.

    The other request continues.
    """
    prepare = stages.first.model.prepare_encode

    def refuse(request: Any) -> Any:
        if request.session.session_id == "b":
            raise RequestFailed("unsupported", "not here")
        return prepare(request)

    monkeypatch.setattr(stages.first.model, "prepare_encode", refuse)
    results = stages.run(chunk("b", "b", 0), chunk("a", "a", 0))
    assert isinstance(results["b"], RequestFailed)
    assert results["b"].message == "another rank could not accept this request"
    assert results["a"][0]["chunk_index"] == 0
    for runner in (stages.first, stages.last):
        assert "b" not in runner.sessions
        assert runner.sessions.get("a").chunk_index == 1


def test_a_request_that_waits_on_the_first_stage_waits_on_all(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits on the first stage waits on all stages, and no stage prepares it in the
    meantime.
    """
    with monkeypatch.context() as patched:
        patched.setattr(
            stages.first.role.in_flight,
            "waiting",
            lambda states: [s for s in states if s.request_id == "b"],
        )
        stages.execute(new=[chunk("b", "b", 0), chunk("a", "a", 0)])
        stages.execute(running=["b", "a"])
    for runner in (stages.first, stages.last):
        assert runner.requests["b"].chunk is None
        assert runner.requests["b"].failure is None
        assert runner.requests["a"].chunk.step == 2
        assert runner.request_progress().keys() == {"a"}
    results: dict[str, Any] = {}
    for _ in range(STEPS):
        results |= stages.execute(running=[name for name in "ba" if name not in results])
    assert results["a"][0]["chunk_index"] == results["b"][0]["chunk_index"] == 0


def test_the_first_stage_determines_the_chunk_index(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage determines a chunk's index.

    Otherwise the stages could disagree, because a request may omit the index and the last stage may
    commit earlier.
    """
    requested: list[int | None] = []
    admit = stages.last.admission.admit

    def noted(state: Any, outputs: Any, index: int | None = None) -> None:
        requested.append(index)
        admit(state, outputs, index)

    monkeypatch.setattr(stages.last.admission, "admit", noted)
    stages.run(chunk("a0", "a", 0))
    stages.run(new_request("a1", session_id="a", output="latents"))
    assert requested == [0, 1]


def test_a_chunk_that_is_not_finite_is_committed_by_no_stage(stages: Stages) -> None:
    """If a chunk's latents are not finite, the last stage detects this and reports it to the first
    stage, and no stage commits the chunk.

    The client can request the same chunk again.
    """
    stages.run(chunk("a0", "a", 0))
    before = stages.sessions("a")
    results = stages.run(chunk("a1", "a", 1, options={"nan_at": 2}))
    assert results["a1"].code == "non_finite"
    assert stages.sessions("a") == before
    assert stages.run(chunk("again", "a", 1))["again"][0]["chunk_index"] == 1


def test_a_session_operation_runs_on_every_stage(stages: Stages) -> None:
    """A session operation runs on every stage, even while a chunk of another session is running."""
    stages.run(chunk("a0", "a", 0))
    results = stages.run(new_request("close", session_id="a", op="close"), chunk("b0", "b", 0))
    assert results["close"][0]["existed"]
    assert results["b0"][0]["chunk_index"] == 0
    assert [
        ("a" in runner.sessions, "b" in runner.sessions) for runner in (stages.first, stages.last)
    ] == [(False, True)] * 2


def test_an_exception_in_a_forward_of_several_ranks_is_raised(
    make_runner: Any, null_world: Path
) -> None:
    """An exception in a forward pass that several ranks share is raised, because the other ranks
    wait in collectives and the engine must stop.
    """
    runner = make_runner(null_world)
    object.__setattr__(runner.parts, "num_ranks", 2)
    with pytest.raises(RuntimeError, match="injected failure"):
        execute(
            runner, step(new=[chunk("a", "a", 0, options={"fail_in": "denoise", "fail_at": 0})])
        )
