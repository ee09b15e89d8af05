# SPDX-License-Identifier: Apache-2.0
"""On hosts other than localhost, browsers provide no WebCodecs over plain HTTP. There, the page
decodes H.264 with Media Source Extensions or receives frames as JPEG.
"""

import json
from collections.abc import Iterator

import msgspec
import pytest
from browser import Browser, Page
from helpers.fake_engine import FIRST, LATER, FakeEngine
from helpers.waits import wait_until
from page_driving import PARTS, grey, start_now
from page_server import MakeServer, PageServer
from websockets.sync.client import connect

pytestmark = pytest.mark.nightly

IGNORED = "Cross-Origin-Opener-Policy"  # browsers ignore it over plain HTTP and log a message
CODEC = "document.querySelector('[data-stat=codec]').textContent"
RESTED = (
    f"{PARTS}.then(({{ app }}) => app.isResting && app.player.numBuffered === 0 && "
    "app.player.numShown)"
)
NOTE = f"""{PARTS}.then(({{ app }}) => {{
    window.seen = []; const shown = app.player.onframe;
    const view = document.querySelector("#view");
    app.player.onframe = (frame) => {{ shown(frame);
        const level = () => view.getContext("2d").getImageData(40, 24, 1, 1).data[1];
        seen.push(app.player.shown === frame ? level() : null); }}; }})"""
"""JavaScript that stores the brightness of each frame, or null if a later frame was displayed in
its place.
"""


@pytest.fixture
def slow_server(make_server: MakeServer) -> PageServer:
    return make_server(info={"fps": 24.0})


@pytest.fixture
def mse_page(browser: Browser, slow_server: PageServer) -> Iterator[Page]:
    with browser.page(slow_server.url.replace("127.0.0.1", "world.test")) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        assert page.run("[isSecureContext, typeof VideoDecoder]") == [False, "undefined"]
        page.wait_for(f"{CODEC} === 'H.264 (MSE)'")
        yield page
        assert [error for error in page.errors if IGNORED not in error] == []


def num_frames(engine: FakeEngine) -> int:
    return FIRST + LATER * (len(engine.chunks) - 1)


def walk_and_rest(page: Page, engine: FakeEngine, num_chunks: int) -> None:
    target = len(engine.chunks) + num_chunks
    page.key("keyDown", "w")
    wait_until(lambda: len(engine.chunks) >= target)
    page.key("keyUp", "w")
    page.wait_for(RESTED)


def test_every_frame_is_shown_in_order_with_its_stamp(mse_page: Page, engine: FakeEngine) -> None:
    """All frames are shown in order: frame n has brightness n. The page reports the time from a key
    press to its effect.
    """
    mse_page.run(NOTE)
    start_now(mse_page)
    walk_and_rest(mse_page, engine, 6)
    seen = mse_page.run("window.seen")
    assert len(seen) == num_frames(engine)
    drawn = [(frame, level) for frame, level in enumerate(seen) if level is not None]
    assert len(drawn) > len(seen) / 2
    assert all(abs(level - frame % 256) <= 3 for frame, level in drawn), drawn
    state = "[app.decoder.numFailures, app.stats.inputToPhotonMs.quantile(0.5)]"
    failures, photon_ms = mse_page.run(f"{PARTS}.then(({{ app }}) => {state})")
    assert failures == 0
    assert 0 < photon_ms < 2000


def test_a_lost_frame_and_a_lost_connection_end_at_a_key_frame(
    mse_page: Page, slow_server: PageServer, engine: FakeEngine
) -> None:
    start_now(mse_page)
    walk_and_rest(mse_page, engine, 2)
    mse_page.run(f"""{PARTS}.then(({{ app }}) => {{ const decode = app.decoder.decode.bind(app.decoder);
        app.decoder.decode = (unit) => {{ app.decoder.decode = decode;
            return decode({{ ...unit, first_frame: unit.first_frame + 1000 }}); }}; }})""")  # noqa: E501
    walk_and_rest(mse_page, engine, 3)
    assert abs(grey(mse_page) - (num_frames(engine) - 1) % 256) <= 3
    assert slow_server.cut_connections() == 1
    mse_page.wait_for("document.querySelector('#notices').textContent.includes('resumed')")
    walk_and_rest(mse_page, engine, 2)
    assert abs(grey(mse_page) - (num_frames(engine) - 1) % 256) <= 3
    assert mse_page.run(f"{PARTS}.then(({{ app }}) => app.decoder.numFailures)") == 0


def test_a_spectator_sees_what_the_player_decodes_by_mse(
    mse_page: Page, slow_server: PageServer, engine: FakeEngine
) -> None:
    start_now(mse_page)
    session = mse_page.run(f"{PARTS}.then(({{ app }}) => app.world.sessionId)")
    ask = f"fetch('/v1/sessions/{session}/spectators', {{method: 'POST'}}).then((r) => r.json())"
    token = mse_page.run(ask)["token"]
    with connect(f"ws://127.0.0.1:{slow_server.port}/omni/watch") as spectator:
        spectator.send(json.dumps({"type": "watch", "token": token}))
        assert msgspec.msgpack.decode(spectator.recv(timeout=10))["type"] == "watch.start"
        walk_and_rest(mse_page, engine, 3)
        frame = msgspec.msgpack.decode(spectator.recv(timeout=10))
    assert (frame["type"], frame["is_key_frame"]) == ("frame", True)
    assert abs(grey(mse_page) - (num_frames(engine) - 1) % 256) <= 3


@pytest.mark.parametrize("gone", ["MediaSource", "requestVideoFrameCallback"])
def test_jpeg_comes_last(browser: Browser, slow_server: PageServer, gone: str) -> None:
    """The page requests JPEG only if it can use neither of its two H.264 decoders, WebCodecs and
    Media Source Extensions.
    """
    with browser.page() as page:
        owner = "HTMLVideoElement.prototype" if gone.startswith("request") else "globalThis"
        page.send("Page.addScriptToEvaluateOnNewDocument", source=f"delete {owner}.{gone}")
        page.open(slow_server.url.replace("127.0.0.1", "world.test"))
        page.wait_for("document.body.dataset.link === 'up'")
        start_now(page)
        page.wait_for(f"{CODEC} === 'JPEG'")
