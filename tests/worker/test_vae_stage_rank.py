# SPDX-License-Identifier: Apache-2.0
"""Both sides of a VAE stage in one process: steps on one runner, messages, decodes on another."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.scheduling import new_request

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.interfaces import check_vae_stage
from vllm_omni.model_executor.results import PendingResult
from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.worker.diffusion.agreement import RankAgreement
from vllm_omni.worker.diffusion.decode import ResultStream
from vllm_omni.worker.diffusion.link import StageNote
from vllm_omni.worker.diffusion.roles import vae
from vllm_omni.worker.diffusion.roles.before_vae import send_to_vae_stage
from vllm_omni.worker.diffusion.roles.vae import VAEStage

STEPS = 5


class Pair:
    """A rank with layers, and the VAE stage that follows it."""

    def __init__(self, make_runner: Any, checkpoint: Path) -> None:
        self.layers, self.vae = make_runner(checkpoint), make_runner(checkpoint)
        self.results = ResultStream(torch.device("cpu"), True)
        self.become(results=self.results)

    @property
    def ranks(self) -> tuple[Any, Any]:
        return self.layers, self.vae

    def become(self, **parts: Any) -> None:
        """Another VAE stage's rank: `parts` of the runner's are different."""
        self.vae.parts = replace(self.vae.parts, **parts)
        self.vae.role = self.stage = VAEStage(self.vae.parts)

    def admit(self, name: str, index: int, **fields: Any) -> tuple[Any, Any]:
        prompt = {"prompt": "a field", "seed": 3} if index == 0 else {}
        request = new_request(name, session_id="s", chunk_index=index, **prompt, **fields)
        states = tuple(runner.requests.add_request(request) for runner in self.ranks)
        for runner, state in zip(self.ranks, states, strict=True):
            runner.admission.admit(state, {})
        return states

    def step(self, ours: Any, theirs: Any) -> list[Any]:
        with torch.inference_mode():
            self.layers.role.forward([ours], None)
            if ours.done:
                ours.finite.require("latents")
                self.layers.chunk_end.commit(ours.chunk)
            return self.hand_over([ours], [theirs])

    def hand_over(self, ours: list[Any], theirs: list[Any]) -> list[Any]:
        message = send_to_vae_stage(self.layers.model, self.layers.parts.in_flight, ours, 1).tensors
        note = StageNote.read_tensors(message)
        self.stage.fail(theirs, note)
        return self.stage.advance(theirs, note, note.latents(message))

    def close(self, *states: Any) -> None:
        for runner, state in zip(self.ranks, states, strict=True):
            runner.admission.release(runner.requests.pop(state.request_id))

    def chunk(self, index: int, **fields: Any) -> tuple[Any, Any]:
        ours, theirs = self.admit(f"r{index}", index, **fields)
        for _ in range(STEPS):
            self.step(ours, theirs)
        return ours, theirs


@pytest.fixture
def pair(make_runner: Any, null_world: Path) -> Pair:
    return Pair(make_runner, null_world)


def test_a_decode_starts_with_the_clean_pass_and_is_committed_after_it(pair: Pair) -> None:
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True})
    for step in range(1, STEPS):
        assert pair.step(ours, theirs) == []
        assert (theirs.chunk.step, theirs.chunk.num_steps) == (step, STEPS)
        assert (theirs.pending is not None) == (step == STEPS - 1)
    assert theirs.chunk.session.chunk_index == 0
    assert pair.step(ours, theirs) == [theirs]
    assert ours.chunk.session.chunk_index == theirs.chunk.session.chunk_index == 1
    meta, tensors = unpack(theirs.pending.envelope())
    assert tensors["frames"].shape == (9, 32, 48, 3)
    assert len(meta["timings_ms"]["steps"]) == STEPS, "what the other rank has measured"


def test_a_decode_that_fails_before_the_clean_pass_leaves_the_session(pair: Pair) -> None:
    ours, theirs = pair.chunk(0)
    pair.close(ours, theirs)
    ours, theirs = pair.admit("bad", 1, options={"clean_pass": True, "fail_in": "decode"})
    for _ in range(STEPS - 1):
        pair.step(ours, theirs)
    assert theirs.failure.code == "engine_error"
    pair.close(ours, theirs)
    assert theirs.chunk.session.failure is None
    assert ours.chunk.session.chunk_index == theirs.chunk.session.chunk_index == 1


def test_a_decode_that_fails_too_late_ends_the_session(pair: Pair) -> None:
    """The rank with layers has committed: forks and later chunks are refused, until a reset."""
    pair.close(*pair.chunk(0))
    ours, theirs = pair.chunk(1, options={"fail_in": "decode"})
    assert theirs.failure.code == "engine_error" and ours.chunk.session.chunk_index == 2
    pair.close(ours, theirs)
    assert pair.vae.sessions.get("s").failure.code == "session_lost"
    _, refused = pair.admit("later", 2)
    assert refused.failure.code == "session_lost"


def test_a_chunk_of_a_lost_session_is_notified_so_whatever_the_other_rank_says(pair: Pair) -> None:
    """That rank knows nothing of the loss; elsewhere its reason is passed on."""
    pair.close(*pair.chunk(0))
    pair.close(*pair.chunk(1, options={"fail_in": "decode"}))
    for session, code in (("s", "session_lost"), ("t", "capacity")):
        request = new_request(f"{session}-later", session_id=session)
        ours, theirs = (runner.requests.add_request(request) for runner in pair.ranks)
        ours.failure = RequestFailed("capacity", "no room")
        message = send_to_vae_stage(
            pair.layers.model, pair.layers.parts.in_flight, [ours], 1
        ).tensors
        pair.stage.fail([theirs], StageNote.read_tensors(message))
        assert theirs.failure.code == code


def test_ranks_that_disagree_on_the_chunk_refuse(pair: Pair) -> None:
    """As after a first chunk that this rank had no room for."""
    pair.close(*pair.chunk(0))
    pair.vae.sessions.get("s").chunk_index = 0
    ours = pair.layers.requests.add_request(new_request("r", session_id="s"))
    pair.layers.admission.admit(ours, {})
    theirs = pair.vae.requests.add_request(new_request("r", session_id="s"))
    pair.vae.admission.admit(theirs, {})
    pair.step(ours, theirs)
    assert theirs.failure.code == "session_lost"


def test_a_failure_of_the_other_rank_arrives_with_its_reason(pair: Pair) -> None:
    ours, theirs = pair.admit("r", 0, options={"nan_at": 3, "clean_pass": True})
    for _ in range(STEPS - 1):
        pair.step(ours, theirs)
    assert theirs.failure.code == "non_finite" and theirs.pending is None


def test_a_chunk_that_is_done_comes_before_the_one_behind_it(pair: Pair) -> None:
    """Whatever their order in the batch: the other rank counts the session's chunks by it."""
    pair.close(*pair.chunk(0))
    (ours, theirs), (our_next, their_next) = pair.admit("r1", 1), pair.admit("r2", 2)
    with torch.inference_mode():
        for _ in range(STEPS):
            pair.layers.role.forward([ours], None)
        pair.layers.role.forward([our_next], None)
        pair.layers.chunk_end.commit(ours.chunk)
        assert pair.hand_over([our_next, ours], [their_next, theirs]) == [theirs]
    assert their_next.failure is None and their_next.chunk.step == 1
    assert pair.vae.chunk_end.committed[-1] == "r1", "what the scheduler is told"


