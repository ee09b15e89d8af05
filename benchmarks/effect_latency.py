# SPDX-License-Identifier: Apache-2.0
"""Measure the time from a key press to the first displayed frame that depends on it.

The benchmark uses headless Chromium.

    python benchmarks/effect_latency.py                  # the shipped village, three starts
    python benchmarks/effect_latency.py --format jpeg    # the same with JPEG frames

The server and the browser share the machine, as on a laptop. Each start uses a new server and a new
browser. After `--settle` seconds of walking, every key change within `--seconds` is one sample. The
following parts of a sample, in milliseconds, add up to `effect_ms`:

    wait_ms        until the page requested the chunk that the key changes
    queue_ms       transit to the engine and time in its queue
    generation_ms  until the engine had generated the frames of the chunk
    encode_ms      until the first frame of the chunk was encoded
    transfer_ms    until the first frame arrived: network, and delays of the page
    decode_ms      until the first frame was decoded (H.264 only)
    display_ms     time of the first frame in the playback buffer, until it was drawn

`stalls` is the number of times that playback waited for a chunk within `--seconds`, summed over all
starts. Stalls are reported because a smaller playback buffer is of no use if playback stalls.
"""

import argparse
import itertools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
# The helpers that drive the browser are in this directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "entrypoints" / "webui"))
from browser import CHROMIUM, WHY_NOT, Page
from common import add_output_arguments, quantiles, save
from village_in_browser import PARTS, WALK, served_page, walk

PART_NAMES = ("wait", "queue", "generation", "encode", "transfer", "decode", "display")

LISTEN = f"""{PARTS}.then(({{ app }}) => {{
    const seen = window.seen = [], requests = new Map(), decoded = new Map();
    const decode = app.decoder.decode.bind(app.decoder);
    app.decoder.decode = (unit) => {{ const picture = decode(unit);
        picture.then(() => decoded.set(unit.first_frame, performance.now())); return picture; }};
    app.world.addEventListener("frames", ({{ detail: {{ message, request }} }}) => {{
        if (!requests.has(request.sentAt)) requests.set(request.sentAt, message); }});
    app.stats.photon = (inputAt, sentAt, cameAt, shownAt) => {{
        const {{ timing, first_frame }} = requests.get(sentAt) ?? {{}};
        if (!timing) return;
        const generation = (timing.encode_ms ?? 0) + (timing.denoise_ms ?? 0) + (timing.decode_ms ?? 0);
        const decodedAt = decoded.get(first_frame) ?? cameAt;
        seen.push({{ effect: shownAt - inputAt, wait: sentAt - inputAt, queue: timing.queue_ms, generation,
            encode: timing.mux_ms, transfer: cameAt - sentAt - timing.total_ms, decode: decodedAt - cameAt,
            display: shownAt - decodedAt }}); }}; }})"""  # noqa: E501


STALLS = f"{PARTS}.then(({{ app }}) => app.player.numStalls)"


def measure(page: Page, frame_format: str, settle_s: float, seconds: float) -> dict[str, Any]:
    """Start the first world that the page offers, walk, and return the samples."""
    page.wait_for("document.body.dataset.link === 'up'", 30)
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.link.isUp)")
    if frame_format == "jpeg":
        page.run(f"{PARTS}.then(({{ app }}) => (app.world.format = 'jpeg'))")
    page.click("#start .main")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')", 120)
    keys = itertools.cycle(WALK)
    walk(page, settle_s, keys)
    page.run(LISTEN)
    stalls = page.run(STALLS)
    walk(page, seconds, keys)
    return {
        "stalls": page.run(STALLS) - stalls,
        "format": page.run(f"{PARTS}.then(({{ app }}) => app.world.format)"),
        "samples": page.run("window.seen"),
    }


def percentile_95(values_ms: list[float]) -> float:
    ordered = sorted(values_ms)
    return round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1)


def run(args: argparse.Namespace) -> dict[str, Any]:
    from vllm_omni.worlds import village_checkpoint

    model = args.model or Path(village_checkpoint())
    starts = []
    for _ in range(args.starts):
        with served_page(model, args.size, {}) as page:
            starts.append(measure(page, args.format, args.settle, args.seconds))
    samples = [sample for start in starts for sample in start["samples"]]
    if not samples:
        raise SystemExit("no key had an effect: is the page's world steered by keys?")
    return {
        "model": model.name,
        "size": args.size,
        "format": starts[0]["format"],
        "load_average": os.getloadavg()[0],
        "starts": len(starts),
        "changes_of_keys": len(samples),
        "stalls": sum(start["stalls"] for start in starts),
        "seconds": args.starts * args.seconds,
        "effect_ms": quantiles([sample["effect"] for sample in samples]),
        "effect_p95_ms": percentile_95([sample["effect"] for sample in samples]),
        "effect_ms_of_each_start": [
            quantiles([sample["effect"] for sample in start["samples"]]) for start in starts
        ],
        **{f"{part}_ms": quantiles([sample[part] for sample in samples]) for part in PART_NAMES},
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="checkpoint directory (default: the shipped village)"
    )
    parser.add_argument("--size", default="160x96", help="WIDTHxHEIGHT (default: %(default)s)")
    parser.add_argument(
        "--format",
        choices=("auto", "jpeg"),
        default="auto",
        help="auto: H.264 if the browser decodes it (default: %(default)s)",
    )
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument(
        "--settle", type=float, default=15.0, help="seconds before the numbers count"
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if CHROMIUM is None:
        raise SystemExit(WHY_NOT)
    save("effect_latency", run(args), args)


if __name__ == "__main__":
    main()
