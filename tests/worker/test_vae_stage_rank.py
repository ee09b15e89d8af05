# SPDX-License-Identifier: Apache-2.0
"""A rank that denoises and the VAE stage that decodes its chunks, as two runners in one process."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.scheduling import new_request

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
    """A rank with layers and the VAE stage that follows it, each with its own runner."""

    def __init__(self, make_runner: Any, checkpoint: Path) -> None:
        self.layers, self.vae = make_runner(checkpoint), make_runner(checkpoint)
        self.results = ResultStream(torch.device("cpu"), True)
        self.set_parts(results=self.results)

    @property
    def ranks(self) -> tuple[Any, Any]:
        return self.layers, self.vae

    def set_parts(self, **parts: Any) -> None:
        """Recreate the VAE stage with new values for fields in its runner's `parts`."""
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
            return self.transfer([ours], [theirs])

    def transfer(self, ours: list[Any], theirs: list[Any]) -> list[Any]:
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
    assert len(meta["timings_ms"]["steps"]) == STEPS, "times of the other rank"


def test_a_decode_that_fails_after_the_commit_ends_the_session(pair: Pair) -> None:
    """If a decode fails after the commit, forks and later chunks of the session are refused until
    the session is reset.

    This is necessary because the rank with layers has already committed the chunk.
    """
    pair.close(*pair.chunk(0))
    ours, theirs = pair.chunk(1, options={"fail_in": "decode"})
    assert theirs.failure.code == "engine_error" and ours.chunk.session.chunk_index == 2
    pair.close(ours, theirs)
    assert pair.vae.sessions.get("s").failure.code == "session_lost"
    _, refused = pair.admit("later", 2)
    assert refused.failure.code == "session_lost"


def test_ranks_with_different_chunk_indices_refuse(pair: Pair) -> None:
    """If a session's chunk index differs between ranks, the session's next chunk is refused. For
    example, the indices can differ if one rank had no memory for a first chunk.
    """
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
    assert "the chunk's latents" in str(ours.failure)


def test_a_finished_chunk_is_processed_before_its_successor(pair: Pair) -> None:
    """A finished chunk is processed before its successor, whatever their order in the batch.

    This order is required because the other rank counts a session's chunks in order.
    """
    pair.close(*pair.chunk(0))
    (ours, theirs), (our_next, their_next) = pair.admit("r1", 1), pair.admit("r2", 2)
    with torch.inference_mode():
        for _ in range(STEPS):
            pair.layers.role.forward([ours], None)
        pair.layers.role.forward([our_next], None)
        pair.layers.chunk_end.commit(ours.chunk)
        assert pair.transfer([our_next, ours], [their_next, theirs]) == [theirs]
    assert their_next.failure is None and their_next.chunk.step == 1
    assert pair.vae.chunk_end.committed[-1] == "r1", "reported to the scheduler"


def test_a_failed_chunk_fails_its_successor_on_both_ranks(pair: Pair) -> None:
    """A failed chunk fails its successor on both ranks in the same step.

    If the successor failed in a later step, it could finish before the scheduler receives the
    failure.
    """
    pair.close(*pair.chunk(0))
    (ours, theirs), (our_next, their_next) = (
        pair.admit("r1", 1, options={"nan_at": 1}),
        pair.admit("r2", 2),
    )
    with torch.inference_mode():
        for _ in range(STEPS):
            pair.layers.role.forward([ours], None)
        assert pair.transfer([our_next, ours], [their_next, theirs]) == []
    assert ours.failure.code == theirs.failure.code == "non_finite"
    assert our_next.failure.code == their_next.failure.code == "predecessor_failed"


def test_a_chunk_that_waits_on_the_first_rank_does_not_start(pair: Pair) -> None:
    """If a chunk waits on the first rank, it does not start on the VAE stage either, because it
    could get the wrong index there.
    """
    pair.close(*pair.chunk(0))
    ours, theirs = pair.admit("r1", 1)
    waits = pair.vae.requests.add_request(new_request("r2", session_id="s", chunk_index=2))
    with torch.inference_mode():
        pair.layers.role.forward([ours], None)
        message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1)
        pair.stage.micro_step([theirs, waits], message, {})
    assert theirs.chunk.step == 1
    assert waits.chunk is None and waits.failure is None