def test_a_chunk_that_fails_takes_the_one_behind_it_along(pair: Pair) -> None:
    """At once, on both ranks: it could be done before the scheduler hears of the failure."""
    pair.close(*pair.chunk(0))
    (ours, theirs), (our_next, their_next) = (
        pair.admit("r1", 1, options={"nan_at": 1}),
        pair.admit("r2", 2),
    )
    with torch.inference_mode():
        for _ in range(STEPS):
            pair.layers.role.forward([ours], None)
        assert pair.hand_over([our_next, ours], [their_next, theirs]) == []
    assert ours.failure.code == theirs.failure.code == "non_finite"
    assert our_next.failure.code == their_next.failure.code == "predecessor_failed"


def test_a_chunk_behind_one_that_is_lost_is_lost_too(pair: Pair) -> None:
    pair.close(*pair.chunk(0))
    (ours, theirs), (_, after) = (
        pair.admit("r1", 1, options={"fail_in": "decode"}),
        pair.admit("r2", 2),
    )
    for _ in range(STEPS):
        pair.step(ours, theirs)
    assert theirs.failure.code == "engine_error" and "cannot continue" in theirs.failure.message
    assert after.failure.code == "session_lost"


def test_a_chunk_that_is_held_back_there_does_not_start_here(pair: Pair) -> None:
    """It would be another chunk of its session when it begins."""
    pair.close(*pair.chunk(0))
    ours, theirs = pair.admit("r1", 1)
    waits = pair.vae.requests.add_request(new_request("r2", session_id="s", chunk_index=2))
    with torch.inference_mode():
        pair.layers.role.forward([ours], None)
        message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1)
        pair.stage.micro_step([theirs, waits], message, {})
    assert theirs.chunk.step == 1
    assert waits.chunk is None and waits.failure is None


