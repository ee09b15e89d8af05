# SPDX-License-Identifier: Apache-2.0
"""The example clients in examples/online_serving, run as programs against a real server with a fake
engine.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.fake_engine import FIRST, LATER, EndpointServer, FakeEngine, camera
from helpers.quick_programs import run_python
from PIL import Image

from vllm_omni.actions import ActionFrame, ActionSpace, Axis, Button
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed

SCRIPT = Path(__file__).parents[3] / "examples" / "online_serving" / "world_camera.py"


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "start.png"
    Image.new("RGB", (96, 64), (90, 120, 60)).save(path)
    return path


Finished = subprocess.CompletedProcess[str]


def run(endpoint: EndpointServer, *arguments: object, script: str = "world_camera.py") -> Finished:
    address = f"ws://127.0.0.1:{endpoint.port}"
    return run_python(SCRIPT.with_name(script), "--server", address, *arguments, limit_s=600)


def test_a_camera_path_becomes_a_video(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path
) -> None:
    """Two consecutive client runs of 24 poses each use one session without losing a pose, and the
    video file contains every frame.
    """
    path = camera(48)
    np.save(tmp_path / "poses.npy", path["poses"])
    np.save(tmp_path / "intrinsics.npy", np.tile(path["intrinsics"], (48, 1)))
    output = tmp_path / "out" / "walk.mp4"
    arguments = (
        "--camera-path",
        tmp_path,
        "--num-frames",
        24,
        "--num-calls",
        2,
        "--fps",
        8,
        "--output",
        output,
    )
    finished = run(endpoint, "--image", image, *arguments)
    assert finished.returncode == 0, finished.stderr
    frames_THWC, fps = decode_mp4(output.read_bytes())
    assert (len(frames_THWC), fps) == (FIRST + LATER + 2 * LATER, 8.0)
    assert len({call.params.session_id for call in engine.chunks}) == 1
    sent_N44 = np.concatenate([call.arrays["poses"] for call in engine.chunks])
    np.testing.assert_allclose(sent_N44, path["poses"][: len(frames_THWC)])


@pytest.mark.parametrize("codec", ["mp4", "jpeg", "ndarray_u8", "ndarray_f32"])
def test_keys_and_every_codec(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path, codec: str
) -> None:
    """Every codec yields the same frames, apart from its compression loss."""
    output = tmp_path / "walk.npy"
    finished = run(
        endpoint, "--image", image, "--keys", "w*2 wl - j", "--codec", codec, "--output", output
    )
    assert finished.returncode == 0, finished.stderr
    frames_THWC = np.load(output)
    assert frames_THWC.shape == (FIRST + LATER, 32, 48, 3)
    assert np.abs(frames_THWC[:, 16, 24, 0].astype(int) - np.arange(FIRST + LATER)).max() <= 3
    assert [call.params.actions for call in engine.chunks] == [
        [["w"], ["w"], ["w", "l"]],
        [[], ["j"], []],
    ]


@pytest.mark.parametrize("script", ["world_camera.py", "realtime_video.py"])
def test_actions_of_any_model(
    make_endpoint: Callable[..., EndpointServer], engine: FakeEngine, tmp_path: Path, script: str
) -> None:
    """Buttons and axes control a world model that takes neither a prompt nor a start image. A
    control that the model does not have is rejected with an error that lists the model's controls.
    """
    axis = Axis(name="yaw", title="turn", unit="of a turn", low=-1, high=1)
    buttons = (Button("run", "run"), Button("jump", "jump"))
    endpoint = make_endpoint(
        info={"actions": ActionSpace(buttons=buttons, axes=(axis,), prompt="none", image="none")}
    )
    more: list[object] = ["--prompt", "", "--chunks", 2] if script == "realtime_video.py" else []
    output = tmp_path / ("live.mp4" if more else "walk.npy")
    text = "run*2 run+jump yaw=-0.5*2 -"
    finished = run(endpoint, "--actions", text, "--output", output, *more, script=script)
    assert finished.returncode == 0, finished.stderr
    turn = ActionFrame(axes={"yaw": -0.5})
    sent = [call.params.actions for call in engine.chunks[:2]]
    assert sent == [[["run"], ["run"], ["run", "jump"]], [turn, turn, []]]
    assert {call.params.prompt for call in engine.chunks} == {None}
    refused = run(endpoint, "--actions", "fly", "--output", output, *more, script=script)
    assert refused.returncode == 1
    assert "this model takes buttons run, jump; axes yaw" in " ".join(refused.stderr.split())


def test_a_session_may_be_named_when_it_starts(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path
) -> None:
    """The client sends the start image even if the user names the session when starting it."""
    arguments = (
        "--image",
        image,
        "--session-id",
        "mine",
        "--keys",
        "w*3",
        "--output",
        tmp_path / "walk.npy",
    )
    finished = run(endpoint, *arguments)
    assert finished.returncode == 0, finished.stderr
    assert "image" in engine.chunks[0].arrays


def test_an_output_of_another_kind_is_refused_before_anything_is_made(
    endpoint: EndpointServer, image: Path
) -> None:
    finished = run(endpoint, "--image", image, "--keys", "w*3", "--output", "walk.gif")
    assert finished.returncode == 2 and "must end in .mp4 or .npy" in finished.stderr


def test_a_refusal_is_one_line_and_status_1(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path
) -> None:
    """If the server refuses a request, the client exits with status 1 and prints one line with the
    server's error text.
    """

    def fail(params: DiffusionParams) -> None:
        raise RequestFailed("oom", "the device ran out of memory")

    engine.fail = fail
    finished = run(endpoint, "--image", image, "--output", tmp_path / "x.mp4")
    assert finished.returncode == 1
    assert "oom: the device ran out of memory" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not (tmp_path / "x.mp4").exists()


def test_errors_are_shown_without_a_progress_bar(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path
) -> None:
    """The error for an unknown session contains the session's id, and the error for a missing start
    image contains the image's path.
    """
    unknown = run(endpoint, "--session-id", "gone", "--output", tmp_path / "x.mp4")
    assert unknown.returncode == 1
    assert "has no session 'gone'" in " ".join(unknown.stderr.split())
    missing = run(
        endpoint, "--image", tmp_path / "start.png.missing", "--output", tmp_path / "x.mp4"
    )
    assert missing.returncode == 2
    assert f"there is no file {tmp_path / 'start.png.missing'}" in missing.stderr
    for finished in (unknown, missing):
        assert "messages" not in finished.stderr
        assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("script", ["world_camera.py", "realtime_video.py"])
def test_a_server_that_does_not_answer_is_named(
    endpoint: EndpointServer, image: Path, script: str
) -> None:
    """If the server does not respond, the client prints a one-line error with a hint."""
    no_client = ("--server", "ws://127.0.0.1:9")
    finished = run(
        endpoint, *no_client, "--image", image, "--keys", "w*3", "--output", "x.mp4", script=script
    )
    assert finished.returncode == 1
    (error,) = [line for line in finished.stderr.splitlines() if line.startswith("error:")]
    assert error == (
        "error: no server answers at ws://127.0.0.1:9 (Connection refused); is it still starting?"
    )


LIVE = "realtime_video.py"


@pytest.mark.parametrize(
    "how",
    [("--format", "jpeg"), ("--format", "delta-gzip"), ("--endpoint", "video")],
    ids=["jpeg", "delta", "video"],
)
def test_a_live_stream_becomes_a_video(
    endpoint: EndpointServer, engine: FakeEngine, image: Path, tmp_path: Path, how: tuple[str, str]
) -> None:
    """The live client writes a stream to a video file: keys steer the stream, the prompt switches,
    and the file contains every frame.
    """
    engine.delay_s = 0.1
    output = tmp_path / "live.mp4"
    switch = ("--switch-prompt", 1, "rain")
    arguments = (
        "--image",
        image,
        "--keys",
        "w*2 wl -",
        "--chunks",
        4,
        *switch,
        *how,
        "--output",
        output,
    )
    finished = run(endpoint, *arguments, script=LIVE)
    assert finished.returncode == 0, finished.stderr
    frames_THWC, fps = decode_mp4(output.read_bytes())
    assert (frames_THWC.shape[1:], fps) == ((32, 48, 3), 16.0)
    assert np.abs(frames_THWC[:, 16, 24, 0].astype(int) - np.arange(FIRST + 3 * LATER)).max() <= 6
    assert [call.params.actions for call in engine.chunks][:2] == [
        [["w"], ["w"], ["w", "l"]],
        [[], [], []],
    ]
    assert [call.params.prompt for call in engine.chunks].count("rain") == 1


@pytest.mark.parametrize(
    ("script", "more"),
    [("world_camera.py", ("--keys", "w*3")), ("realtime_video.py", ("--chunks", 1))],
)
def test_a_server_on_this_machine_is_reached_without_the_proxy(
    endpoint: EndpointServer,
    image: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    more: tuple[object, ...],
) -> None:
    """The client reaches a server on the same machine even if the environment names a proxy that
    does not respond.
    """
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    finished = run(
        endpoint, "--image", image, *more, "--output", tmp_path / "walk.mp4", script=script
    )
    assert finished.returncode == 0, finished.stderr + finished.stdout
