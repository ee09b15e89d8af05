# SPDX-License-Identifier: Apache-2.0
"""Tests of the page served by `vllm serve MODEL --omni --api-key`, with a real engine, the packaged
world and headless Chromium.

`OMNI_SCREENSHOT=docs/how_to/web_page.png pytest THIS_FILE` writes the screenshot for the guide.
"""

import base64
import io
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, Page
from helpers.ports import port_for_a_server
from helpers.quick_programs import start_server
from helpers.waits import pause, seconds, wait_until
from page_driving import enter_key
from PIL import Image

from vllm_omni.entrypoints.cli import demo
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.worlds.description import read_description

KEY = "key-of-this-test"
HAS_IMAGE = "document.querySelector('#view').classList.contains('has-picture')"
PARTS = "import('/omni/js/main.js').then((m) => m.parts)"


@pytest.fixture(scope="module")
def served(village: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[demo.ServerProcess]:
    port, log = port_for_a_server(), tmp_path_factory.mktemp("served") / "server.log"
    arguments = demo.serve_command(village, port, 96, 160)[1:]
    environ = {**os.environ, "VLLM_API_KEY": KEY, "VLLM_LOGGING_LEVEL": "INFO"}
    process = demo.ServerProcess(start_server(arguments, log, environ), port, log)
    try:
        demo.wait_until_healthy(process, 300)
        yield process
    finally:
        process.popen.terminate()
        process.popen.wait()


@pytest.fixture
def page(browser: Browser, served: demo.ServerProcess) -> Iterator[Page]:
    """Yield the page after the API key has been entered."""
    with browser.page(f"http://127.0.0.1:{served.port}/omni/") as page:
        enter_key(page, KEY)
        page.wait_for("document.body.dataset.link === 'up'")
        yield page
        assert all("401" in error for error in page.errors), page.errors


def start(page: Page) -> None:
    page.run("document.querySelector('#start').elements.seed.value = 5")
    page.click("#start .main")
    page.wait_for(HAS_IMAGE, 60)


def pixels(data_url: str) -> np.ndarray:
    data = base64.b64decode(data_url.partition(",")[2])
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


COLUMNS = f"""{PARTS}.then(({{ app }}) => {{
    window.seen = []; const shown = app.player.onframe;
    app.player.onframe = (frame) => {{ shown(frame);
        const canvas = document.querySelector("#view"), {{ width, height }} = canvas;
        const data = canvas.getContext("2d").getImageData(0, 0, width, height).data, columns = [];
        for (let x = 0; x < width; x++) {{
            for (let band = 0; band < 4; band++) {{
                let sum = 0;
                const rows = height / 4;
                for (let y = band * rows; y < (band + 1) * rows; y++) sum += data[4 * (y * width + x) + 1];
                columns.push(sum / rows);
            }}
        }}
        window.seen.push(columns);
    }}; }})"""  # noqa: E501
"""JavaScript that stores the green channel of four bands of every displayed frame, column by
column.
"""


def shift_px(before: np.ndarray, after: np.ndarray) -> int:
    """Return the number of columns by which an image has moved to the right (negative: to the
    left), determined from the best match of the overlapping columns. Shape of both images: [W, 4].
    """
    width = len(before)
    candidates = range(-40, 41)
    differences = [
        np.abs(
            after[max(0, by) : width + min(0, by)] - before[max(0, -by) : width - max(0, by)]
        ).mean()
        for by in candidates
    ]
    return candidates[int(np.argmin(differences))]


def season(page: Page, village: Path) -> str:
    """Return the name of the prompt with the start images that are closest to the displayed image
    in mean colour.
    """
    shown = pixels(page.run("document.querySelector('#view').toDataURL('image/png')")).mean((0, 1))
    description = read_description(village)
    assert description is not None
    means = {}
    for prompt in description.prompts:
        files = [start.file for start in description.starts if start.prompt == prompt.name]
        means[prompt.name] = np.mean(
            [np.asarray(Image.open(village / file)).mean((0, 1)) for file in files], axis=0
        )
    return min(means, key=lambda name: float(np.linalg.norm(means[name] - shown)))


@pytest.mark.nightly
def test_keys_turn_the_view_and_prompts_choose_the_season(page: Page, village: Path) -> None:
    """Pressing `l` turns the camera to the right, so the image moves left, and `j` does the
    opposite. The snow prompt's button changes the season.
    """
    page.run("document.querySelector('#start').elements.seed.value = 5")
    page.run(COLUMNS)
    page.click("#start .main")
    page.wait_for(HAS_IMAGE, 60)
    count = f"{PARTS}.then(({{ app }}) => app.world.lastChunk)"
    for key, sign in (("l", -1), ("j", 1)):
        page.key("keyDown", key)
        reached = page.run(count)
        page.wait_for(f"{count}.then((n) => n >= {reached + 2})", 90)  # one may have been in flight
        page.wait_for(f"{PARTS}.then(({{ app }}) => app.player.numBuffered <= 8)", 60)
        page.run("window.seen = []")
        page.wait_for("window.seen.length >= 9", 90)
        page.key("keyUp", key)
        seen = np.asarray(page.run("window.seen.slice(0, 9)")).reshape(9, -1, 4)
        moved = [shift_px(seen[frame], seen[frame + 4]) for frame in range(5)]
        # 12 px correspond to 6 degrees in a view that is 75 degrees wide.
        assert 6 <= sign * float(np.median(moved)) <= 20, (key, moved)
    assert season(page, village) == "day"
    page.click("#prompts button:nth-child(3)")
    page.wait_for(
        "document.querySelector('#prompts [aria-pressed=true]')?.textContent === 'Snow'", 60
    )
    rested = "then(({ app }) => app.isResting && app.player.numBuffered === 0)"
    # Wait until the prompt has taken effect and earlier frames are no longer displayed.
    page.wait_for(f"{PARTS}.{rested}", 120)
    assert season(page, village) == "snow"


@pytest.mark.nightly
def test_a_walk_with_everything(page: Page, browser: Browser) -> None:
    """During a walk, the image changes, a recording contains the walk's frames, a mark restores its
    session, and the session resumes after an aborted connection.
    """
    start(page)
    page.key("keyDown", "w")
    before = browser.videos()
    page.press("v")
    # The recording excludes chunks that were in flight when it started.
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.recorder.numFrames >= 24)", 60)
    page.press("v")
    page.press("b")
    page.wait_for("document.querySelectorAll('#marks li').length === 1", 30)
    page.key("keyUp", "w")
    page.wait_for("document.querySelector('#record').getAttribute('aria-pressed') === 'false'", 30)
    [file] = wait_until(lambda: browser.videos() - before, 15)
    frames_THWC, fps = decode_mp4(file.read_bytes())
    assert fps == 16
    assert len(frames_THWC) >= 24
    assert len(frames_THWC) % 4 == 0  # whole latent frames
    assert np.abs(np.diff(frames_THWC.astype(int), axis=0)).mean((1, 2, 3)).min() > 0.1

    page.key("keyDown", "l")
    page.run(f"{PARTS}.then(({{ link }}) => link.reconnect())")
    page.wait_for("document.body.dataset.link === 'up'", 30)
    chunks = f"{PARTS}.then(({{ app }}) => app.world.lastChunk)"
    reached = page.run(chunks)
    page.wait_for(f"{chunks}.then((n) => n >= {reached + 2})", 60)
    page.key("keyUp", "l")
    page.click("#marks button[data-act=back]")
    page.wait_for(
        f"{PARTS}.then(({{ app }}) => app.world.lastChunk < {reached + 2} && !app.world.isHeld)", 30
    )
    reached = page.run(chunks)
    page.wait_for(f"{chunks}.then((n) => n >= {reached + 1})", 60)