def test_a_whole_chunk_by_messages_alone(pair: Pair) -> None:
    """From step to step: it begins when the other rank says so, and its result goes out when it
    is there.
    """
    request = new_request("r", session_id="s", chunk_index=0, prompt="a field", seed=3)
    ours, theirs = (runner.requests.add_request(request) for runner in pair.ranks)
    pair.layers.admission.admit(ours, {})
    with torch.inference_mode():
        for _ in range(STEPS):
            pair.layers.role.forward([ours], None)
            if ours.done:
                pair.layers.chunk_end.commit(ours.chunk)
            message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1)
            response = pair.stage.step([theirs], message)
            assert theirs.chunk is not None and theirs.chunk.step == ours.chunk.step
        nothing = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [], 1)
        response = response or pair.stage.step([theirs], nothing)
    assert unpack(response["r"])[1]["frames"].shape == (9, 32, 48, 3)


def test_what_the_model_says_of_a_chunk_arrives_with_its_latents(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, when they are final; times are told with the last step."""
    reported: list[Any] = []
    requested: list[str] = []
    model, take_over = pair.layers.model, pair.vae.model.unpack_decode_state

    def say(request: Any) -> dict[str, Any]:
        requested.append(request.request_id)
        return {"fact": 5}

    def hear(request: Any, latents: torch.Tensor, info: Any) -> None:
        reported.append(info)
        take_over(request, latents, info)

    monkeypatch.setattr(model, "pack_decode_state", say)
    monkeypatch.setattr(pair.vae.model, "unpack_decode_state", hear)
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True})
    for step in range(1, STEPS + 1):
        with torch.inference_mode():
            pair.layers.role.forward([ours], None)
            message = send_to_vae_stage(model, pair.layers.parts.in_flight, [ours], 1).tensors
            note = StageNote.read_tensors(message)
            [chunk] = note.chunks
            assert bool(chunk.timings_ms) == (step == STEPS) and chunk.info == (
                {"fact": 5} if chunk.clean else {}
            )
            pair.stage.advance([theirs], note, note.latents(message))
    assert reported == [{"fact": 5}] and requested == ["r"]


def test_a_failure_that_is_known_early_says_what_was_wrong(pair: Pair) -> None:
    ours, _ = pair.admit("r", 0, options={"nan_at": 3, "clean_pass": True})
    with torch.inference_mode():
        for _ in range(STEPS - 1):
            pair.layers.role.forward([ours], None)
        send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1)
    assert "the chunk's latents" in str(ours.failure)


def test_what_the_other_rank_refuses_is_not_done_here(pair: Pair) -> None:
    """A fork, for instance, for which only this rank has room."""
    pair.close(*pair.chunk(0))
    fork = new_request("fork", session_id="s", op="fork", fork_to="copy")
    ours, theirs = (runner.requests.add_request(fork) for runner in pair.ranks)
    ours.failure = RequestFailed("capacity", "no room")
    message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1)
    outputs: dict[str, torch.Tensor] = {}
    pair.stage.micro_step([theirs], message, outputs)
    with pytest.raises(RequestFailed, match="no room"):
        unpack(outputs["fork"])
    assert "copy" not in pair.vae.sessions


def unreadable(name: str) -> Any:
    """What only the VAE stage's rank cannot read."""
    request = new_request(name, session_id="s")
    request.pooling_params.extra_kwargs = {"session_id": 7}
    return request


def test_a_chunk_that_fails_in_its_clean_pass_is_not_delivered(pair: Pair) -> None:
    """Its frames are on the host by then: they are of a chunk that is no part of the session."""
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True})
    for _ in range(STEPS - 1):
        pair.step(ours, theirs)
    assert theirs.pending.ready()
    ours.failure = RequestFailed("engine_error", "the clean pass failed")
    message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1)
    with pytest.raises(RequestFailed, match="the clean pass failed"):
        unpack(pair.stage.step([theirs], message)["r"])


