# SPDX-License-Identifier: Apache-2.0
"""Measure how long WebRTC video freezes in headless Chromium over a bad network.

    python benchmarks/webrtc_loss.py                       # 2 % loss, 50 ms jitter, 4 Mbit/s, 5 min
    python benchmarks/webrtc_loss.py --loss 0.05 --minutes 1

The server, the browser and a UDP packet relay (tests/helpers/relay.py) run on this machine. A fake
engine generates noise frames, so the encoder always fills the bandwidth. The loss applies to both
directions. A freeze is a gap of more than `--freeze-ms` between two consecutive frames on the page.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
# The helpers that drive the browser are in this directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "entrypoints" / "webui"))
from browser import CHROMIUM, WHY_NOT, running_browser
from common import add_output_arguments, quantiles, save
from helpers.fake_engine import FakeEngine
from helpers.relay import Network, UdpRelay, running
from helpers.walking import SPACE
from page_server import PageServer
from webrtc_driving import freezes, play

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo


def run(args: argparse.Namespace) -> dict[str, Any]:
    down = Network(args.loss, args.delay_ms, args.jitter_ms, args.mbit_per_s * 1e6)
    up = Network(args.loss, args.delay_ms, args.jitter_ms)
    engine = FakeEngine()
    engine.noise = True
    info = StreamInfo(
        actions=SPACE, width=args.width, height=args.height, model="noise", fps=args.fps
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        PageServer(engine, EndpointLimits(), info, [], {}) as server,
        running(UdpRelay(down, up)) as relay,
        running_browser(Path(folder)) as browser,
        browser.page() as page,
    ):
        play(page, server.url, relay)
        time.sleep(args.settle)
        seen = freezes(page, args.minutes * 60)
        session = next(iter(server.manager.sessions()), None)
        bits_per_s = None if session is None else session.encoders._bitrate.bits_per_s
        if args.screenshot:
            page.screenshot(args.screenshot)
    gaps_ms = seen["gaps_ms"]
    return {
        "loss": args.loss,
        "delay_ms": args.delay_ms,
        "jitter_ms": args.jitter_ms,
        "mbit_per_s": args.mbit_per_s,
        "minutes": args.minutes,
        "fps": args.fps,
        "size": f"{args.width}x{args.height}",
        "load_average": os.getloadavg()[0],
        "frames_shown": len(gaps_ms) + 1,
        "gap_ms": quantiles(gaps_ms),
        "freezes": sum(gap_ms > args.freeze_ms for gap_ms in gaps_ms),
        "gaps_over_250_ms": sum(gap_ms > 250 for gap_ms in gaps_ms),
        "dropped_packets": relay.down.num_dropped,
        "packets": relay.down.num_packets,
        "bits_per_s_at_the_end": bits_per_s,
        "browser": seen["stats"],
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", type=float, default=0.02, help="share of packets")
    parser.add_argument("--delay-ms", type=float, default=10.0)
    parser.add_argument("--jitter-ms", type=float, default=50.0)
    parser.add_argument("--mbit-per-s", type=float, default=4.0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--settle", type=float, default=10.0, help="seconds before it counts")
    parser.add_argument("--freeze-ms", type=float, default=500.0)
    parser.add_argument("--fps", type=float, default=24.0)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--screenshot", type=Path, help="write the page at the end as a .png")
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if CHROMIUM is None:
        raise SystemExit(WHY_NOT)
    save("webrtc_loss", run(args), args)


if __name__ == "__main__":
    main()