def test_the_decode_state_is_sent_once_with_the_final_latents(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decode state is sent only once, together with the final latents. Timings are sent with
    the last step.
    """
    reported: list[Any] = []
    requested: list[str] = []
    model, take_over = pair.layers.model, pair.vae.model.unpack_decode_state

    def pack(request: Any) -> dict[str, Any]:
        requested.append(request.request_id)
        return {"scale": 5}

    def unpack_state(request: Any, latents: torch.Tensor, info: Any) -> None:
        reported.append(info)
        take_over(request, latents, info)

    monkeypatch.setattr(model, "pack_decode_state", pack)
    monkeypatch.setattr(pair.vae.model, "unpack_decode_state", unpack_state)
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True})
    for step in range(1, STEPS + 1):
        with torch.inference_mode():
            pair.layers.role.forward([ours], None)
            message = send_to_vae_stage(model, pair.layers.parts.in_flight, [ours], 1).tensors
            note = StageNote.read_tensors(message)
            [chunk] = note.chunks
            assert bool(chunk.timings_ms) == (step == STEPS) and chunk.info == (
                {"scale": 5} if chunk.clean else {}
            )
            pair.stage.advance([theirs], note, note.latents(message))
    assert reported == [{"scale": 5}] and requested == ["r"]


def test_an_operation_that_the_first_rank_refuses_is_refused(pair: Pair) -> None:
    """An operation that the first rank refuses, for example a fork that does not fit into its
    memory, is refused on all ranks.
    """
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
    """Return a request that cannot be parsed. The test sends it only to the VAE stage."""
    request = new_request(name, session_id="s")
    request.pooling_params.extra_kwargs = {"session_id": 7}
    return request


def test_a_chunk_with_a_failed_clean_pass_is_not_delivered(pair: Pair) -> None:
    """If a chunk's clean-context pass fails, the chunk is not delivered, even if its frames are
    already on the host.
    """
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True})
    for _ in range(STEPS - 1):
        pair.step(ours, theirs)
    assert theirs.pending.ready()
    ours.failure = RequestFailed("engine_error", "the clean pass failed")
    message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1)
    with pytest.raises(RequestFailed, match="the clean pass failed"):
        unpack(pair.stage.step([theirs], message)["r"])


def test_the_first_failure_is_kept(pair: Pair) -> None:
    """If both ranks fail, the first failure is reported. The other rank's failure arrives later and
    may be a consequence of the first one.
    """
    ours, theirs = pair.admit("r", 0)
    ours.failure, theirs.failure = RequestFailed("capacity", "there"), RequestFailed("oom", "here")
    message = send_to_vae_stage(pair.layers.model, pair.layers.parts.in_flight, [ours], 1).tensors
    pair.stage.fail([theirs], StageNote.read_tensors(message))
    assert theirs.failure.code == "oom"


@pytest.mark.parametrize("started", [True, False], ids=["a started chunk", "an operation"])
def test_only_a_starting_chunk_fails_with_session_lost(pair: Pair, started: bool) -> None:
    """Only a chunk that is about to start fails with `session_lost`.

    A lost session can still be closed. If the request has already failed on the other rank, that
    failure is reported instead.
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


@pytest.mark.parametrize("reason", ["unreadable", "no room"])
def test_a_chunk_that_never_started_on_the_vae_stage_is_lost(pair: Pair, reason: str) -> None:
    """If a first chunk cannot start on the VAE stage, the client receives the error, and no session
    remains on the VAE stage.

    Other chunks continue.
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
    """Make the VAE stage share its decodes with another rank, which succeeds or fails."""
    agreement = RankAgreement(SimpleNamespace(world_size=2), None)
    agreement.all_fine = lambda fine: fine and others_fine  # type: ignore[method-assign]
    pair.set_parts(shares_decode=True, agreement=agreement)


@pytest.mark.parametrize("others_fine", [True, False])
def test_ranks_of_a_shared_decode_fail_together(pair: Pair, others_fine: bool) -> None:
    """Ranks that share a decode fail together, because they agree on success or failure before the
    clean-context pass.

    The client can request the chunk again.
    """
    share_decode(pair, others_fine)
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True})
    for _ in range(STEPS - 1):
        pair.step(ours, theirs)
    assert (theirs.pending is not None) == others_fine
    assert theirs.failure is None if others_fine else theirs.failure.code == "engine_error"
    assert theirs.chunk.session.chunk_index == 0


def test_an_error_in_a_shared_decode_of_the_vae_stage_is_raised(pair: Pair) -> None:
    """An error in a decode that the VAE stage shares with other ranks is raised, because those
    ranks wait in collectives and the engine must stop.
    """
    share_decode(pair, True)
    ours, theirs = pair.admit("r", 0, options={"clean_pass": True, "fail_in": "decode"})
    for _ in range(STEPS - 2):
        pair.step(ours, theirs)
    with pytest.raises(RuntimeError, match="injected failure"):
        pair.step(ours, theirs)


@pytest.mark.parametrize("ranks", [1, 2])
def test_several_ranks_send_a_failure_only_after_agreeing_on_it(pair: Pair, ranks: int) -> None:
    """If there are several ranks and one of them detects a failure early, the failure is sent only
    after all of them have agreed on it.
    """
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
    """A pending result with a slow decode."""

    def __init__(self, seconds: float) -> None:
        self.ends, self.waited = time.perf_counter() + seconds, False

    def ready(self) -> bool:
        return time.perf_counter() >= self.ends

    def wait(self) -> None:
        self.waited = True


def test_a_step_waits_only_for_results_that_are_nearly_ready(
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


def test_decodes_in_flight_are_limited(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most three decodes are in flight: a fourth decode waits for the first one to finish."""
    made: list[Slow] = []

    def launch(*_: Any) -> list[Slow]:
        made.append(Slow(9))
        return made[-1:]

    monkeypatch.setattr(pair.results, "launch", launch)
    for index in range(4):
        pair.chunk(index)
    assert [slow.waited for slow in made] == [True, False, False, False]


def test_a_rank_that_does_not_decode_commits_chunks(make_runner: Any, null_world: Path) -> None:
    pair = Pair(make_runner, null_world)
    pair.set_parts(decodes=False)
    _, theirs = pair.chunk(0)
    assert theirs.pending is None and theirs.chunk.session.chunk_index == 1
