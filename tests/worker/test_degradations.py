# SPDX-License-Identifier: Apache-2.0
"""Degraded chunks (`omni.degradations`) in the runner, for three model families."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.scheduling import new_request, run_to_end

from vllm_omni.core.step_protocol import SchedulerNote
from vllm_omni.outputs import RequestFailed

BOTH = ["tiny_vae", "fewer_steps"]
FAMILIES = ("lingbot_world", "matrix_game", "causal_wan")
WINDOW = {"window_frames": 12, "sink_frames": 0}


@pytest.fixture
def checkpoints(lingbot_world: Path, matrix_game: Path, causal_wan: Path) -> dict[str, Path]:
    return {"lingbot_world": lingbot_world, "matrix_game": matrix_game, "causal_wan": causal_wan}


def chunk(
    runner: Any, family: str, index: int, degradations: list[str]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    fields: dict[str, Any] = {"output": "both"}
    if index == 0:
        fields |= {"seed": 4} | ({} if family == "matrix_game" else {"prompt": "a beach"})
    tensors = None
    if family != "causal_wan":
        fields["actions"] = [["w"]] * 3
        image = torch.arange(32 * 48 * 3, dtype=torch.uint8).view(32, 48, 3)
        tensors = {"image": image} if index == 0 else None
    data = new_request("r", tensors, session_id="a", chunk_index=index, **fields)
    assert data.pooling_params is not None
    note = SchedulerNote(degradations=degradations)
    data.pooling_params = note.attach_to_params(data.pooling_params)
    result = run_to_end(runner, data)["r"]
    assert not isinstance(result, RequestFailed), result
    meta, made = result
    return meta, {name: tensor.clone() for name, tensor in made.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_degraded_chunk_has_the_values_of_the_preset_realtime(
    make_runner: Any, checkpoints: dict[str, Path], family: str
) -> None:
    """If every chunk of a stream is degraded, the stream is bit-identical to one that uses the
    `realtime` preset.

    The next chunk without degradations runs the full number of denoise steps again. Each result
    lists the chunk's degradations. A degraded chunk still runs its clean-context pass.
    """
    model = {"preset": "realtime", "fp8": False, "context_kv": "clean_pass", **WINDOW}
    fast = make_runner(checkpoints[family], {"model": model})
    ladder = {"scheduling": "deadline", "degradations": BOTH, "model": WINDOW}
    runner = make_runner(checkpoints[family], ladder)
    for index in range(2):
        meta, made = chunk(runner, family, index, BOTH)
        wanted, expected = chunk(fast, family, index, [])
        assert meta["degradations"] == BOTH and "degradations" not in wanted
        steps = [len(each["timings_ms"]["steps"]) for each in (meta, wanted)]
        assert steps == [3, 3]  # two denoise steps and the clean-context pass
        assert torch.equal(made["latents"], expected["latents"])
        assert torch.equal(made["frames"], expected["frames"])
    meta, made = chunk(runner, family, 2, [])
    assert "degradations" not in meta and len(meta["timings_ms"]["steps"]) > 3
    assert not torch.equal(made["frames"], chunk(fast, family, 2, [])[1]["frames"])
