# SPDX-License-Identifier: Apache-2.0
"""A session's start pose and world poses, which are the same at every endpoint."""

import base64
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine, infer
from helpers.live_clients import HEIGHT, WIDTH, ExtendedClient, GenerateClient, VideoClient, png
from helpers.waits import wait_until
from helpers.walking import SPACE, Walker

from vllm_omni.worlds.description import WorldDescription
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.start_pose import StartPose

MakeEndpoint = Callable[..., EndpointServer]

START: Final = {"x_m": 1.0, "z_m": -4.0, "heading_degrees": 90.0, "pitch_degrees": 5.0}
KEYS: Final = [["w"], ["w", "l"], [], ["a"], ["i"], ["w"]]
DESCRIPTION: Final = WorldDescription(
    domain="d", title="t", about="", sizes=((WIDTH, HEIGHT),), metres_per_unit=10.0
)
IMAGE: Final = {"image_url": "data:image/png;base64," + base64.b64encode(png()).decode()}


@pytest.fixture
def endpoint(make_endpoint: MakeEndpoint) -> EndpointServer:
    return make_endpoint(info={"actions": SPACE, "card": DESCRIPTION})


def expected() -> list[list[float]]:
    walker = Walker(StartPose(**START))
    return [*walker.walk(KEYS[:3], starts=True), *walker.walk(KEYS[3:], starts=False)]


def at_camera(endpoint: EndpointServer, start_pose: dict[str, float] | None) -> list[Any]:
    with endpoint.client() as client:
        message = infer(FIRST + LATER, cameras=None, actions=KEYS, protocol_version=1)
        if start_pose is not None:
            message["extra_body"] |= {"start_pose": start_pose}
        client.send(message)
        return [message.get("world_poses") for message in client.frames()]


def at_video(endpoint: EndpointServer, start_pose: dict[str, float] | None) -> list[Any]:
    with VideoClient(endpoint.port) as client:
        extra: dict[str, Any] = {
            "action_script": KEYS,
            **({} if start_pose is None else {"start_pose": start_pose}),
        }
        start = {
            "type": "session.start",
            "prompt": "a path",
            "width": WIDTH,
            "height": HEIGHT,
            "image_reference": IMAGE,
        }
        client.request({**start, "num_frames": FIRST + LATER, "extra_params": extra})
        return [chunk.get("world_poses") for chunk in client.until("session.done")[1]]


ENDPOINTS = pytest.mark.parametrize("play", [at_camera, at_video], ids=["camera", "video"])


@ENDPOINTS
def test_the_same_keys_from_the_same_start_give_the_same_poses(
    endpoint: EndpointServer, engine: FakeEngine, play: Callable[..., list[Any]]
) -> None:
    """The same keys from the same start pose yield the same poses at the camera and the video
    endpoint. Only the first chunk request contains the start pose, and each latent frame has a
    pose.
    """
    first, second = play(endpoint, START)
    assert [*first, *second] == [pytest.approx(row) for row in expected()]
    assert [call.params.options.get("start_pose") for call in engine.chunks] == [START, None]


