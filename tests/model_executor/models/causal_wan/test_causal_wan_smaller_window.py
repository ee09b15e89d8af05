# SPDX-License-Identifier: Apache-2.0
"""A chunk that goes with a smaller window (`omni.degradations`): what it is, what it leaves behind, who can do it."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import finish, load_model, make_request, open_session, step

from vllm_omni.model_executor.interfaces import check_degradations
from vllm_omni.model_executor.models.causal_wan.pipeline import CausalWan
from vllm_omni.model_executor.models.causal_wan.state import StreamSession

CHUNKS = 6


def run(model: CausalWan, narrow: Collection[int]) -> tuple[list[torch.Tensor], StreamSession]:
    """Latents of a stream's chunks, those of `narrow` with a smaller window."""
    session = open_session(model, output="latents")
    latents = []
    for index in range(CHUNKS):
        request = make_request(session, None, prompt="a beach", output="latents")
        request.degradations = ("smaller_window",) if index in narrow else ()
        model.prepare_encode(request)
        while request.step < request.num_steps:
            step(model, [request])
        latents.append(finish(model, request)[1]["latents"])
    return latents, session


def test_without_sinks_it_is_a_model_of_half_the_window(causal_wan: Path) -> None:
    """Every chunk with a smaller window gives what a stream of that window gives, up to the order of sums (1e-5)."""
    found, _ = run(load_model(causal_wan, window_frames=12, sink_frames=0), range(CHUNKS))
    expected, _ = run(load_model(causal_wan, window_frames=6, sink_frames=0), ())
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sink_frames", [0, 3])
def test_only_the_chunk_itself_sees_less(causal_wan: Path, sink_frames: int) -> None:
    """Chunks before it are untouched, it differs, and the next one finds every frame where it always is."""
    model = load_model(causal_wan, window_frames=9, sink_frames=sink_frames)
    full, whole = run(model, ())
    found, session = run(model, (CHUNKS - 1,))
    assert all(torch.equal(a, b) for a, b in zip(found[:-1], full[:-1], strict=True))
    assert not torch.allclose(found[-1], full[-1], atol=1e-4)
    kept, expected = session.tensors(), whole.tensors()
    assert kept.keys() == expected.keys()
    newest = {f"kv.frame{frame}" for frame in model.plan.frames(CHUNKS - 1)}
    different = {name for name in kept if not torch.equal(kept[name], expected[name])}
    assert different == newest


def test_a_first_chunk_has_nothing_to_leave_out(causal_wan: Path) -> None:
    model = load_model(causal_wan, window_frames=9, sink_frames=3)
    assert torch.equal(run(model, (0,))[0][0], run(model, ())[0][0])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache": "noise_matched"}, "strict"),
        ({"window_frames": -1}, "global"),
        ({"window_frames": 6, "sink_frames": 3}, "one chunk"),
    ],
)
def test_where_it_is_not_possible_it_is_refused_with_the_reason(
    causal_wan: Path, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"CausalWan cannot do 'smaller_window'.*{reason}"):
        check_degradations(load_model(causal_wan, **options), ["smaller_window"])
