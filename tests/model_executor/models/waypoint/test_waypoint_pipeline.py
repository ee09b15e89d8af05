# SPDX-License-Identifier: Apache-2.0
"""Tests of a Waypoint session driven as the runner drives it: frames, start images, graphs, and
isolation between sessions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import assert_same, run_request, run_staggered, session_bits, step
from helpers.host_capture import hold
from helpers.unused_params import IMAGE_AND_VIDEO_PARAMS
from waypoint_driver import (
    HEIGHT,
    WIDTH,
    latents_of,
    load_world,
    make_request,
    open_session,
    run_chunk,
    start_image,
)

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs
from vllm_omni.model_executor.models.waypoint.checkpoint import LAYOUTS
from vllm_omni.model_executor.models.waypoint.pipeline import Waypoint
from vllm_omni.model_executor.models.waypoint.state import WaypointSession
from vllm_omni.outputs import RequestFailed

CHUNKS: list[dict[str, Any]] = [
    {"tensors": {"image": start_image()}, "actions": [["w"]]},
    *({"actions": [{"buttons": ("a",), "axes": {"dx": 2.0 * n}, "scroll": 1.0}]} for n in range(5)),
    *({} for _ in range(6)),
]
"""Chunk requests that together ask for more frames than either kind of ring buffer holds."""


def chunks() -> list[dict[str, Any]]:
    from vllm_omni.actions import ActionFrame

    return [
        {
            **chunk,
            "actions": [
                ActionFrame(**a) if isinstance(a, dict) else a for a in chunk.get("actions", [])
            ],
        }
        for chunk in CHUNKS
    ]


@pytest.fixture(scope="module")
def world(checkpoints: dict[str, Path]) -> Waypoint:
    return load_world(checkpoints["v1_5"])


@pytest.fixture(scope="module", params=LAYOUTS)
def either(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Waypoint:
    return load_world(checkpoints[request.param])


def test_a_start_image_is_a_separate_latent_frame(either: Waypoint) -> None:
    session, each = open_session(either), either.config.temporal_compression
    for index, image in enumerate((True, False, False)):
        request = make_request(session, {"image": start_image()} if image else None)
        meta, result = run_request(either, request)
        assert (request.num_steps, request.clean_passes) == (5 + image, 1)
        assert (meta["first_frame"], meta["num_frames"]) == (each * index, each)
        assert (
            result["frames"].shape == (each, HEIGHT, WIDTH, 3)
            and result["frames"].dtype == torch.uint8
        )
    assert (session.chunk_index, session.window.committed_frames) == (3, 4)


def test_inputs_change_the_frames(either: Waypoint) -> None:
    """The seed, the actions and the image each change the generated frames. The test compares
    latents, because v1 takes a third of a second to decode a frame.
    """

    def first(image: int = 0, **params: Any) -> torch.Tensor:
        session, given = open_session(either, output="latents"), {"actions": [["w"]], **params}
        return run_chunk(either, session, {"image": start_image(image)}, output="latents", **given)

    base = first()
    changed = [first(seed=5), first(actions=None), first(image=1)]
    assert [torch.equal(frames, base) for frames in changed] == [False] * 3
    assert torch.equal(first(), base)


def test_a_prompt_takes_effect_at_the_next_frame(checkpoints: dict[str, Path]) -> None:
    world = load_world(checkpoints["v1"])
    session, other = (open_session(world, name, output="latents") for name in ("a", "b"))

    def chunk(of: WaypointSession, **params: Any) -> torch.Tensor:
        return run_chunk(world, of, output="latents", **params)

    assert torch.equal(chunk(session), chunk(other, prompt="An explorable world"))
    assert not torch.equal(chunk(session, prompt="a beach"), chunk(other))


def test_a_session_with_graphs_equals_one_without(checkpoints: dict[str, Path]) -> None:
    """A session with graphs produces the same results as a session without graphs, and a single
    graph is sufficient for all passes of all frames. Because v1 is slow, its test runs only enough
    frames to fill the larger ring buffers.
    """
    for layout, frames in (("v1_5", chunks()), ("v1", chunks()[:9])):
        plain, by_graphs = load_world(checkpoints[layout]), load_world(checkpoints[layout])
        by_graphs.transformer.graphs = ForwardGraphs(capture=hold)
        assert torch.equal(latents_of([by_graphs], frames), latents_of([plain], frames))
        assert len(by_graphs.transformer.graphs) == 1


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_after_the_warm_up_every_pass_uses_a_graph(
    checkpoints: dict[str, Path], kv_dtype: torch.dtype | None
) -> None:
    """After the warm-up, each of a session's passes, including the first, captures or replays a
    graph. With FP8, the first frame sets the scales and has a separate graph.

    The warm-up runs every kind of pass that a session with a start image has.
    """
    for layout in LAYOUTS:
        plain, world = (
            load_world(checkpoints[layout], kv_dtype=kv_dtype),
            load_world(checkpoints[layout], None, kv_dtype),
        )
        graphs = world.transformer.graphs = ForwardGraphs(capture=hold)
        session = open_session(world, "warm-up", output="latents")
        for _, tensors in world.warmup_inputs():
            run_chunk(world, session, dict(tensors), output="latents")
        request = make_request(open_session(world), {"image": start_image()})
        world.prepare_encode(request)
        before, captured = len(graphs), []
        while request.step < request.num_steps:
            step(world, [request])
            captured.append(len(graphs) - before)
        assert captured == ([1] * 6 if kv_dtype is None else [1, 2, 2, 2, 2, 2])
        assert torch.equal(latents_of([world], chunks()[:2]), latents_of([plain], chunks()[:2]))


def test_sessions_at_different_steps_in_one_batch_equal_solo_runs(either: Waypoint) -> None:
    pairs, mixed = run_staggered(
        either,
        lambda name: open_session(either, name, output="latents"),
        lambda session, seed: make_request(session, seed=seed, output="latents"),
        chunks=4,
    )
    assert mixed > 3
    assert all(torch.equal(ours, alone) for ours, alone in pairs)


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("before", [0, 4, 9])
def test_an_aborted_chunk_leaves_no_trace(world: Waypoint, before: int, steps: int) -> None:
    session = open_session(world)
    for _ in range(before):
        run_chunk(world, session, actions=[["w"]])
    twin, retained = session.fork("twin"), session_bits(session)
    abandoned = make_request(session, {} if before else {"image": start_image()}, seed=9)
    world.prepare_encode(abandoned)
    for _ in range(steps):
        step(world, [abandoned])
    assert_same(session, retained)
    assert torch.equal(run_chunk(world, session), run_chunk(world, twin))


def test_a_fork_is_independent(either: Waypoint) -> None:
    session = open_session(either)
    for _ in range(3):
        run_chunk(either, session, actions=[["w"]])
    fork, before = session.fork("b"), session_bits(session)
    other = run_chunk(either, fork, actions=[["a"]])
    assert_same(session, before)
    assert not torch.equal(run_chunk(either, session, actions=[["w"]]), other)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=["plain K/V", "FP8 K/V"])
def test_a_session_holds_the_bytes_that_admission_counted(
    checkpoints: dict[str, Path], kv_dtype: torch.dtype | None
) -> None:
    world = load_world(checkpoints["v1_5"], kv_dtype=kv_dtype)
    session = open_session(world)
    counted = world.session_nbytes(DiffusionParams(session_id="a"))
    run_chunk(world, session, {"image": start_image()})
    held = session.window.nbytes + session.decoder_cache.nbytes
    assert session.nbytes == counted == held


@pytest.mark.parametrize(
    ("layout", "partitions"), [("v1_5", [(2, 2), (1, 3), (3, 1)]), ("v1", [(1, 3)])]
)
def test_two_pipeline_stages_equal_one(
    checkpoints: dict[str, Path], layout: str, partitions: list[tuple[int, int]]
) -> None:
    """Two pipeline stages produce the same results as one rank, bit for bit. In v1.5, the first
    stage sends the first layer's attention values to the second stage along with the residual
    stream.
    """
    alone = latents_of([load_world(checkpoints[layout])], chunks())
    for partition in partitions:
        positions = [ParallelContext(stage=n, num_stages=2, partition=partition) for n in range(2)]
        assert torch.equal(
            latents_of([load_world(checkpoints[layout], p) for p in positions], chunks()), alone
        )


@pytest.mark.parametrize(
    ("tensors", "params", "code", "reason"),
    [
        ({"image": start_image()}, {}, "invalid_image", "has one start image"),
        ({"poses": torch.eye(4)}, {}, "invalid_request", "takes image, buttons, axes, scroll"),
        ({}, {"options": {"camera_scale": 1.0}}, "invalid_request", "takes no options"),
        ({}, {"height": 64}, "invalid_request", "height is fixed at 40"),
        ({}, {"actions": [["w"], ["w"]]}, "invalid_action", "at most 1 entries"),
        ({}, {"actions": [["jump"]]}, "invalid_action", "this model takes buttons"),
        ({}, {"prompt": "a beach"}, "invalid_request", "takes no prompt"),
    ],
)
def test_bad_requests_are_refused_and_change_nothing(
    world: Waypoint, tensors: dict[str, Any], params: dict[str, Any], code: str, reason: str
) -> None:
    session = open_session(world)
    run_chunk(world, session)
    before = session_bits(session)
    with pytest.raises(RequestFailed, match=reason) as refused:
        world.prepare_encode(make_request(session, tensors, **params))
    assert refused.value.code == code
    assert_same(session, before)


@pytest.mark.parametrize("field", IMAGE_AND_VIDEO_PARAMS)
def test_a_parameter_without_effect_is_refused(world: Waypoint, field: str) -> None:
    """A request parameter that the model does not use is refused with an error that names the
    parameter.
    """
    session = open_session(world)
    with pytest.raises(RequestFailed, match=f"does not use {field}") as refused:
        world.prepare_encode(make_request(session, **{field: IMAGE_AND_VIDEO_PARAMS[field]}))
    assert refused.value.code == "invalid_request"
