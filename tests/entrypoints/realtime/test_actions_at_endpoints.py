# SPDX-License-Identifier: Apache-2.0
"""Actions at the three realtime endpoints, for models with any action space: the actions that reach
the engine, and the errors for invalid actions.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
from helpers.fake_engine import EndpointServer, FakeEngine, infer
from helpers.live_clients import ExtendedClient, GenerateClient, VideoClient
from helpers.waits import wait_until

from vllm_omni.actions import ActionFrame, ActionSpace, Axis, Button

MakeEndpoint = Callable[..., EndpointServer]
SPACE = ActionSpace(
    buttons=(Button("w", "forward", ("KeyW",)), Button("jump", "jump", ("Space",))),
    axes=(
        Axis(name="dx", title="turn", unit="pixels", kind="motion", mouse="x"),
        Axis(name="throttle", title="speed", unit="of full speed", low=-1, high=1),
    ),
    scroll=True,
    prompt="none",
    image="none",
)
TAKES = "buttons w, jump; axes dx, throttle; scroll"
FRAMES: list[Any] = [["w"], {"buttons": ["jump"], "axes": {"dx": -12.5}}, {"scroll": 1}]
SENT: list[Any] = [["w"], ActionFrame(("jump",), {"dx": -12.5}), ActionFrame(scroll=1.0)]
EXTENSIONS = ["actions", "receipts"]


@pytest.fixture
def endpoint(make_endpoint: MakeEndpoint) -> EndpointServer:
    return make_endpoint(info={"actions": SPACE})


def actions(engine: FakeEngine) -> list[Any]:
    return [entry for call in engine.chunks for entry in call.params.actions or []]


# -- /v1/realtime_video/generate -------------------------------------------------------------------


def start_now(client: ExtendedClient, **fields: Any) -> dict[str, Any]:
    client.init(**{"prompt": "", "first_frame": None, "extensions": EXTENSIONS, **fields})
    session = client.receive()
    assert session["type"] == "session"
    return session


def test_the_session_message_lists_the_actions_of_the_model(endpoint: EndpointServer) -> None:
    """The session message lists the model's actions, so a client can use the controls of a model
    that it does not know.
    """
    with ExtendedClient(endpoint.port) as client:
        reported = start_now(client)["actions"]
    assert [button["name"] for button in reported["buttons"]] == ["w", "jump"]
    assert reported["axes"][0]["mouse"] == "x"
    assert (reported["scroll"], reported["prompt"], reported["image"]) == (True, "none", "none")


def test_scripts_and_transitions_reach_the_engine(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """A script in `init` and subsequent events for held buttons, an axis and motion reach the
    engine, and every event gets a receipt.
    """
    engine.delay_s = 0.05
    with ExtendedClient(endpoint.port) as client:
        start_now(client, condition_inputs={"actions": FRAMES})
        client.chunk()
        assert actions(engine)[:3] == SENT
        transitions = [
            {"buttons": ["w"], "axes": {"throttle": 0.5}},
            {"axes": {"dx": 6}, "scroll": -1},
        ]
        client.event("actions", {"mode": "state", "transitions": transitions}, event_id=5)
        while client.chunk().event_id != 5:
            pass
        client.chunk()
        client.chunk()
        assert [ack["status"] for ack in client.taken("event_ack")] == ["accepted"]
        assert [reported["event_id"] for reported in client.taken("event_applied")] == [5]
    held = {"throttle": 0.5}
    moved = [ActionFrame(("w",), {**held, "dx": 2.0}, scroll) for scroll in (-1.0, 0.0, 0.0)]
    got = actions(engine)
    start = got.index(moved[0])
    assert got[start : start + 6] == [*moved, *[ActionFrame(("w",), held)] * 3]


@pytest.mark.parametrize(
    ("kind", "payload", "code", "says"),
    [
        (
            "actions",
            [["fly"]],
            "invalid_action",
            f"holds the button 'fly'; this model takes {TAKES}",
        ),
        (
            "actions",
            {"mode": "state", "transitions": [{"axes": {"pitch": 1}}]},
            "invalid_action",
            TAKES,
        ),
        ("actions", [["w"]] * 513, "invalid_action", "at most 512"),
        ("prompt", "rain", "invalid_prompt", f"this model takes no prompt; it takes {TAKES}"),
    ],
)
def test_unsupported_events_are_refused_with_the_actions_of_the_model(
    endpoint: EndpointServer, engine: FakeEngine, kind: str, payload: Any, code: str, says: str
) -> None:
    """An unsupported event is rejected with an error that lists the model's actions, and the stream
    continues.
    """
    engine.delay_s = 0.02
    with ExtendedClient(endpoint.port) as client:
        start_now(client)
        client.event(kind, payload, event_id=1)
        while (message := client.receive())["type"] != "error":
            if message["type"] == "event_ack":
                assert (message["status"], message["reason"]) == ("rejected", code)
        assert message["code"] == code
        assert says in message["message"]
        client.chunk()


def test_a_first_prompt_or_image_is_refused_where_there_is_none(endpoint: EndpointServer) -> None:
    """An `init` with a prompt or image that the model does not support is rejected, after which the
    connection accepts another `init`.
    """
    with ExtendedClient(endpoint.port) as client:
        client.init(prompt="a path", first_frame=None)
        assert client.error() == "invalid generate request"
        client.init(prompt="")  # contains a first frame
        assert client.error() == "invalid generate request"
        start_now(client)
        client.chunk()


def test_camera_keys_of_simple_clients_press_the_buttons_of_that_key(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """A client without the actions extension may send camera keys, which press the buttons with the
    same names. Keys without a button are ignored. The client cannot send the extension's events.
    """
    engine.delay_s = 0.02
    with GenerateClient(endpoint.port) as client:
        client.init(
            prompt="", first_frame=None, condition_inputs={"camera_actions": [["w", "l"], ["d"]]}
        )
        client.chunk()
        assert actions(engine)[:3] == [["w"], [], []]
        client.event("actions", [["w"]])
        while client.receive()["type"] != "error":
            pass


def test_too_much_pending_motion_is_refused(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A paused stream consumes no motion events, so pending motion reaches its limit and additional
    motion events are rejected.
    """
    endpoint = make_endpoint(info={"actions": SPACE}, max_messages_per_s=10_000)
    with ExtendedClient(endpoint.port) as client:
        start_now(client, extensions=["actions", "control"])
        client.chunk()
        client.send({"type": "control", "op": "pause"})
        message = {"mode": "state", "transitions": [{"axes": {"dx": 1}}]}
        for number in range(1100):
            client.event("actions", message, event_id=number)
        while (response := client.receive())["type"] != "error":
            pass
        assert response["code"] == "too_many_events"


