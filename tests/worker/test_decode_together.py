# SPDX-License-Identifier: Apache-2.0
"""Chunks of several sessions share a decode if they finish in the same forward pass.

In a batch-invariant engine, each chunk is decoded by itself.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import new_request, run_to_end

from vllm_omni.outputs import RequestFailed
from vllm_omni.worker.diffusion import warm_up

NAMES = ("a", "b", "c")
TOLERANCE = 1e-4
"""Absolute tolerance for fp32 features and latents. The values are not bit-identical because the
summation order depends on the batch size.
"""


def chunk(family: str, name: str, index: int) -> Any:
    """Return the request for chunk `index` of session `name`. The request for the first chunk
    includes the inputs that the model family requires.
    """
    first: dict[str, Any] = {"prompt": f"field {name}", "seed": ord(name)} if index == 0 else {}
    if index == 0 and family == "causal_wan":
        return new_request(f"{name}{index}", None, session_id=name, chunk_index=0, **first)
    image = {"image": torch.full((32, 48, 3), ord(name), dtype=torch.uint8)} if index == 0 else None
    actions = None if family == "causal_wan" else [["w"]] * 3
    return new_request(
        f"{name}{index}", image, session_id=name, chunk_index=index, actions=actions, **first
    )


def shared_decodes(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each later shared decode appends its number of chunks."""
    found: list[int] = []
    shared = runner.model.post_decode_together

    def noted(batch: Any) -> Any:
        found.append(len(batch))
        return shared(batch)

    monkeypatch.setattr(runner.model, "post_decode_together", noted)
    return found


def play(
    runner: Any, family: str, together: bool, chunks: int = 3
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generate `chunks` chunks of every session. Return each request's result and each session's
    tensors.
    """
    results: dict[str, Any] = {}
    for index in range(chunks):
        requests = [chunk(family, name, index) for name in NAMES]
        for group in [requests] if together else [[each] for each in requests]:
            results |= run_to_end(runner, *group)
    return results, {name: runner.sessions.get(name).tensors() for name in NAMES}


@pytest.fixture(scope="module")
def shared_runner(make_runner: Any, lingbot_world: Path) -> Any:
    return make_runner(lingbot_world, {"batch_invariant": False, "max_sessions": 4})


@pytest.fixture
def runner(shared_runner: Any) -> Iterator[Any]:
    """The shared runner, with no open sessions."""
    yield shared_runner
    shared_runner.sessions.close_all()
    assert not shared_runner.requests


@pytest.mark.parametrize("family", ["lingbot_world", "causal_wan"])
def test_later_chunks_of_several_sessions_share_a_decode(
    family: str, make_runner: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames, metadata and session states match those obtained when chunks are decoded one at a
    time.

    A first chunk never shares a decode.
    """
    runner = make_runner(
        request.getfixturevalue(family), {"batch_invariant": False, "max_sessions": 4}
    )
    found = shared_decodes(runner, monkeypatch)
    results, states = play(runner, family, together=True)
    assert found == [3, 3]
    alone = make_runner(
        request.getfixturevalue(family), {"batch_invariant": False, "max_sessions": 4}
    )
    expected, expected_states = play(alone, family, together=False)
    for name, (meta, tensors) in expected.items():
        assert results[name][0].keys() == meta.keys()
        assert results[name][0]["num_frames"] == meta["num_frames"] == len(tensors["frames"])
        assert (results[name][1]["frames"].int() - tensors["frames"].int()).abs().max() <= 1
    for name in NAMES:
        assert states[name].keys() == expected_states[name].keys()
        for key, tensor in states[name].items():
            assert torch.allclose(
                tensor.float(), expected_states[name][key].float(), atol=TOLERANCE, rtol=TOLERANCE
            )
            assert (
                tensor.untyped_storage().nbytes()
                == expected_states[name][key].untyped_storage().nbytes()
            )


def test_bit_exact_sessions_share_no_decode(
    make_runner: Any, lingbot_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch-invariant engine decodes every chunk by itself."""
    runner = make_runner(lingbot_world, {"max_sessions": 4})
    found = shared_decodes(runner, monkeypatch)
    results, _ = play(runner, "lingbot_world", together=True, chunks=2)
    expected, _ = play(
        make_runner(lingbot_world, {"max_sessions": 4}), "lingbot_world", together=False, chunks=2
    )
    assert not found
    assert all(
        torch.equal(results[name][1]["frames"], expected[name][1]["frames"]) for name in expected
    )


def test_chunks_of_a_failed_shared_decode_are_decoded_alone(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a shared decode fails, each of its chunks is decoded by itself. If that decode also
    fails, the chunk's session keeps its previous state.
    """
    play(runner, "lingbot_world", together=True, chunks=1)
    alone = runner.model.post_decode

    def no_room(batch: Any) -> Any:
        raise RuntimeError("no room for so many")

    def not_b(request: Any) -> Any:
        if request.session.session_id == "b":
            raise RuntimeError("not this one")
        return alone(request)

    monkeypatch.setattr(runner.model, "post_decode_together", no_room)
    monkeypatch.setattr(runner.model, "post_decode", not_b)
    results = run_to_end(runner, *(chunk("lingbot_world", name, 1) for name in NAMES))
    assert isinstance(results["b1"], RequestFailed) and results["b1"].code == "engine_error"
    assert results["a1"][0]["chunk_index"] == results["c1"][0]["chunk_index"] == 1
    assert [runner.sessions.get(name).chunk_index for name in NAMES] == [2, 1, 2]


def test_latents_that_are_not_finite_fail_only_their_session(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If latents are not finite, only their own chunk fails. The other chunks in the same decode
    succeed.
    """
    play(runner, "lingbot_world", together=True, chunks=1)
    advance = runner.model.step_scheduler

    def with_a_nan(batch: Any, prediction: torch.Tensor) -> None:
        advance(batch, prediction)
        for request in batch:
            if request.session.session_id == "b" and request.step == request.num_steps - 2:
                request.work.latents = torch.full_like(request.work.latents, math.nan)

    found = shared_decodes(runner, monkeypatch)
    monkeypatch.setattr(runner.model, "step_scheduler", with_a_nan)
    results = run_to_end(runner, *(chunk("lingbot_world", name, 1) for name in NAMES))
    assert found == [3]
    assert isinstance(results["b1"], RequestFailed) and results["b1"].code == "non_finite"
    assert all(len(results[name][1]["frames"].unique()) > 1 for name in ("a1", "c1"))
    assert [runner.sessions.get(name).chunk_index for name in NAMES] == [2, 1, 2]


def test_a_warm_up_measures_the_largest_shared_decode(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up decodes `max_sessions` chunks together, so the memory that such a decode needs is
    not counted as available for sessions.
    """
    found = shared_decodes(runner, monkeypatch)
    warm_up._run_session(runner)
    assert found == [4] and len(runner.sessions) == 0


def test_a_warm_up_of_bit_exact_sessions_decodes_each_alone(
    make_runner: Any, lingbot_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warm-up of a batch-invariant engine decodes each chunk by itself."""
    runner = make_runner(lingbot_world, {"max_sessions": 4})
    found = shared_decodes(runner, monkeypatch)
    warm_up._run_session(runner)
    assert not found
