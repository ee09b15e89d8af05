# SPDX-License-Identifier: Apache-2.0
"""Matrix-Game 2.0 and Waypoint (tiny) in the real engine: controls, prompts, refusals, two ranks
and FP8.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, SharedEngine, running_engine, shared_engine

from vllm_omni.actions import ActionFrame
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed

TOLERANCE = 1e-4
"""Absolute tolerance for fp32 latents of order 1, required because several ranks sum in a different
order than one rank.
"""


@dataclass(frozen=True)
class Played:
    """A world model with interactive controls, and the control inputs that the tests send to it."""

    family: str
    """Name of the model family."""
    layout: str
    """Layout of the model's checkpoint."""
    held: list[Any]
    """Controls for each chunk of a session."""
    w_held: torch.Tensor
    """The `buttons` tensor of a chunk during which W is held."""
    refusals: tuple[tuple[dict[str, Any], str], ...]
    """Request fields that the model rejects, each with an excerpt of the error message."""


def w_held(num_frames: int, num_buttons: int, button: int) -> torch.Tensor:
    buttons = torch.zeros(num_frames, num_buttons)
    buttons[:, button] = 1
    return buttons


MATRIX_GAME = Played(
    "matrix_game",
    "original",
    [[["w", "l"]] * 3, [["a"], [], ["i"]], None],
    w_held(12, 8, 0),
    (
        ({"prompt": "a beach"}, "takes no prompt; it takes an image and buttons w, s, a, d"),
        ({"actions": [["jump"]]}, "takes buttons w, s, a, d, i, k, j, l; axes pitch, yaw"),
        ({"actions": [["w"]] * 4}, "at most 3 entries"),
    ),
)
WAYPOINT = Played(
    "waypoint",
    "v1_5",
    [
        [["w"]],
        [ActionFrame(buttons=("a", "space"), axes={"dx": 3.0, "dy": -1.0}, scroll=1.0)],
        None,
    ]
    * 4,
    w_held(1, 256, ord("W")),
    (
        ({"prompt": "a beach"}, "takes no prompt"),
        ({"actions": [["jump"]]}, "this model takes buttons"),
        ({"actions": [["w"]] * 2}, "at most 1 entries"),
    ),
)


def image() -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(36), torch.arange(64), indexing="ij")
    return torch.stack((y * 6, x * 3, x + y), dim=-1).to(torch.uint8)


async def play(client: EngineClient, name: str, held: list[Any], **fields: Any) -> torch.Tensor:
    """Return the latents of a session that runs one chunk for each entry of `held`."""
    latents = []
    for index, actions in enumerate(held):
        start = {"image": image()} if index == 0 else None
        _, tensors = await client.send(
            start, session_id=name, actions=actions, output="latents", **fields
        )
        latents.append(tensors["latents"].clone())
    return torch.cat(latents, dim=1)


def played(checkpoint: Path, held: list[Any], **engine_args: Any) -> torch.Tensor:
    async def scenario() -> torch.Tensor:
        async with running_engine(checkpoint, **{"dtype": "float32", **engine_args}) as client:
            return await play(client, "s", held)

    return asyncio.run(scenario())


@pytest.fixture(scope="module", params=[MATRIX_GAME, WAYPOINT], ids=lambda model: model.family)
def model(request: pytest.FixtureRequest) -> Played:
    chosen: Played = request.param
    return chosen


@pytest.fixture(scope="module")
def checkpoint(model: Played, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(model.family)
    get_family(model.family).make_tiny(out, 0, model.layout)
    return out


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path) -> Iterator[SharedEngine]:
    with shared_engine(checkpoint, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(one_rank: SharedEngine, model: Played) -> torch.Tensor:
    return one_rank.run(play(one_rank.client, "alone", model.held))


def test_a_world_is_played_through_the_engine(
    one_rank: SharedEngine, model: Played, alone: torch.Tensor
) -> None:
    """Concurrent sessions return the same latents as sessions that run by themselves.

    Controls change the latents, forks and resets are exact, and refused requests affect no session.
    """
    client, held = one_rank.client, model.held

    async def scenario() -> None:
        ours, theirs, idle = await asyncio.gather(
            play(client, "a", held), play(client, "b", held), play(client, "c", [None] * len(held))
        )
        assert torch.equal(ours, alone) and torch.equal(theirs, alone)
        assert (idle - alone).abs().max() > 0.01
        for fields, reason in model.refusals:
            with pytest.raises(RequestFailed, match=reason):
                await client.send(session_id="a", output="latents", **fields)
        with pytest.raises(RequestFailed, match="takes no prompt"):
            await client.send({"image": image()}, session_id="new", prompt="a beach")
        await client.send(session_id="a", op="fork", fork_to="d")
        _, dense = await client.send({"buttons": model.w_held}, session_id="a", output="latents")
        walking = [["w"]] * (3 if model is MATRIX_GAME else 1)
        _, entries = await client.send(session_id="d", actions=walking, output="latents")
        assert torch.equal(dense["latents"], entries["latents"])
        await client.send(session_id="b", op="reset")
        assert torch.equal(await play(client, "b", held), alone)
        if model is WAYPOINT:  # Waypoint requires no start image
            meta, frames = await client.send(session_id="f")
            assert meta["num_frames"] == 4 and frames["frames"].shape[0] == 4

    one_rank.run(scenario())


@pytest.mark.parametrize("parallel", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_two_ranks_agree_with_one(
    checkpoint: Path, model: Played, alone: torch.Tensor, parallel: str
) -> None:
    """Two ranks return the same latents as one rank to within the tolerance. With pipeline stages,
    the latents are bit-identical, because every sum is computed in the same order.
    """
    difference = (played(checkpoint, model.held, **{parallel: 2}) - alone).abs().max()
    assert difference <= (0.0 if parallel == "pipeline_parallel_size" else TOLERANCE)


@pytest.mark.parametrize("model", [WAYPOINT], ids=["waypoint"], indirect=True)
def test_fp8_weights_and_kv_are_close_to_bf16(checkpoint: Path, model: Played) -> None:
    exact = played(checkpoint, model.held, dtype="bfloat16")
    fp8 = played(
        checkpoint,
        model.held,
        dtype="bfloat16",
        quantization="fp8_per_channel",
        kv_cache_dtype="fp8",
    )
    assert 0 < (fp8[:, 0] - exact[:, 0]).norm() < 0.3 * exact[:, 0].norm()


@pytest.mark.nightly
def test_waypoint_1_follows_keys_and_prompts(tmp_path: Path) -> None:
    """Keys and a new prompt change Waypoint's next frame, and a repeated session yields the same
    frames.

    A Waypoint chunk is one frame.
    """
    get_family("waypoint").make_tiny(tmp_path, 0, "v1")

    async def scenario() -> None:
        async with running_engine(tmp_path, dtype="float32") as client:
            ours = await play(client, "a", WAYPOINT.held[:3], prompt="a beach")
            again, idle = await asyncio.gather(
                play(client, "b", WAYPOINT.held[:3], prompt="a beach"),
                play(client, "c", [None] * 3, prompt="a beach"),
            )
            assert torch.equal(again, ours) and not torch.equal(idle, ours)
            await client.send(session_id="a", op="fork", fork_to="d")
            _, retained = await client.send(session_id="a", output="latents")
            _, switched = await client.send(
                session_id="d", prompt="a forest at night", output="latents"
            )
            assert not torch.equal(retained["latents"], switched["latents"])
            meta, frames = await client.send(session_id="f")
            assert meta["num_frames"] == 1 and frames["frames"].shape[0] == 1

    asyncio.run(scenario())
