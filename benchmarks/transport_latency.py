# SPDX-License-Identifier: Apache-2.0
"""Measure the latency of WebSocket and WebRTC video, from encoded frame to display in Chromium.

The server and the headless browser run on one machine.

    python benchmarks/transport_latency.py

A fake engine generates noise frames, so the encoded frames are as large as those of a detailed
scene. The clocks of the server and the page are compared through the browser's driver. The
following times are measured for each frame:

    websocket   from the end of the frame's encoding to the first display refresh after its
                decoding; excludes the time that the frame would then spend in the playback buffer
    webrtc      from the first packet of the frame (frames are sent when they are due to play) to
                the time at which the browser expects to display it, including the browser's own
                jitter buffer
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
# The helpers that drive the browser are in this directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "entrypoints" / "webui"))
import aiortc.rtcrtpsender
from browser import CHROMIUM, WHY_NOT, Page, running_browser
from common import add_output_arguments, quantiles, save
from helpers.fake_engine import FakeEngine
from helpers.walking import SPACE
from page_server import PageServer

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.entrypoints.realtime.encoding.h264 import H264Encoder

LISTEN_WEBSOCKET = """import('/omni/js/main.js').then(({ parts: { app } }) => {
    const seen = window.seen = [], decode = app.decoder.decode.bind(app.decoder);
    app.decoder.decode = (unit) => { const picture = decode(unit); const cameAt = performance.now();
        picture.then(() => { const decodedAt = performance.now();
            requestAnimationFrame(() => seen.push([unit.first_frame, cameAt, decodedAt, performance.now()])); });
        return picture; }; })"""  # noqa: E501
LISTEN_WEBRTC = """(() => { const view = document.querySelector("#view"), seen = window.seen = [];
    const shown = (now, { rtpTimestamp, receiveTime, expectedDisplayTime }) => {
        seen.push([rtpTimestamp, receiveTime ?? now, now, expectedDisplayTime]);
        view.requestVideoFrameCallback(shown); };
    view.requestVideoFrameCallback(shown); })()"""


def clock_offset_s(page: Page) -> float:
    """Return this process's monotonic time at the moment when the page's clock was 0."""
    offsets = []
    for _ in range(40):
        before_s = time.monotonic()
        page_ms = page.run("performance.now()")
        after_s = time.monotonic()
        offsets.append((after_s - before_s, (before_s + after_s) / 2 - page_ms / 1000))
    return min(offsets)[1]


def log_times(times_s: dict[int, float]) -> Callable[[], None]:
    """Record when each frame is sent, by frame number for WebSockets and by RTP timestamp for
    WebRTC. Return a function that stops the recording.
    """
    encode_frame, Packet = H264Encoder._encode_frame, aiortc.rtcrtpsender.RtpPacket

    def timed(self: H264Encoder, context: Any, frame: Any, stamp: Any) -> Any:
        part = encode_frame(self, context, frame, stamp)
        times_s[stamp.frame] = time.monotonic()
        return part

    class LoggedPacket(Packet):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            times_s.setdefault(self.timestamp, time.monotonic())

    H264Encoder._encode_frame = timed  # type: ignore[method-assign]
    aiortc.rtcrtpsender.RtpPacket = LoggedPacket

    def end() -> None:
        H264Encoder._encode_frame = encode_frame  # type: ignore[method-assign]
        aiortc.rtcrtpsender.RtpPacket = Packet

    return end


def play_websocket(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for("document.body.dataset.link === 'up'")
    page.click("#start .main")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')", 60)
    page.key("keyDown", "w")  # the page requests no chunks without input
    page.run(LISTEN_WEBSOCKET)


def play_webrtc(page: Page, url: str) -> None:
    page.open(url + "webrtc.html")
    page.wait_for("document.body.dataset.link === 'up'")
    page.click("#begin")
    page.wait_for("document.querySelector('#view').videoWidth > 0", timeout_s=30)
    page.run(LISTEN_WEBRTC)


PLAYS = {"websocket": play_websocket, "webrtc": play_webrtc}


def measure(transport: str, args: argparse.Namespace) -> dict[str, Any]:
    engine = FakeEngine()
    engine.noise, engine.delay_s = True, 0.05
    info = StreamInfo(
        actions=SPACE, width=args.width, height=args.height, model="noise", fps=args.fps
    )
    times_s: dict[int, float] = {}
    end = log_times(times_s)
    with (
        tempfile.TemporaryDirectory() as folder,
        PageServer(engine, EndpointLimits(), info, [], {}) as server,
        running_browser(Path(folder)) as browser,
        browser.page() as page,
    ):
        PLAYS[transport](page, server.url)
        time.sleep(args.settle)
        page.run("seen.length = 0")
        offset_s = clock_offset_s(page)
        time.sleep(args.seconds)
        seen = page.run("seen")
    end()
    parts: dict[str, list[float]] = {"arrived": [], "decoded": [], "displayed": []}
    for frame, *page_times_ms in seen:
        if frame in times_s:
            for part, page_ms in zip(parts, page_times_ms, strict=True):
                parts[part].append(1000 * (offset_s - times_s[frame]) + page_ms)
    if not parts["displayed"]:
        raise SystemExit(f"{transport}: no frame was seen on both sides")
    result = {f"{part}_ms": quantiles(values_ms) for part, values_ms in parts.items()}
    return {"frames": len(parts["displayed"]), **result}


def run(args: argparse.Namespace) -> dict[str, Any]:
    starts: dict[str, list[dict[str, Any]]] = {transport: [] for transport in PLAYS}
    for _ in range(args.starts):
        for transport, measured in starts.items():
            measured.append(measure(transport, args))
            print(transport, measured[-1], file=sys.stderr, flush=True)
    return {
        "size": f"{args.width}x{args.height}",
        "fps": args.fps,
        "load_average": os.getloadavg()[0],
        "starts": starts,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fps", type=float, default=24.0)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--settle", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if CHROMIUM is None:
        raise SystemExit(WHY_NOT)
    save("transport_latency", run(args), args)


if __name__ == "__main__":
    main()