def test_the_key_guards_every_route_but_the_page_and_probes(served: demo.ServerProcess) -> None:
    """The API key is also required for stock vLLM's routes outside `/v1`, but not for the page and
    the probes.
    """

    def status(path: str, key: str | None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"http://127.0.0.1:{served.port}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds(10)) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code

    for path in (
        "/v1/models",
        "/openapi.json",
        "/pooling",
        "/tokenize",
        "/invocations",
        "/nothing",
    ):
        assert status(path, None) == 401, path
        assert status(path, KEY) != 401, path
    for path in (
        "/omni/",
        "/omni/js/main.js",
        "/omni/world/map.png",
        "/omni/ready",
        "/health",
        "/metrics",
        "/version",
    ):
        assert status(path, None) == 200, path
    routes = json.loads(
        urllib.request.urlopen(
            urllib.request.Request(
                f"http://127.0.0.1:{served.port}/openapi.json",
                headers={"Authorization": f"Bearer {KEY}"},
            ),
            timeout=seconds(10),
        ).read()
    )["paths"]
    open_routes = {
        path for path in routes if "{" not in path and status(path, None) not in (401, 404, 405)
    }
    assert open_routes <= {"/health", "/omni/ready", "/ping", "/version", "/load", "/metrics"}


def test_the_log_names_the_page_and_holds_no_key(served: demo.ServerProcess) -> None:
    """One log line contains the address of the page, and the log contains neither keys nor
    tickets.
    """
    log = served.log.read_text()
    address = f"http://127.0.0.1:{served.port}/omni/"
    assert f"vllm-omni: web page after the start: {address}" in log
    assert log.count(f"] web page: {address}") == 1
    assert KEY not in log
    assert not re.search(r"ticket[=.][A-Za-z0-9_-]{20}", log)


@pytest.mark.nightly
def test_screenshot_for_the_guide(page: Page, tmp_path: Path) -> None:
    """Every run can take the guide's screenshot, and the screenshot is smaller than 300 kB."""
    target = Path(os.environ.get("OMNI_SCREENSHOT", tmp_path / "web_page.png"))
    page.send(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}]
    )
    page.desktop(1280, 800)
    pause(0.5)  # wait until colour transitions have finished
    page.screenshot(tmp_path / "start.png")
    # Choose the start image that looks down the street towards the well.
    page.run("document.querySelectorAll('[name=sample]')[1].click()")
    start(page)
    chunk = f"{PARTS}.then(({{ app }}) => app.world.lastChunk)"
    reached = page.run(chunk)
    page.key("keyDown", "w")
    page.wait_for(f"{chunk}.then((n) => n >= {reached + 3})", 90)
    page.key("keyUp", "w")
    page.press("b")
    page.wait_for("document.querySelectorAll('#marks li').length === 1", 30)
    page.wait_for("document.querySelector('#notices').hidden", 30)
    page.key("keyDown", "a")
    pause(1.5)
    page.screenshot(tmp_path / "walk.png")
    page.key("keyUp", "a")
    images = [Image.open(tmp_path / f"{name}.png").convert("RGB") for name in ("start", "walk")]
    sheet = Image.new("RGB", (1280, 400), (12, 14, 20))
    for index, image in enumerate(images):
        sheet.paste(image.resize((640, 400), Image.Resampling.LANCZOS), (640 * index, 0))
    sheet.quantize(160, dither=Image.Dither.NONE).save(target, optimize=True)
    assert 20_000 < target.stat().st_size < 300_000