# -- /v1/realtime/video ----------------------------------------------------------------------------


def interaction(event_id: str, **event: Any) -> dict[str, Any]:
    return {"type": "session.interaction", "interaction": {"event_id": event_id, "event": event}}


def test_the_video_endpoint_takes_scripts_and_transitions(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """The video endpoint accepts scripts and transitions. A chunk's metadata lists the events that
    start, act and end in the chunk.
    """
    engine.delay_s = 0.05
    with VideoClient(endpoint.port) as client:
        start = {
            "type": "session.start",
            "width": 48,
            "height": 32,
            "extra_params": {"action_script": FRAMES},
        }
        assert client.request(start)["type"] == "video.start"
        client.receive()
        assert actions(engine)[:3] == SENT
        held = {"mode": "state", "transitions": [{"buttons": ["w"]}]}
        client.send(interaction("hold", multi_modal_data={"actions": held}))
        client.until("session.interaction.queued")
        while not (chunk := client.receive())["started_event_ids"]:
            pass
        assert (chunk["started_event_ids"], chunk["active_event_ids"]) == (["hold"], ["hold"])
        free = {"mode": "state", "transitions": [{"buttons": []}, {"axes": {"dx": 3}}]}
        client.send(interaction("free", multi_modal_data={"actions": free}))
        client.until("session.interaction.queued")
        while "free" not in (chunk := client.receive())["completed_event_ids"]:
            assert "hold" in chunk["active_event_ids"]
        assert chunk["completed_event_ids"] == ["hold", "free"]
    assert ActionFrame(axes={"dx": 1.0}) in actions(engine)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"multi_modal_data": {"actions": [["fly"]]}}, "invalid_action"),
        ({"prompt": "rain"}, "invalid_prompt"),
        ({"multi_modal_data": {"camera": {"data": {}}}}, "interaction_failed"),
        ({"multi_modal_data": {"camera": {"data": {}}, "actions": [["w"]]}}, "invalid_request"),
        ({"multi_modal_data": {}}, "invalid_request"),
    ],
)
def test_the_video_endpoint_refuses_unsupported_interactions(
    endpoint: EndpointServer, event: Any, code: str
) -> None:
    with VideoClient(endpoint.port) as client:
        client.request({"type": "session.start", "width": 48, "height": 32})
        client.send(interaction("a", **event))
        error, _ = client.until("error")
        assert (error["code"], error.get("event_id")) in ((code, "a"), (code, None))


