# SPDX-License-Identifier: Apache-2.0
"""Tests of the WebRTC page in headless Chromium, with real sockets and a fake engine."""

import helpers.needs_aiortc  # noqa: F401
import pytest
from browser import Browser
from helpers.fake_engine import FakeEngine
from helpers.relay import Network, UdpRelay, running
from helpers.waits import exactly, wait_until
from page_server import MakeServer
from webrtc_driving import freezes, play

from vllm_omni.actions import as_frame

pytestmark = pytest.mark.nightly

BRIGHTNESS = """(() => { const canvas = new OffscreenCanvas(80, 48), c = canvas.getContext("2d");
    c.drawImage(document.querySelector("#view"), 0, 0); return c.getImageData(40, 24, 1, 1).data[1]; })()"""  # noqa: E501

RATIO = """(() => { const { width, height } =
    document.querySelector("#view").getBoundingClientRect();
    return Math.abs(width / height - 80 / 48) < 0.01; })()"""


@pytest.mark.parametrize("keys", [[], ["secret"]])
def test_the_webrtc_page_shows_and_steers_a_world(
    browser: Browser, make_server: MakeServer, engine: FakeEngine, keys: list[str]
) -> None:
    """The page shows frames from the WebRTC track, and a held key reaches the engine, whether or
    not the server has an API key. The fake engine gives frame n the brightness n.
    """
    server = make_server(info={"fps": 24.0}, keys=keys)
    with browser.page(server.url + "webrtc.html") as page:
        if keys:
            page.wait_for("document.querySelector('#key-dialog').open")
            page.run("document.querySelector('#key-dialog input').value = 'secret'")
            page.run("document.querySelector('#key-dialog button').click()")
        page.wait_for("document.body.dataset.link === 'up'")
        page.click("#begin")
        page.wait_for("document.querySelector('#view').videoWidth === 80", timeout_s=25)
        page.wait_for(RATIO)
        before = page.run(BRIGHTNESS)
        page.wait_for(f"{BRIGHTNESS} > {before} + 8")
        assert list(engine.chunks[0].arrays) == ["image"]

        def buttons() -> list[tuple[str, ...]]:
            entries = [entry for call in engine.chunks for entry in call.params.actions or []]
            return [tuple(as_frame(entry).buttons) for entry in entries]

        page.key("keyDown", "w")
        wait_until(lambda: buttons()[-3:] == [("w",)] * 3)
        page.key("keyUp", "w")
        wait_until(lambda: buttons()[-3:] == [()] * 3)
        if keys:
            page.errors.clear()  # the first ticket request is refused as expected
        assert page.errors == []
    wait_until(lambda: len(server.manager) == 0)


def test_lost_packets_do_not_stop_the_picture(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """With 2 % packet loss in both directions, up to 50 ms of jitter and 4 Mbit/s of bandwidth, no
    frame is displayed for longer than 500 ms. Lost packets are retransmitted. The bitrate stays
    below the bandwidth limit, although the frames are noise, which would need more.
    benchmarks/webrtc_loss.py runs a longer version of this test.
    """
    engine.noise = True
    server = make_server(info={"fps": 24.0, "width": 160, "height": 96})
    down, up = Network(0.02, 10, 50, 4e6), Network(0.02, 10, 50)
    with running(UdpRelay(down, up)) as relay:
        with browser.page() as page:
            play(page, server.url, relay)
            exactly(5)  # wait until the bitrate has adapted to the bandwidth
            seen = freezes(page, 10)
            assert page.errors == []
        # If the message that ends the connection is lost, the server needs half a minute to detect
        # that the client has gone.
        wait_until(lambda: server.manager.guard.num_connections == 0, 60)
    assert relay.down.num_dropped > 0
    assert seen["stats"]["retransmittedPacketsReceived"] > 0
    assert len(seen["gaps_ms"]) > 50
    assert max(seen["gaps_ms"]) < 500