def test_a_chunk_that_has_failed_here_takes_no_further_step(pair: Pair) -> None:
    """Its clean pass runs where the layers are; here it never gets done, so nobody waits for its
    result.
    """
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True, "fail_in": "decode"})
    for _ in range(STEPS):
        pair.step(ours, theirs)
    assert ours.done and not theirs.done and theirs.chunk.step == STEPS - 1


def test_a_reason_that_is_known_here_is_retained(pair: Pair) -> None:
    """The other rank's comes later, and may only be what follows from the first."""
    ours, theirs = pair.admit("r", 0)
    ours.failure, theirs.failure = RequestFailed("capacity", "there"), RequestFailed("oom", "here")
    message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1).tensors
    pair.stage.fail([theirs], StageNote.read_tensors(message))
    assert theirs.failure.code == "oom"


@pytest.mark.parametrize("started", [True, False], ids=["a chunk that has begun", "an operation"])
def test_only_a_chunk_that_starts_is_notified_of_its_lost_session(
    pair: Pair, started: bool
) -> None:
    """Closing such a session is what its client was asked to do: a refusal elsewhere has a
    reason of its own.
    """
    pair.close(*pair.chunk(0))
    if started:
        ours, theirs = pair.admit("r", 1)
    else:
        ours, theirs = (
            runner.requests.add_request(new_request("r", session_id="s", op="close"))
            for runner in pair.ranks
        )
    pair.vae.sessions.get("s").failure = RequestFailed("session_lost", "a chunk is missing")
    ours.failure = RequestFailed("engine_error", "a reason of its own")
    message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1).tensors
    pair.stage.fail([theirs], StageNote.read_tensors(message))
    assert theirs.failure.message == "a reason of its own"


def test_an_operation_is_done_and_served_here_too(pair: Pair) -> None:
    pair.close(*pair.chunk(0))
    fork = new_request("fork", session_id="s", op="fork", fork_to="copy")
    ours, theirs = (runner.requests.add_request(fork) for runner in pair.ranks)
    outputs: dict[str, torch.Tensor] = {}
    pair.layers.admission.admit(ours, outputs)
    message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [], 1)
    responses: dict[str, torch.Tensor] = {}
    pair.stage.micro_step([theirs], message, responses)
    assert (
        unpack(responses["fork"])[0] == unpack(outputs["fork"])[0] and "copy" in pair.vae.sessions
    )


@pytest.mark.parametrize("reason", ["unreadable", "no room"])
def test_a_chunk_that_is_made_elsewhere_but_never_started_here_is_lost(
    pair: Pair, reason: str
) -> None:
    """Its client reads so; there is no session here to remember it, and the others' chunks go
    on.
    """
    ours = pair.layers.requests.add_request(
        new_request("r", session_id="s", prompt="a field", seed=3)
    )
    pair.layers.admission.admit(ours, {})
    if reason == "no room":
        pair.vae.sessions.max_sessions = 0
    theirs = pair.vae.requests.add_request(
        new_request("r", session_id="s") if reason == "no room" else unreadable("r")
    )
    if theirs.failure is None:
        pair.vae.admission.admit(theirs, {})
    code = theirs.failure.code
    for _ in range(STEPS):
        assert pair.step(ours, theirs) == []
    assert ours.chunk.session.chunk_index == 1 and "s" not in pair.vae.sessions
    assert theirs.failure.code == code and "cannot continue" in theirs.failure.message