# -- /v1/realtime/world/camera ---------------------------------------------------------------------


def play(frames: Any = None, **fields: Any) -> dict[str, Any]:
    return infer(
        **{"cameras": None, "image": None, "prompt": None, "actions": frames or FRAMES, **fields}
    )


def test_the_world_endpoint_lists_and_accepts_actions(
    endpoint: EndpointServer, engine: FakeEngine
) -> None:
    """The hello message contains the action space, and the action frames of a request are divided
    into chunks for the engine.
    """
    with endpoint.client() as client:
        assert client.hello["actions"]["axes"][1]["name"] == "throttle"
        client.send(play([*FRAMES, ["w"], ["w"], []]))
        assert len(client.frames()) == 2
    assert actions(engine) == [*SENT, ["w"], ["w"], []]


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        (
            {"actions": [["fly"]] * 3},
            "invalid_action",
            f"actions[0] holds the button 'fly'; this model takes {TAKES}",
        ),
        (
            {"actions": [{"axes": {"throttle": 2}}] * 3},
            "invalid_action",
            "throttle must lie in [-1, 1]",
        ),
        (
            {"actions": [{"axes": {"throttle": math.nan}}] * 3},
            "invalid_action",
            f"this model takes {TAKES}",
        ),
        (
            {"actions": [{"axes": {"throttle": 1e7}}] * 3},
            "invalid_action",
            f"this model takes {TAKES}",
        ),
        ({"actions": 7}, "invalid_action", f"this model takes {TAKES}"),
        ({"actions": [[]] * 4097}, "invalid_action", "4097 entries arrived; at most 4096"),
        ({"prompt": "rain"}, "invalid_prompt", f"this model takes no prompt; it takes {TAKES}"),
        (
            {"image": infer()["image"]},
            "invalid_image",
            f"this model takes no start image; it takes {TAKES}",
        ),
        (
            {"actions": None, "cameras": infer()["cameras"]},
            "invalid_camera",
            f"takes no poses; it takes {TAKES}",
        ),
    ],
)
def test_the_world_endpoint_refuses_unsupported_requests(
    endpoint: EndpointServer, fields: dict[str, Any], code: str, says: str
) -> None:
    with endpoint.client() as client:
        message = {key: value for key, value in play(**fields).items() if value is not None}
        if "cameras" in fields:
            message.pop("actions", None)
        response = client.request(message)
        assert (response["type"], response["code"]) == ("error", code), response
        assert says in response["message"]


def test_an_evicted_session_without_images_needs_restart(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """An evicted session of a model that takes no start image can be started again only with
    `restart`, because nothing else distinguishes starting a session from continuing one.
    """
    endpoint = make_endpoint(info={"actions": SPACE, "session_idle_s": 0.2})
    with endpoint.client() as client:
        client.send(play())
        client.frames()
        wait_until(lambda: not engine.worlds)
        assert client.error(play()) == "session_evicted"
        client.send(play(restart=True))
        client.frames()
