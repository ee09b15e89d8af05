# SPDX-License-Identifier: Apache-2.0
"""Measure what a player of the shipped demo world, or of another world, sees in a browser.

The benchmark uses `vllm serve --omni`, headless Chromium and held keys.

    python benchmarks/village_in_browser.py                      # as shipped
    python benchmarks/village_in_browser.py --chunk 3 --decoder wan
    # any world; the result is named after its directory
    vllm-omni make-tiny matrix_game tiny_matrix_game
    python benchmarks/village_in_browser.py --model tiny_matrix_game --size 96x64

The server and the browser share the machine, as on a laptop. During the first `--settle` seconds of
walking, the window fills, the conditioning settles and the playback buffer adapts. The benchmark
then reads the values that the page itself shows, for `--seconds`:

    shown_fps
        frames drawn per second, which cannot exceed the world's own rate
    chunk_ms
        time from the request for a chunk to its arrival
    server_fps
        frames per chunk divided by the median of `chunk_ms`, which is the server's upper bound
    stages_ms
        stage times of the last chunk, as the server reports them
    input_to_photon_ms
        time from a key change to the display of the first frame that depends on it; keys change
        every 1.3 s
    stalls
        number of times that playback waited for a chunk
"""

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
# The helpers that drive the browser are in this directory.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "entrypoints" / "webui"))
from browser import CHROMIUM, WHY_NOT, Page, running_browser
from common import add_output_arguments, quantiles, save

PARTS = "import('/omni/js/main.js').then((m) => m.parts)"
WALK = ("w", "l", "w", "j", "a", "l", "d", "j")
"""Keys that are held one after another.

The hold time of each key is not a multiple of a chunk's duration, so key changes occur anywhere
within a chunk.
"""
KEY_S = 1.3

LISTEN = f"""{PARTS}.then(({{ app }}) => {{
    const seen = window.seen = {{ chunk_ms: [], photon_ms: [], frames: [] }};
    const {{ stats }} = app, {{ inputToPhotonMs }} = stats;
    const add = inputToPhotonMs.add.bind(inputToPhotonMs), chunk = stats.chunk.bind(stats);
    inputToPhotonMs.add = (ms) => {{ seen.photon_ms.push(ms); add(ms); }};
    stats.chunk = (ms, bytes, timing) => {{ seen.chunk_ms.push(ms); chunk(ms, bytes, timing); }};
    app.world.addEventListener("chunk", ({{ detail }}) => seen.frames.push(detail.message.chunk_frames)); }})"""  # noqa: E501
READ = f"""{PARTS}.then(({{ app }}) => ({{ ...window.seen, shown: app.player.numShown, stalls: app.player.numStalls,
    at: performance.now(), fps: app.player.fps, stages: app.stats.server }}))"""  # noqa: E501


def walk(page: Page, seconds: float, keys: "itertools.cycle[str]") -> None:
    """Hold the keys one after another, for `seconds` in total."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        key = next(keys)
        page.key("keyDown", key)
        time.sleep(KEY_S)
        page.key("keyUp", key)


def measure(page: Page, settle_s: float, seconds: float) -> dict[str, Any]:
    """Start the first world that the page offers, walk, and return the measurements."""
    page.wait_for("document.body.dataset.link === 'up'", 30)
    started = time.monotonic()
    page.click("#start .main")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')", 120)
    first_image_s = time.monotonic() - started
    keys = itertools.cycle(WALK)
    walk(page, settle_s, keys)
    page.run(LISTEN)
    before = page.run(READ)
    walk(page, seconds, keys)
    after = page.run(READ)
    spent_s = (after["at"] - before["at"]) / 1000
    chunk_ms, photon_ms = after["chunk_ms"], after["photon_ms"]
    return {
        "seconds": round(spent_s, 1),
        "frames_per_chunk": after["frames"][-1],
        "nominal_fps": after["fps"],
        "shown_fps": round((after["shown"] - before["shown"]) / spent_s, 2),
        "server_fps": round(1000 * after["frames"][-1] / statistics.median(chunk_ms), 1),
        "chunk_ms": quantiles(chunk_ms),
        "input_to_photon_ms": quantiles(photon_ms),
        "changes_of_keys": len(photon_ms),
        "stalls": after["stalls"] - before["stalls"],
        "first_picture_s": round(first_image_s, 2),
        "last_stages_ms": after["stages"],
    }


@contextlib.contextmanager
def served_page(model: Path, size: str, options: dict[str, Any]) -> Iterator[Page]:
    """Start a server and a browser, and open the server's page.

    Args:
        model: Checkpoint directory.
        size: Frame size as WIDTHxHEIGHT.
        options: Options under `omni.model`.
    """
    from vllm_omni.entrypoints.cli import demo

    width, _, height = size.partition("x")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = demo.free_port(0)
        with demo.server(
            model, port, int(height), int(width), folder / "server.log", options
        ) as process:
            demo.wait_until_healthy(process, 300)
            with (
                running_browser(folder) as browser,
                browser.page(f"http://127.0.0.1:{port}/omni/") as page,
            ):
                yield page


def run(args: argparse.Namespace) -> dict[str, Any]:
    from vllm_omni.worlds import village_checkpoint

    model_options = {"latent_frames_per_chunk": args.chunk, "decoder": args.decoder}
    chosen = {name: value for name, value in model_options.items() if value is not None}
    model = args.model or Path(village_checkpoint())
    with served_page(model, args.size, chosen) as page:
        result = measure(page, args.settle, args.seconds)
        if args.screenshot:
            page.screenshot(args.screenshot)
    return {
        "model": model.name,
        "size": args.size,
        "model_options": chosen,
        "load_average": os.getloadavg()[0],
        **result,
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
        "--chunk",
        type=int,
        choices=(1, 3),
        help="latent frames a chunk (default: the checkpoint's)",
    )
    parser.add_argument("--decoder", choices=("wan", "tiny"), help="default: the checkpoint's")
    parser.add_argument(
        "--settle", type=float, default=15.0, help="seconds before the numbers count"
    )
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--screenshot", type=Path, help="write the page at the end as a .png")
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if CHROMIUM is None:
        raise SystemExit(WHY_NOT)
    save(f"{'village' if args.model is None else args.model.name}_in_browser", run(args), args)


if __name__ == "__main__":
    main()
