# SPDX-License-Identifier: Apache-2.0
"""The example client `world_camera.py` behind a real HAProxy that is killed and started again."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.haproxy import needs_haproxy
from helpers.served import HEIGHT, KEY, WIDTH
from helpers.waits import seconds
from PIL import Image
from session_calls import call
from test_haproxy_served import Fleet

pytestmark = [needs_haproxy, pytest.mark.nightly]

SCRIPT = Path(__file__).parents[3] / "examples" / "online_serving" / "world_camera.py"


def start_walk(fleet: Fleet, image: Path, output: Path) -> "subprocess.Popen[str]":
    address = ["--server", f"ws://127.0.0.1:{fleet.proxy.port}", "--api-key", KEY]
    size = ["--width", str(WIDTH), "--height", str(HEIGHT)]
    how = ["--keys", "w*24", "--num-calls", "24", "--codec", "ndarray_u8", "--image", str(image)]
    arguments = [sys.executable, SCRIPT, *address, *size, *how, "--output", output]
    return subprocess.Popen(
        [str(each) for each in arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_walks_continue_when_the_proxy_is_killed_and_started_again(
    null_world: Path, tmp_path: Path
) -> None:
    """Each client reconnects to the server that has its session, no session runs on both servers,
    and each video has the same frames as that of an uninterrupted walk.
    """
    image = tmp_path / "start.png"
    Image.new("RGB", (WIDTH, HEIGHT), (90, 120, 60)).save(image)
    # All sessions fit on one server, because a name whose server is full leads to the other one.
    fleet = Fleet(null_world, tmp_path, max_sessions=4)
    try:
        expected = start_walk(fleet, image, tmp_path / "expected.npy")
        _, text = expected.communicate(timeout=seconds(120))
        assert expected.returncode == 0, text
        outputs = [tmp_path / f"walk-{number}.npy" for number in range(3)]
        walks = [start_walk(fleet, image, output) for output in outputs]
        texts = ["", "", ""]
        for number, walk in enumerate(walks):  # until each walk has begun
            assert walk.stderr is not None
            while "chunk 3:" not in texts[number]:
                line = walk.stderr.readline()
                assert line, texts[number]
                texts[number] += line
        fleet.proxy.restart()
        for number, walk in enumerate(walks):
            texts[number] += walk.communicate(timeout=seconds(120))[1]
            assert walk.returncode == 0, texts[number]
        # A walk between two calls has no connection to lose.
        assert any("connection lost" in text for text in texts)
        frames_THWC = np.load(tmp_path / "expected.npy")
        for output in outputs:
            assert np.array_equal(np.load(output), frames_THWC)
        for text in texts:
            name = text.split("session ")[1].split()[0]
            path = f"/v1/sessions/{name}/snapshot"
            found = [call(server, "GET", path)[0] for server in fleet.servers.values()]
            assert sorted(found) == [200, 404]
    finally:
        fleet.stop()