def test_the_generate_endpoint_reports_the_same_poses(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """The generate endpoint uses extension messages to report the same poses as the other
    endpoints, because the original protocol has no message for poses.
    """
    with ExtendedClient(endpoint.port) as client:
        client.init(
            extensions=["actions", "world_poses"],
            condition_inputs={"actions": KEYS},
            max_chunks=3,
            start_pose=START,
        )
        client.receive()
        for _ in range(3):
            client.chunk()
        reported = [message["world_poses"] for message in client.taken("world_poses")]
    assert [*reported[0], *reported[1]] == [pytest.approx(row) for row in expected()]
    assert [call.params.options.get("start_pose") for call in engine.chunks] == [START, None, None]
    with GenerateClient(endpoint.port) as plain:
        plain.init(max_chunks=2, start_pose=START)
        assert [plain.chunk().index, plain.chunk().index] == [0, 1]


@ENDPOINTS
def test_an_unknown_pose_is_not_reported(
    endpoint: EndpointServer, play: Callable[..., list[Any]]
) -> None:
    assert play(endpoint, None) == [None, None]


def test_a_chunk_in_several_messages_has_its_poses_in_the_first(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    engine.start_pose = StartPose(**START)
    with endpoint.client() as client:
        message = infer(cameras=None, actions=KEYS[:3], protocol_version=1)
        message["extra_body"] |= {"frames_per_chunk": 4}
        client.send(message)
        assert ["world_poses" in part for part in client.frames()] == [True, False, False]


@pytest.mark.parametrize(
    "wrong",
    [{"x_m": 1.0}, {**START, "y_m": 1.0}, {**START, "pitch_degrees": 86}, {**START, "x_m": "1"}, 7],
    ids=["incomplete", "unknown key", "beyond the zenith", "text", "no map"],
)
def test_a_wrong_start_pose_is_refused(
    endpoint: EndpointServer, engine: FakeEngine, wrong: Any
) -> None:
    """Every endpoint rejects an invalid start pose with an error that names the invalid field, and
    no request reaches the engine.
    """
    with endpoint.client() as client:
        message = infer(cameras=None, actions=KEYS[:3])
        message["extra_body"] |= {"start_pose": wrong}
        refusal = client.request(message)
        assert refusal["code"] == "invalid_request" and "start_pose" in refusal["message"]
    with VideoClient(endpoint.port) as video:
        video.send(
            {"type": "session.start", "prompt": "a path", "extra_params": {"start_pose": wrong}}
        )
        assert "start_pose" in video.receive()["message"]
    with ExtendedClient(endpoint.port) as generate:
        generate.init(extensions=["receipts"], start_pose=wrong)
        refusal = generate.receive()
        assert refusal["code"] == "invalid_request" and "start_pose" in refusal["message"]
    assert engine.chunks == []


def test_a_later_request_with_a_start_pose_reaches_the_engine(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """The endpoint does not reject a start pose in a later request itself. It forwards the pose to
    the engine, which rejects it because the session has already started.
    """
    with endpoint.client() as client:
        client.send(infer(cameras=None, actions=KEYS[:3], protocol_version=1))
        client.frames()
        client.receive()
        later = infer(LATER, image=None, cameras=None, actions=KEYS[3:])
        later["extra_body"] |= {"start_pose": START}
        client.send(later)
        client.frames()
    assert engine.chunks[-1].params.options["start_pose"] == START


def test_a_world_has_its_own_focal_length(make_endpoint: MakeEndpoint) -> None:
    """If a world description defines a focal length, the focal length scales with the video width.
    Otherwise, the model's focal length, which is a number of pixels, applies.
    """
    own = msgspec.structs.replace(DESCRIPTION, focal=0.65)
    with make_endpoint(info={"actions": SPACE, "card": own}).client() as client:
        assert client.hello["key_focal"] == pytest.approx(0.65 * WIDTH)
    with make_endpoint(info={"actions": SPACE, "card": DESCRIPTION}).client() as client:
        assert client.hello["key_focal"] == 500.0


# -- velocity commands -----------------------------------------------------------------------------


def open_video(endpoint: EndpointServer, **extra: Any) -> VideoClient:
    client = VideoClient(endpoint.port)
    start = {
        "type": "session.start",
        "prompt": "a path",
        "width": WIDTH,
        "height": HEIGHT,
        "image_reference": IMAGE,
    }
    client.request({**start, "extra_params": extra})
    return client


def command(mode: str, translation: Any = (0, 0, 0), **fields: Any) -> dict[str, Any]:
    camera = {"mode": mode, "data": {"translation": translation, **fields}}
    return {
        "type": "session.interaction",
        "interaction": {"event": {"multi_modal_data": {"camera": camera}}},
    }


def moving(engine: FakeEngine) -> list[Any]:
    """Return the chunk requests whose actions contain axes."""
    return [
        call
        for call in engine.chunks
        if call.params.actions and any(not isinstance(e, list) for e in call.params.actions)
    ]


def test_a_velocity_becomes_axes(endpoint: EndpointServer, engine: FakeEngine) -> None:
    """For a model with axes, a velocity of 0.05 units becomes one step on an axis, and a rotation
    of 6 degrees becomes a yaw of 6.

    Such a model moves the camera itself, so it receives no poses for a velocity.
    """
    engine.start_pose = StartPose(**START)
    engine.delay_s = 0.02
    with open_video(endpoint) as client:
        half = np.radians(6) / 2
        client.send(
            command("velocity", (0.05, 0, 0.1), rotation=(0, np.sin(half), 0, np.cos(half)))
        )
        wait_until(lambda: moving(engine))
    entry = moving(engine)[0].params.actions[0]
    assert entry.axes == pytest.approx(
        {"forward": 2.0, "right": 1.0, "up": 0.0, "yaw": 6.0, "pitch": 0.0}
    )
    assert all("poses" not in call.arrays for call in engine.chunks)


def test_a_velocity_beyond_the_axes_is_refused(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    with open_video(endpoint) as client:
        client.send(command("velocity", (0, 0, 5.0)))
        while (message := client.receive())["type"] == "video.chunk_metadata":
            pass
    assert (message["type"], message["code"]) == ("error", "invalid_camera")
    assert "forward must lie in [-8, 8] steps per latent frame" in message["message"]


def test_a_target_starts_at_the_position_where_a_wall_stopped_the_camera(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """A client gives a target relative to the start image, and the engine gets the target in the
    session's coordinates, even after a wall has stopped the camera.
    """
    cells = torch.zeros(30, 30, dtype=torch.bool)
    cells[14 - 3] = True  # blocked from 3 m to the north
    engine.grid = OccupancyGrid(cells, 30.0)
    engine.start_pose = StartPose(x_m=2.0, z_m=0.0, heading_degrees=0.0)
    engine.delay_s = 0.02
    with open_video(endpoint) as client:
        client.send(command("velocity", (0, 0, 0.05)))
        wait_until(lambda: len(moving(engine)) >= 5)
        client.send(command("target", (0, 0, 0)))
        wait_until(lambda: any("poses" in call.arrays for call in engine.chunks))
        call = next(call for call in engine.chunks if "poses" in call.arrays)
    z = call.arrays["poses"][:, 2, 3]
    assert 0 < z[0] * 10 < 3.0, "not the 9 m or more of free ground"
    assert call.arrays["poses"][-1, :3, 3] == pytest.approx([0.2, 0, 0], abs=1e-5)


def test_a_velocity_without_axes_becomes_poses(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """If a model accepts keys and poses but no axes, a velocity reaches it as poses."""
    with open_video(make_endpoint()) as client:
        client.send(command("velocity", (0, 0, 0.05)))
        wait_until(
            lambda: any(
                "poses" in call.arrays and call.arrays["poses"][-1, 2, 3] > 0
                for call in engine.chunks
            )
        )
    assert not moving(engine)
