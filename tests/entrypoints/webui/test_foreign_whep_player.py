# SPDX-License-Identifier: Apache-2.0
"""Tests with a third-party WHEP player, the npm package whip-whep (MIT), in headless Chromium.

The player is not part of this repository. npm downloads it, and if npm or its registry is
unavailable, the test is skipped.
"""

import hashlib
import shutil
import subprocess
import tarfile
from pathlib import Path

import helpers.needs_aiortc  # noqa: F401
import pytest
from browser import Browser
from helpers.fake_engine import FakeEngine
from helpers.waits import wait_until
from page_server import MakeServer

from vllm_omni.actions import ActionSpace

pytestmark = pytest.mark.nightly

PACKAGE = "whip-whep@1.2.0"
SHA256 = "f032b2b2015da76268d3f4a0450af2cf24ae984c6bf7cc5bfd494763cefaf786"
VIEW = """(async () => { const pc = window.pc = new RTCPeerConnection();
    pc.addTransceiver("video", { direction: "recvonly" });
    pc.ontrack = ({ track }) => (document.querySelector("#view").srcObject = new MediaStream([track]));
    window.whep = new WHEPClient();
    await whep.view(pc, new URL("/v1/realtime/webrtc?prompt=a%20harbour", location.href).href, "secret"); })()"""  # noqa: E501


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a script that defines the player class on the `window` object."""
    folder = tmp_path_factory.mktemp("whep")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("no npm on PATH")
    command = [npm, "pack", PACKAGE, "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    files = list(folder.glob("*.tgz"))
    if done.returncode or not files:
        pytest.skip(f"npm could not download {PACKAGE}: {done.stderr[-200:]}")
    assert hashlib.sha256(files[0].read_bytes()).hexdigest() == SHA256
    with tarfile.open(files[0]) as archive:
        archive.extract("package/whep.js", folder, filter="data")
    script = Path(folder / "package" / "whep.js").read_text()
    return "(() => {" + script.replace("export class", "window.WHEPClient = class") + "})()"


def test_a_foreign_player_shows_a_session_and_ends_it(
    browser: Browser, make_server: MakeServer, engine: FakeEngine, player: str
) -> None:
    """The third-party player shows a session and ends it. The player sends its offer before it has
    any ICE candidates, and sends its API key with every request. The fake engine gives frame n the
    brightness n.
    """
    space = ActionSpace(image="none", prompt="required", pose=True)
    server = make_server(info={"actions": space, "fps": 24.0}, keys=["secret"])
    with browser.page(server.url + "webrtc.html") as page:
        page.run(player)
        page.run(VIEW)
        page.wait_for("document.querySelector('#view').videoWidth === 80", timeout_s=25)
        page.wait_for("document.querySelector('#view').currentTime > 1")
        assert page.run("pc.connectionState") == "connected"
        assert engine.chunks[0].params.prompt == "a harbour"
        page.run("whep.stop()")
        wait_until(lambda: len(server.manager) == 0, 5)
