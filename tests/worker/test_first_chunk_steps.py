# SPDX-License-Identifier: Apache-2.0
"""Sessions whose first chunk has fewer denoise steps (`first_chunk_steps`), in the runner."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import new_request, run_to_end

from vllm_omni.config import Degradation
from vllm_omni.core.step_protocol import SchedulerNote
from vllm_omni.outputs import RequestFailed

FAMILIES = ("lingbot_world", "dreamx_world", "abot_world", "matrix_game", "causal_wan")
WITHOUT_PROMPT, WITHOUT_ACTIONS = ("matrix_game",), ("causal_wan",)
SIZE = {"height": 64, "width": 96}


def made_chunk(
    runner: Any, family: str, session: str, index: int, degradations: Sequence[Degradation] = ()
) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a chunk's metadata and latents."""
    fields: dict[str, Any] = {"output": "latents"}
    tensors = None
    if family not in WITHOUT_ACTIONS:
        fields["actions"] = [["w"]] * 3
    if index == 0:
        fields |= {"seed": 4} | ({} if family in WITHOUT_PROMPT else {"prompt": "a beach"})
        if family not in WITHOUT_ACTIONS:
            image = torch.arange(64 * 96 * 3).view(64, 96, 3).to(torch.uint8)
            tensors = {"image": image}
    data = new_request("r", tensors, session_id=session, chunk_index=index, **fields)
    if degradations:
        assert data.pooling_params is not None
        note = SchedulerNote(degradations=list(degradations))
        data.pooling_params = note.attach_to_params(data.pooling_params)
    result = run_to_end(runner, data)["r"]
    assert not isinstance(result, RequestFailed), result
    meta, made = result
    return meta, made["latents"].clone()


def chunk(runner: Any, family: str, session: str, index: int) -> tuple[int, torch.Tensor]:
    """Return the number of forward passes and the latents of a chunk."""
    meta, latents = made_chunk(runner, family, session, index)
    return len(meta["timings_ms"]["steps"]), latents


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_first_chunk_of_each_session_has_fewer_steps(
    make_runner: Any, request: pytest.FixtureRequest, family: str
) -> None:
    """The first chunk is bit-identical to that of a server with only one denoise step. The next
    chunk of the session has all steps, and a second session starts with one step again.
    """
    checkpoint: Path = request.getfixturevalue(family)
    one = make_runner(checkpoint, SIZE | {"model": {"max_steps": 1}})
    runner = make_runner(checkpoint, SIZE | {"model": {"first_chunk_steps": 1}})
    forwards, latents = chunk(runner, family, "a", 0)
    expected_forwards, expected = chunk(one, family, "a", 0)
    assert forwards == expected_forwards == 2  # the denoise step and the clean-context pass
    assert torch.equal(latents, expected)
    later, latents = chunk(runner, family, "a", 1)
    assert later > 2 and not torch.equal(latents, chunk(one, family, "a", 1)[1])
    assert chunk(runner, family, "b", 0)[0] == 2


def test_a_short_first_chunk_keeps_its_clean_context_pass(
    make_runner: Any, lingbot_world: Path
) -> None:
    """With `context_kv` "last_step", the first chunk runs one denoise step and the clean-context
    pass, and a later chunk runs its two steps alone.
    """
    model = {"preset": "realtime", "fp8": False, "decoder": "wan", "first_chunk_steps": 1}
    runner = make_runner(lingbot_world, SIZE | {"model": model})
    assert [chunk(runner, "lingbot_world", "a", index)[0] for index in (0, 1)] == [2, 2]
    full = make_runner(lingbot_world, SIZE | {"model": {**model, "first_chunk_steps": 2}})
    assert [chunk(full, "lingbot_world", "a", index)[0] for index in (0, 1)] == [3, 2]


@pytest.mark.parametrize(("first_chunk_steps", "applied"), [(1, False), (2, False), (3, True)])
def test_a_late_first_chunk_has_the_smaller_number_of_steps(
    make_runner: Any, lingbot_world: Path, first_chunk_steps: int, applied: bool
) -> None:
    """A first chunk with the `fewer_steps` degradation has at most the two steps of the `realtime`
    preset, at the preset's noise levels. Its result names the degradation only if the chunk would
    have had more steps without it.
    """
    model = {"first_chunk_steps": first_chunk_steps}
    ladder = SIZE | {"scheduling": "deadline", "degradations": ["fewer_steps"], "model": model}
    late = make_runner(lingbot_world, ladder)
    meta, latents = made_chunk(late, "lingbot_world", "a", 0, ["fewer_steps"])
    assert meta.get("degradations") == (["fewer_steps"] if applied else None)
    few = make_runner(lingbot_world, SIZE | {"model": {"max_steps": min(first_chunk_steps, 2)}})
    assert torch.equal(latents, made_chunk(few, "lingbot_world", "a", 0)[1])
