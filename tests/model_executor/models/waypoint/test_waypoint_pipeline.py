# SPDX-License-Identifier: Apache-2.0
"""A Waypoint session driven as the runner drives it: frames, start images, graphs; nothing leaks
between sessions.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.host_capture import hold
from helpers.unused_params import IMAGE_AND_VIDEO_PARAMS
from waypoint_driver import (
    HEIGHT,
    WIDTH,
    finish,
    latents_of,
    load_world,
    make_request,
    open_session,
    run_chunk,
    start_image,
    step,
)

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.interfaces import SupportsStepExecution
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs
from vllm_omni.model_executor.models.waypoint.checkpoint import LAYOUTS
from vllm_omni.model_executor.models.waypoint.pipeline import Waypoint
from vllm_omni.model_executor.models.waypoint.state import WaypointSession
from vllm_omni.outputs import RequestFailed
from vllm_omni.testing.tiny.waypoint import make_tiny

CHUNKS: list[dict[str, Any]] = [
    {"tensors": {"image": start_image()}, "actions": [["w"]]},
    *({"actions": [{"buttons": ("a",), "axes": {"dx": 2.0 * n}, "scroll": 1.0}]} for n in range(5)),
    *({} for _ in range(6)),
]
"""Past both kinds of rings."""


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
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {layout: tmp_path_factory.mktemp(layout) for layout in LAYOUTS}
    for layout, folder in found.items():
        make_tiny(folder, 0, layout)
    return found


@pytest.fixture(scope="module")
def world(checkpoints: dict[str, Path]) -> Waypoint:
    return load_world(checkpoints["v1_5"])


@pytest.fixture(scope="module", params=LAYOUTS)
def either(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Waypoint:
    return load_world(checkpoints[request.param])


def bits(session: WaypointSession) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return {name: tensor.clone() for name, tensor in session.tensors().items()}, session.scalars()


def assert_same(
    session: WaypointSession, before: tuple[dict[str, torch.Tensor], dict[str, Any]]
) -> None:
    tensors, scalars = session.tensors(), session.scalars()
    assert scalars == before[1] and tensors.keys() == before[0].keys()
    assert all(torch.equal(tensors[name], before[0][name]) for name in tensors)


def test_a_chunk_is_one_latent_frame_and_a_start_image_one_separate(either: Waypoint) -> None:
    assert isinstance(either, SupportsStepExecution)
    session, each = open_session(either), either.config.temporal_compression
    for index, image in enumerate((True, False, False)):
        request = make_request(session, {"image": start_image()} if image else None)
        either.prepare_encode(request)
        assert (request.num_steps, request.clean_passes) == (5 + image, 1)
        while request.step < request.num_steps:
            step([either], [[request]])
        meta, result = finish(either, request)
        assert (meta["first_frame"], meta["num_frames"]) == (each * index, each)
        assert (
            result["frames"].shape == (each, HEIGHT, WIDTH, 3)
            and result["frames"].dtype == torch.uint8
        )
    assert (session.chunk_index, session.window.committed_frames) == (3, 4)


def test_inputs_change_the_frames(either: Waypoint) -> None:
    """Seed, actions and image.

    Read from the latents: v1 takes a third of a second to decode a frame.
    """

    def first(image: int = 0, **params: Any) -> torch.Tensor:
        session, given = open_session(either, output="latents"), {"actions": [["w"]], **params}
        return run_chunk(either, session, {"image": start_image(image)}, output="latents", **given)

    base = first()
    changed = [first(seed=5), first(actions=None), first(image=1)]
    assert [torch.equal(frames, base) for frames in changed] == [False] * 3
    assert torch.equal(first(), base)


def test_a_prompt_acts_from_the_next_frame_on(checkpoints: dict[str, Path]) -> None:
    world = load_world(checkpoints["v1"])
    session, other = (open_session(world, name, output="latents") for name in ("a", "b"))

    def chunk(of: WaypointSession, **params: Any) -> torch.Tensor:
        return run_chunk(world, of, output="latents", **params)

    assert torch.equal(chunk(session), chunk(other, prompt="An explorable world"))
    assert not torch.equal(chunk(session, prompt="a beach"), chunk(other))


def test_forwards_by_graph_are_those_without(checkpoints: dict[str, Path]) -> None:
    """One graph serves all passes of all frames of a session.

    A frame of v1 takes long: ten fill its larger rings.
    """
    for layout, frames in (("v1_5", chunks()), ("v1", chunks()[:9])):
        plain, by_graphs = load_world(checkpoints[layout]), load_world(checkpoints[layout])
        by_graphs.transformer.graphs = ForwardGraphs(capture=hold)
        assert torch.equal(latents_of([by_graphs], frames), latents_of([plain], frames))
        assert len(by_graphs.transformer.graphs) == 1


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_a_warm_server_launches_no_pass_of_a_new_session_kernel_by_kernel(
    checkpoints: dict[str, Path], kv_dtype: torch.dtype | None
) -> None:
    """A session's graph is captured in its first pass.

    With FP8 its first frame, which sets scales, has one of its own.

    Warm-up has run every kind of pass of a session with a start image before.
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
            step([world], [[request]])
            captured.append(len(graphs) - before)
        assert captured == ([1] * 6 if kv_dtype is None else [1, 2, 2, 2, 2, 2])
        assert torch.equal(latents_of([world], chunks()[:2]), latents_of([plain], chunks()[:2]))


