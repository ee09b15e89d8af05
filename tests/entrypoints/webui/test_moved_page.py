# SPDX-License-Identifier: Apache-2.0
"""The web page follows its session to another server. The tests use headless Chromium and two real
servers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page
from helpers.fake_engine import FIRST, LATER
from helpers.fleets import TestFleet, live_sessions, migrate
from helpers.served import KEY, Served
from helpers.waits import wait_until
from page_driving import PARTS, enter_key

pytestmark = pytest.mark.nightly

BRIGHTNESS = """(() => { const view = document.querySelector("#view"); if (!view.videoWidth) return -1;
    const canvas = new OffscreenCanvas(160, 96), c = canvas.getContext("2d");
    c.drawImage(view, 0, 0); return c.getImageData(150, 90, 1, 1).data[1]; })()"""  # noqa: E501
LAST_CHUNK = f"{PARTS}.then(({{ app }}) => app.world.lastChunk)"


@pytest.fixture(scope="module")
def fleet(null_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestFleet]:
    fleet = TestFleet(
        null_world,
        tmp_path_factory.mktemp("fleet"),
        flags=lambda ports: (
            "--allowed-origins",
            json.dumps([f"http://127.0.0.1:{port}" for port in ports.values()]),
        ),
    )
    try:
        yield fleet
    finally:
        fleet.stop()


def log_in(page: Page) -> None:
    enter_key(page, KEY)
    page.wait_for("document.body.dataset.link === 'up'")


def move_only_session(source: Served, name: str) -> tuple[str, dict[str, Any]]:
    """Wait until a server has exactly one session, and move that session to the other server.
    Return the session's id and the reply.
    """
    wait_until(lambda: len(live_sessions(source)) == 1)
    (session,) = live_sessions(source)
    status, reply = migrate(source, session, name)
    assert status == 200, reply
    return session, reply


def test_the_webrtc_page_follows_its_session(browser: Browser, fleet: TestFleet) -> None:
    """The WebRTC page still shows its session after each move. The null world gives frame n the
    brightness n, and the brightness continues to rise.
    """
    a, b = fleet["a"], fleet["b"]
    with browser.page(f"http://127.0.0.1:{a.port}/omni/webrtc.html") as page:
        log_in(page)
        page.click("#begin")
        page.wait_for(f"{BRIGHTNESS} > 10", timeout_s=60)
        page.key("keyDown", "w")
        for source, target, name in ((a, b, "b"), (b, a, "a")):
            session, reply = move_only_session(source, name)
            frames = FIRST + LATER * (reply["next_chunk_index"] - 1)
            page.wait_for(f"{BRIGHTNESS} > {frames + 4}", timeout_s=60)
            assert page.text("#status") == "Playing"
            assert live_sessions(target) == {session}
        page.key("keyUp", "w")
        page.errors = [error for error in page.errors if "401" not in error]
        assert not page.errors
    wait_until(lambda: not live_sessions(a))


def test_the_page_follows_its_world(browser: Browser, fleet: TestFleet) -> None:
    """While a session is being played, it moves to the other server and back, and once more when
    its server stops. The page shows each chunk once and reports no problem.
    """
    a, b = fleet["a"], fleet["b"]
    with browser.page(f"http://127.0.0.1:{a.port}/omni/") as page:
        log_in(page)
        page.run(
            f"{PARTS}.then(({{ app }}) => {{ window.chunks = []; window.trouble = [];"
            "app.world.addEventListener('chunk', (e) => window.chunks.push(e.detail.message.chunk_index));"  # noqa: E501
            "app.world.addEventListener('trouble', (e) => window.trouble.push(e.detail.text)); })"
        )
        page.click("#start .main")
        page.wait_for("document.querySelector('#view').classList.contains('has-picture')", 60)
        page.key("keyDown", "w")
        for source, target, name in ((a, b, "b"), (b, a, "a")):
            session, reply = move_only_session(source, name)
            page.wait_for(f"{LAST_CHUNK}.then((n) => n >= {reply['next_chunk_index'] + 2})", 30)
            assert live_sessions(target) == {session}
        reached = page.run(LAST_CHUNK)
        a.process.terminate()
        page.wait_for(f"{LAST_CHUNK}.then((n) => n >= {reached + 3})", 30)
        assert live_sessions(b) == {session}
        page.key("keyUp", "w")
        chunks = page.run("window.chunks")
        assert chunks == list(range(len(chunks)))
        assert page.run("window.trouble") == []
        page.errors = [error for error in page.errors if "401" not in error]
        assert not page.errors
