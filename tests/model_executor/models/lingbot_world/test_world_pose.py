# SPDX-License-Identifier: Apache-2.0
"""Tests of world models with poses: the start pose, motion from controls, and the network's
input.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import step
from lingbot_world_driver import (
    HEIGHT,
    WIDTH,
    load_world,
    make_request,
    open_session,
    run_chunk,
    start_image,
)
from PIL import Image

from vllm_omni.actions import ActionFrame
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.world_pose import (
    WORLD_FEATURES,
    token_rays,
    world_features,
)
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed
from vllm_omni.worlds.movement import world_pose

FIRST = 9
"""Number of video frames in a first chunk. The latent frames of that chunk correspond to video
frames 0, 4 and 8.
"""
ELSEWHERE = {"x_m": 1.0, "z_m": -2.0, "heading_degrees": 30.0, "pitch_degrees": -10.0}
PERIOD_M = 20.0


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("lingbot_world", "world")


@pytest.fixture(scope="module")
def world(checkpoint: Path) -> LingBotWorld:
    return load_world(checkpoint, window_frames=7, sink_frames=2)


@pytest.fixture(scope="module")
def known_image(checkpoint: Path) -> torch.Tensor:
    """Return the `south` start image, which shows the view from z = -4 m to the north."""
    with Image.open(checkpoint / "south.png") as image:
        return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(
            HEIGHT, WIDTH, 3
        )


def chunk_poses(world: LingBotWorld, session: Any, tensors: Any = None, **params: Any) -> Any:
    """Run a chunk and return the poses (x, z, heading, pitch) that it reports, or None if the poses
    are unknown.
    """
    return run_chunk(world, session, tensors, prompt="a day", **params)[0].get("world_poses")


def poses_tensors(poses: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        "poses": torch.stack(poses).float(),
        "intrinsics": torch.tensor([540.8, 540.8, 416.0, 240.0]),
    }


# -- start poses -----------------------------------------------------------------------------------


def test_a_start_pose_is_the_pose_of_the_first_latent_frame(world: LingBotWorld) -> None:
    """Whatever keys are held, the first latent frame has the start pose, because it is the start
    image.
    """
    rows = chunk_poses(
        world, open_session(world), actions=[["w", "l"]], options={"start_pose": ELSEWHERE}
    )
    assert rows[0] == pytest.approx([1.0, -2.0, 30.0, -10.0])
    assert rows[1] == rows[2] == rows[0]


def test_the_worlds_own_start_image_is_recognised(
    world: LingBotWorld, known_image: torch.Tensor
) -> None:
    rows = chunk_poses(
        world, open_session(world), {"image": known_image}, actions=[[], ["w"], ["w"]]
    )
    assert rows[0] == pytest.approx([0.0, -4.0, 0.0, 0.0])
    assert rows[2][:2] == pytest.approx([0.0, -3.0], abs=1e-4)


def test_an_unknown_image_has_no_pose_and_no_walls(world: LingBotWorld) -> None:
    session = open_session(world)
    assert chunk_poses(world, session, {"image": start_image(5)}, actions=[["w"]]) is None
    request = make_request(world, session, actions=[["w"]] * 3)
    world.prepare_encode(request)
    assert not bool(request.work.world_features.any())


@pytest.mark.parametrize(
    ("start", "named"),
    [
        ({"x_m": 1.0}, "z_m"),
        ({**ELSEWHERE, "x_m": "far"}, "x_m"),
        ({**ELSEWHERE, "pitch_degrees": 90}, "pitch_degrees"),
    ],
)
def test_a_malformed_start_pose_is_refused_by_name(
    world: LingBotWorld, start: dict[str, Any], named: str
) -> None:
    with pytest.raises(RequestFailed, match=named):
        run_chunk(world, open_session(world), prompt="a day", options={"start_pose": start})


def test_a_start_pose_in_a_later_chunk_is_refused(world: LingBotWorld) -> None:
    session = open_session(world)
    run_chunk(world, session, prompt="a day")
    with pytest.raises(RequestFailed, match="only a session's first chunk"):
        run_chunk(world, session, options={"start_pose": ELSEWHERE})


def test_a_model_without_poses_refuses_a_start_pose(tmp_path: Path) -> None:
    get_family("lingbot_world").make_tiny(tmp_path, 0, "v2")
    plain = load_world(tmp_path)
    with pytest.raises(RequestFailed, match="no world with poses"):
        run_chunk(plain, open_session(plain), prompt="a day", options={"start_pose": ELSEWHERE})


# -- motion ----------------------------------------------------------------------------------------


def test_walls_stop_held_keys(world: LingBotWorld) -> None:
    """A wall at z = 3 m stops the camera, which reaches the wall from z = 0 m in six steps."""
    session, north = open_session(world), {"x_m": 0.0, "z_m": 0.0, "heading_degrees": 0.0}
    rows = chunk_poses(world, session, actions=[["w"]] * 3, options={"start_pose": north})
    for _ in range(4):
        rows = chunk_poses(world, session, actions=[["w"]] * 3)
    assert 2.8 < rows[-1][1] < 3.0 and rows[-1][1] == pytest.approx(rows[-2][1], abs=1e-6)


@pytest.mark.parametrize("start", [{}, {"start_pose": {**ELSEWHERE, "pitch_degrees": 0.0}}])
def test_a_world_limits_how_far_keys_look_down(world: LingBotWorld, start: dict[str, Any]) -> None:
    """A world's pitch limit applies to sessions both with and without a known pose, as the
    endpoints assume for camera commands.
    """
    assert world.world is not None
    limited = replace(world.world, pitch_limit_degrees=12.0)
    session = open_session(world)
    run_chunk(world, session, prompt="a day", actions=[[], ["k"], ["k"]], options=start)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "world", limited)
        run_chunk(world, session, actions=[["k"]] * 3)
    assert session.tail.pitch_degrees == pytest.approx(-12.0)


def test_analog_axes_add_to_keys(world: LingBotWorld) -> None:
    """Motion from analog axes (half a step forward, a turn of ten degrees and a mouse turn) is
    added to the motion from held keys.
    """
    session = open_session(world)
    frame = ActionFrame(("l",), {"forward": 0.5, "yaw": 4.0, "turn": 10.0, "look": 5.0})
    rows = chunk_poses(
        world,
        session,
        actions=[[], frame],
        options={"start_pose": {**ELSEWHERE, "heading_degrees": 70}},
    )
    assert rows[1] == pytest.approx([1.25, -2.0, 90.0, -5.0], abs=1e-4)


def test_poses_of_a_client_ignore_walls(world: LingBotWorld) -> None:
    """Poses sent by a client are used as they are, even inside walls. In this world, 0.5 units are
    5 m.
    """
    eye = [torch.eye(4) for _ in range(FIRST)]
    for frame in range(FIRST):
        eye[frame][2, 3] = 0.5 * frame / 8
    start = {"x_m": 0.0, "z_m": 0.0, "heading_degrees": 90.0}
    rows = chunk_poses(
        world, open_session(world), poses_tensors(eye), options={"start_pose": start}
    )
    assert [row[:2] for row in rows] == [pytest.approx([x, 0.0], abs=1e-5) for x in (0.0, 2.5, 5.0)]


def test_poses_of_a_client_are_relative_to_the_first(world: LingBotWorld) -> None:
    """A client can use any origin for its poses, because the pose for frame 0 is mapped to the
    start pose.
    """
    there = world_pose(0.3, 0.7, 45.0)
    poses = [there.clone() for _ in range(FIRST)]
    rows = chunk_poses(
        world, open_session(world), poses_tensors(poses), options={"start_pose": ELSEWHERE}
    )
    assert rows == [pytest.approx([1.0, -2.0, 30.0, -10.0], abs=1e-4)] * 3


def test_keys_after_poses_continue_from_the_last_pose(world: LingBotWorld) -> None:
    session = open_session(world)
    poses = [torch.eye(4) for _ in range(FIRST)]
    start = {"x_m": 0.0, "z_m": 0.0, "heading_degrees": 90.0}
    run_chunk(world, session, poses_tensors(poses), prompt="a day", options={"start_pose": start})
    rows = chunk_poses(world, session, actions=[["w"], ["w"], ["d"]])
    assert rows[-1] == pytest.approx([1.0, -0.5, 90.0, 0.0], abs=1e-4)


def test_the_input_is_periodic() -> None:
    """Moving the camera by whole periods produces the same network input."""
    view = torch.tensor([[31.2, 31.2, 24.0, 16.0]], dtype=torch.float64)
    here, there = (
        world_features(world_pose(x, z, 30.0)[None], view, HEIGHT, WIDTH, PERIOD_M)
        for x, z in ((9.9, -3), (29.9, -43))
    )
    assert torch.allclose(here, there, atol=1e-6)
    beyond = world_features(world_pose(10.1, -3, 30.0)[None], view, HEIGHT, WIDTH, PERIOD_M)
    assert float((here - beyond).abs().max()) < 0.6


# -- a camera at rest ------------------------------------------------------------------------------


def play(
    world: LingBotWorld, session: Any, *held: str, chunks: int = 1, **params: Any
) -> list[torch.Tensor]:
    """Run chunks with the given keys held and return their latents."""
    fields = {"actions": [list(held)] * 3, "output": "latents", **params}
    return [run_chunk(world, session, **fields)[1]["latents"] for _ in range(chunks)]


def resting_session(world: LingBotWorld) -> Any:
    """Return a session in which the camera moved for one chunk and then rested for two."""
    session = open_session(world, output="latents")
    play(world, session, prompt="a day", options={"start_pose": ELSEWHERE})
    play(world, session, "d")
    play(world, session, chunks=2)
    return session


def test_the_window_omits_chunks_of_a_camera_at_rest(world: LingBotWorld) -> None:
    """While the camera rests, only one chunk at its pose is written to the window. Later chunks are
    omitted, because they would differ from that chunk only in their noise.
    """
    session = resting_session(world)
    assert session.window.committed_frames == 9
    before = {name: tensor.clone() for name, tensor in session.window.tensors(3).items()}
    second, third = play(world, session, chunks=2)
    assert not torch.equal(second, third)
    assert all(torch.equal(now, before[name]) for name, now in session.window.tensors(3).items())
    assert (session.chunk_index, session.omitted_frames) == (6, 9)


def test_chunks_of_a_moving_camera_are_written_again(world: LingBotWorld) -> None:
    session = resting_session(world)
    for chunk in range(1, 3):
        play(world, session, "d")
        assert session.window.committed_frames == 9 + 3 * chunk


def test_poses_of_a_client_may_rest_too(world: LingBotWorld) -> None:
    session = open_session(world)
    for chunk in range(4):
        poses = poses_tensors([torch.eye(4)] * (12 if chunk else FIRST))
        run_chunk(world, session, poses, prompt="a day")
    assert session.window.committed_frames == 6


def test_a_new_prompt_is_written_until_it_fills_the_window(world: LingBotWorld) -> None:
    """After a new prompt, two chunks of three frames are written although the camera is at rest,
    because the window has room for five frames in addition to its sinks.
    """
    session = resting_session(world)
    play(world, session, prompt="a night")
    assert session.window.committed_frames == 12
    play(world, session, chunks=3)
    assert session.window.committed_frames == 15


def test_a_session_without_a_pose_may_rest_too(world: LingBotWorld) -> None:
    session = open_session(world, output="latents")
    play(world, session, chunks=4, prompt="a day")
    assert session.own.tail.start is None and session.window.committed_frames == 6


def test_models_without_poses_write_every_chunk(tmp_path: Path) -> None:
    get_family("lingbot_world").make_tiny(tmp_path, 0, "v2")
    plain = load_world(tmp_path, window_frames=7, sink_frames=2)
    session = open_session(plain, output="latents")
    play(plain, session, chunks=4, prompt="a day")
    assert session.window.committed_frames == 12


def test_a_fork_of_a_resting_session_continues_with_the_same_bits(world: LingBotWorld) -> None:
    session = resting_session(world)
    fork = session.fork("c")
    for held in ((), ("w",)):
        ours, forked = (play(world, one, *held) for one in (session, fork))
        assert torch.equal(ours[0], forked[0])


@pytest.mark.parametrize("omitted", [0, 6, 12])
def test_omitted_frames_that_do_not_fit_the_chunk_are_refused(
    world: LingBotWorld, omitted: int
) -> None:
    """A snapshot is refused if its number of omitted frames contradicts its chunk number, as in a
    forged snapshot. After four chunks of three frames, this session's window holds nine frames.
    """
    session = resting_session(world)
    session.omitted_frames = omitted
    with pytest.raises(RequestFailed, match="does not fit its number of frames"):
        session.check_committed(session.window.committed_frames)


# -- the network's input ---------------------------------------------------------------------------


def test_rays_are_unit_vectors_in_world_coordinates() -> None:
    """When the camera faces east, the ray through the middle of the image points along the x
    axis.
    """
    view = torch.tensor([[31.2, 31.2, 24.0, 16.0]], dtype=torch.float64)
    rays = token_rays(view, HEIGHT, WIDTH)
    assert rays.shape == (1, 6, 16, 3) and torch.allclose(
        rays.norm(dim=-1), torch.ones(1, 6, 16, dtype=torch.float64)
    )
    features = world_features(world_pose(0, 0, 90.0)[None], view, HEIGHT, WIDTH, PERIOD_M)
    assert features.shape == (6, WORLD_FEATURES)
    middle = features[:, :48].view(6, 16, 3).mean(dim=(0, 1))
    assert middle[0] > 0.8 and middle[1:].abs().max() < 1e-6


def test_the_pose_changes_the_frames(world: LingBotWorld) -> None:
    frames = [
        run_chunk(
            world,
            open_session(world),
            prompt="a day",
            seed=1,
            actions=[[]],
            options={"start_pose": start},
        )[1]
        for start in (ELSEWHERE, ELSEWHERE, {**ELSEWHERE, "x_m": 4.0})
    ]
    assert torch.equal(frames[0]["frames"], frames[1]["frames"])
    assert not torch.equal(frames[0]["frames"], frames[2]["frames"])


def test_known_and_unknown_poses_share_a_batch(world: LingBotWorld) -> None:
    """Sessions with known and unknown poses can share a batch, and each gets the same result as
    when it runs alone.
    """

    def request(session: Any, options: dict[str, Any]) -> Any:
        made = make_request(
            world, session, {"image": start_image(5)}, prompt="a day", seed=3, options=options
        )
        world.prepare_encode(made)
        return made

    both = ({"start_pose": ELSEWHERE}, {})
    alone = []
    for options in both:
        single = request(open_session(world), options)
        while single.step < single.num_steps:
            step(world, [single])
        alone.append(single.work.latents)
    batch = [
        request(open_session(world, str(index)), options) for index, options in enumerate(both)
    ]
    while batch[0].step < batch[0].num_steps:
        step(world, batch)
    for made, expected in zip(batch, alone, strict=True):
        assert torch.allclose(made.work.latents, expected, atol=1e-4)


# -- sessions --------------------------------------------------------------------------------------


def test_a_fork_continues_from_the_same_pose(world: LingBotWorld) -> None:
    session = open_session(world)
    run_chunk(world, session, prompt="a day", options={"start_pose": ELSEWHERE})
    branch = session.fork("branch")
    walk = [["w"], ["d"], ["l"]]
    first, second = run_chunk(world, session, actions=walk), run_chunk(world, branch, actions=walk)
    assert first[0]["world_poses"] == second[0]["world_poses"]
    assert torch.equal(first[1]["frames"], second[1]["frames"])