def test_sessions_at_different_steps_in_one_batch_equal_solo_runs(either: Waypoint) -> None:
    names, solo = ("a", "b", "c"), {}
    for seed, name in enumerate(names):
        session = open_session(either, name, output="latents")
        solo[name] = [run_chunk(either, session, seed=seed, output="latents") for _ in range(4)]
    sessions = {name: open_session(either, name, output="latents") for name in names}
    done: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    live, waiting, mixed = [], list(names), 0
    while any(len(made) < 4 for made in done.values()):
        if waiting:
            name = waiting.pop(0)
            request = make_request(sessions[name], seed=names.index(name), output="latents")
            either.prepare_encode(request)
            live.append(request)
        mixed += len({request.step for request in live}) > 1
        step([either], [live])
        for request in [request for request in live if request.step == request.num_steps]:
            name = request.session.session_id
            done[name].append(finish(either, request)[1]["latents"])
            live.remove(request)
            if len(done[name]) < 4:
                waiting.append(name)
    assert mixed > 3
    assert all(
        torch.equal(ours, alone)
        for name in names
        for ours, alone in zip(done[name], solo[name], strict=True)
    )


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("before", [0, 4, 9])
def test_an_aborted_chunk_leaves_no_trace(world: Waypoint, before: int, steps: int) -> None:
    session = open_session(world)
    for _ in range(before):
        run_chunk(world, session, actions=[["w"]])
    twin, retained = session.fork("twin"), bits(session)
    abandoned = make_request(session, {} if before else {"image": start_image()}, seed=9)
    world.prepare_encode(abandoned)
    for _ in range(steps):
        step([world], [[abandoned]])
    assert_same(session, retained)
    assert torch.equal(run_chunk(world, session), run_chunk(world, twin))


def test_a_fork_goes_its_own_way(either: Waypoint) -> None:
    session = open_session(either)
    for _ in range(3):
        run_chunk(either, session, actions=[["w"]])
    fork, before = session.fork("b"), bits(session)
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
    """The values of the first layer travel with the residual stream, in v1.5 only. Bit for bit."""
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
    before = bits(session)
    with pytest.raises(RequestFailed, match=reason) as refused:
        world.prepare_encode(make_request(session, tensors, **params))
    assert refused.value.code == code
    assert_same(session, before)


@pytest.mark.parametrize("field", IMAGE_AND_VIDEO_PARAMS)
def test_a_parameter_without_effect_is_refused(world: Waypoint, field: str) -> None:
    """By name, so that a client does not believe that it did something."""
    session = open_session(world)
    with pytest.raises(RequestFailed, match=f"does not use {field}") as refused:
        world.prepare_encode(make_request(session, **{field: IMAGE_AND_VIDEO_PARAMS[field]}))
    assert refused.value.code == "invalid_request"
