# SPDX-License-Identifier: Apache-2.0
"""SGLang 0.5.23's own page works unmodified with `vllm serve --omni`. The page is taken from
SGLang's wheel and opened in Chromium. The engine is real.

SGLang's README says to open the page as a file. The alternative is a static server on another port.
In both cases, the page's origin differs from the server's, so `--allowed-origins` must list the
page's origin.
"""

import contextlib
import functools
import http.server
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Page
from helpers.ports import port_for_a_server
from helpers.waits import pause, seconds
from page_server import MakeServer

from vllm_omni.entrypoints.cli import demo

pytestmark = [pytest.mark.nightly, pytest.mark.engine]

WHEEL = "sglang==0.5.23"
PAGE = "sglang/multimodal_gen/apps/realtime_webui"


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        WHEEL,
    ]
    subprocess.run([*command, "--dest", str(folder)], check=True, timeout=seconds(300))
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(PAGE)])
    return folder / PAGE


@pytest.fixture(scope="module")
def elsewhere(page_folder: Path) -> Iterator[str]:
    """Serve the page on another port."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=page_folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def served(
    village: Path, elsewhere: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[demo.ServerProcess]:

    log = tmp_path_factory.mktemp("served") / "server.log"
    origins = ["--allowed-origins", json.dumps(["null", elsewhere])]
    with demo.server(village, port_for_a_server(), 96, 160, log, extra=origins) as process:
        demo.wait_until_healthy(process, 300)
        yield process


def fill(page: Page, port: int, image: Path) -> None:
    """Enter the server address, the size and a reference image as a user would."""
    page.wait_for("document.querySelector('#presetList button') !== null")
    for name, value in {
        "serverUrl": f"ws://127.0.0.1:{port}/v1/realtime_video/generate",
        "size": "160x96",
    }.items():
        page.run(f"document.querySelector('#{name}').value = {json.dumps(value)}")
    root = page.send("DOM.getDocument")["root"]["nodeId"]
    node = page.send("DOM.querySelector", nodeId=root, selector="#firstFrame")["nodeId"]
    page.send("DOM.setFileInputFiles", nodeId=node, files=[str(image)])
    page.run(
        "document.querySelector('#firstFrame').dispatchEvent(new Event('change', { bubbles: "
        "true }))"
    )


def seen(page: Page) -> str:
    return str(page.run("document.querySelector('#viewport').toDataURL()"))


@contextlib.contextmanager
def opened(browser: Browser, url: str, port: int, image: Path) -> Iterator[Page]:
    with browser.page(url) as page:
        fill(page, port, image)
        yield page
        page.run("document.querySelector('#stopBtn').click()")


@pytest.mark.parametrize("way", ["file", "another port"])
def test_the_page_plays_and_steers(
    way: str,
    browser: Browser,
    served: demo.ServerProcess,
    page_folder: Path,
    elsewhere: str,
    village: Path,
) -> None:
    url = (
        page_folder.joinpath("index.html").as_uri() if way == "file" else f"{elsewhere}/index.html"
    )
    server = f"?server=ws://127.0.0.1:{served.port}/v1/realtime_video/generate"
    with opened(browser, url + server, served.port, village / "start" / "street_day.png") as page:
        page.click("#connectBtn")
        page.wait_for(
            "Number(document.querySelector('#frameText').textContent.split(' ')[1]) >= 12", 90
        )
        before = seen(page)
        page.key("keyDown", "w")
        page.wait_for(
            "Number(document.querySelector('#frameText').textContent.split(' ')[1]) >= 40", 90
        )
        page.key("keyUp", "w")
        assert seen(page) != before
        history = page.text("#historyList")
        assert "model query failed" not in history, history
        assert served.log.read_text().count("origin_refused") == 0


def test_without_allowed_origins_it_is_refused(
    browser: Browser, make_server: MakeServer, page_folder: Path, village: Path
) -> None:
    """Without `--allowed-origins`, a server with a fake engine refuses the page at its
    endpoints.
    """
    server = make_server()
    url = page_folder.joinpath("index.html").as_uri()
    with opened(browser, url, server.port, village / "start" / "street_day.png") as page:
        page.click("#connectBtn")
        page.wait_for("document.querySelector('#statusText').textContent === 'Socket closed'", 30)
        pause(0.2)
        assert page.text("#frameText") == "frames 0"
