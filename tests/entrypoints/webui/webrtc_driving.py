# SPDX-License-Identifier: Apache-2.0
"""Drives the WebRTC page through a relay that simulates network faults, and measures how evenly the
page shows frames.
"""

import time
from typing import Any

from browser import Page, PageError
from helpers.relay import UdpRelay
from helpers.waits import exactly

KEEP_CONNECTIONS = """(() => { const Real = RTCPeerConnection; window.connections = [];
    window.RTCPeerConnection = class extends Real { constructor(...all) { super(...all); connections.push(this); } };
})()"""  # noqa: E501
WATCH = """(() => { const view = document.querySelector("#view"), gaps = window.gaps = []; let last = null;
    const shown = (now) => { if (last !== null) gaps.push(now - last); last = now;
        view.requestVideoFrameCallback(shown); };
    view.requestVideoFrameCallback(shown); })()"""  # noqa: E501
STATS = """connections[0].getStats().then((all) => { const one = [...all.values()].find(
        ({ type, kind }) => type === "inbound-rtp" && kind === "video");
    return Object.fromEntries(["framesDecoded", "framesDropped", "freezeCount", "packetsReceived", "packetsLost",
        "nackCount", "pliCount", "keyFramesDecoded", "bytesReceived", "jitterBufferDelay", "totalDecodeTime",
        "retransmittedPacketsReceived", "jitterBufferEmittedCount"].map((name) => [name, one?.[name] ?? 0])); })"""  # noqa: E501


def play(page: Page, url: str, relay: UdpRelay) -> None:
    """Open the WebRTC page with the relay between the page and the server, and start a session."""
    for script in (relay.page_script, KEEP_CONNECTIONS):
        page.send("Page.addScriptToEvaluateOnNewDocument", source=script)
    page.open(url + "webrtc.html")
    page.wait_for("document.body.dataset.link === 'up'")
    page.click("#begin")
    page.wait_for("document.querySelector('#view').videoWidth > 0", timeout_s=30)


def freezes(page: Page, seconds: float) -> dict[str, Any]:
    """Watch the page for `seconds` and return the gaps between displayed frames."""
    page.run(WATCH)
    before = page.run(STATS)
    still_plays = "document.querySelector('#status').textContent === 'Playing'"
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        exactly(min(5.0, max(0.0, end_s - time.monotonic())))
        if not page.run(still_plays):
            raise PageError(f"the connection has ended: {page.text('#status')}")
    after = page.run(STATS)
    gaps_ms = page.run("gaps.concat([0])")[:-1]
    change = {name: value - before[name] for name, value in after.items()}
    return {"gaps_ms": gaps_ms, "stats": change}