def share_decode(pair: Pair, others_fine: bool) -> None:
    """The VAE stage's rank decodes together with another one, which is fine or not."""
    agreement = RankAgreement(SimpleNamespace(world_size=2), None)
    agreement.all_fine = lambda fine: fine and others_fine  # type: ignore[method-assign]
    pair.become(shares_decode=True, agreement=agreement)


@pytest.mark.parametrize("others_fine", [True, False])
def test_ranks_that_decode_together_decode_or_fail_together(pair: Pair, others_fine: bool) -> None:
    """Before the clean pass, so that the chunk can be sent again."""
    share_decode(pair, others_fine)
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True})
    for _ in range(STEPS - 1):
        pair.step(ours, theirs)
    assert (theirs.pending is not None) == others_fine
    assert theirs.failure is None if others_fine else theirs.failure.code == "engine_error"
    assert theirs.chunk.session.chunk_index == 0


def test_an_error_inside_a_shared_decode_is_not_retained(pair: Pair) -> None:
    """Other ranks are waiting inside its collectives: the engine must end."""
    share_decode(pair, True)
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True, "fail_in": "decode"})
    for _ in range(STEPS - 2):
        pair.step(ours, theirs)
    with pytest.raises(RuntimeError, match="injected failure"):
        pair.step(ours, theirs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_hand_over_the_same(pair: Pair, ranks: int) -> None:
    """What one of them knows of its device before the others do waits until they agree."""
    ours, _ = pair.admit("r", 0, options={"nan_at": 3, "clean_pass": True})
    with torch.inference_mode():
        for _ in range(STEPS - 1):
            pair.layers.role.forward([ours], None)
        note = StageNote.read_tensors(
            send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], ranks).tensors
        )
    assert [chunk.clean for chunk in note.chunks] == ([True] if ranks > 1 else [])
    assert (note.failure("r") is None) == (ranks > 1)


class Slow(PendingResult):
    """A result whose decode takes a while."""

    def __init__(self, seconds: float) -> None:
        self.ends, self.waited = time.perf_counter() + seconds, False

    def ready(self) -> bool:
        return time.perf_counter() >= self.ends

    def wait(self) -> None:
        self.waited = True


def test_only_results_that_are_ready_hold_up_a_step(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vae, "_WAIT_S", 1.0)
    _, theirs = pair.chunk(0)
    for seconds, alone, found, at_least in (
        (9, False, 0, 0.0),
        (9, True, 0, 1.0),
        (0.05, True, 1, 0.04),
    ):
        theirs.pending = Slow(seconds)
        start = time.perf_counter()
        assert len(pair.stage.ready([theirs], alone=alone)) == found
        assert at_least <= time.perf_counter() - start < at_least + 0.8


def test_decodes_in_flight_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth waits for the first: a stage slower than the others holds them up."""
    made: list[Slow] = []

    def launch(*_: Any) -> list[Slow]:
        made.append(Slow(9))
        return made[-1:]

    monkeypatch.setattr(pair.results, "launch", launch)
    for index in range(4):
        pair.chunk(index)
    assert [slow.waited for slow in made] == [True, False, False, False]


def test_a_rank_alongside_the_one_that_decodes_only_follows(
    make_runner: Any, null_world: Path
) -> None:
    pair = Pair(make_runner, null_world)
    pair.become(decodes=False)
    _, theirs = pair.chunk(0)
    assert theirs.pending is None and theirs.chunk.session.chunk_index == 1


def test_a_model_whose_decoder_cannot_move_is_refused() -> None:
    with pytest.raises(ValueError, match="the decoder of object cannot be a stage"):
        check_vae_stage(object(), OmniConfig(vae_stage=True))
