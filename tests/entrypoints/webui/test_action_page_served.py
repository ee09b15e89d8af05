# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium plays a world with buttons, mouse and wheel on a real `vllm serve --omni`, and
the frames show the actions.

The session is recorded, and its replay is identical to the original session.
"""

import base64
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from browser import Browser, Page
from helpers.served import AUTHORIZED, KEY, SIZES, Served
from helpers.snapshot_steps import PLAY
from helpers.waits import seconds, wait_until
from page_driving import enter_key
from PIL import Image

from vllm_omni.actions import ActionFrame
from vllm_omni.session_files.recording import RecordedChunk, read_recording
from vllm_omni.testing.null.world import marks

HAS_IMAGE = "document.querySelector('#view').classList.contains('has-picture')"
SPACE = {
    **PLAY,
    "buttons": [
        {"name": "run", "title": "run", "codes": ["KeyW"]},
        {"name": "jump", "title": "jump", "codes": ["Space"]},
    ],
    "axes": [{"name": "dx", "title": "turn", "unit": "pixels", "kind": "motion", "mouse": "x"}],
    "prompt": "none",
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def played(
    null_world: Path, recordings: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    omni = {**SIZES, "model": {"actions": SPACE}, "record_dir": str(recordings)}
    flags = ("--additional-config", msgspec.json.encode({"omni": omni}).decode())
    server = Served(null_world, tmp_path_factory.mktemp("played"), *flags)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def chunks_of(recordings: Path) -> list[RecordedChunk]:
    return [
        chunk
        for path in sorted(recordings.glob("*.recording"))
        for chunk in read_recording(path)[1]
    ]


def squares(page: Page) -> list[int]:
    """Return the grey values of the squares that the null world has drawn in the displayed
    image.
    """
    url = page.run("document.querySelector('#view').toDataURL('image/png')")
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB")
    return marks.read(np.asarray(image), 4)


def sees(page: Page, low: list[int], high: list[int]) -> None:
    """Wait for an image whose squares have grey values between `low` and `high`. Ranges are needed
    because JPEG changes grey values slightly.
    """
    wait_until(
        lambda: all(a <= x <= b for a, x, b in zip(low, squares(page), high, strict=True)), 60
    )


@pytest.mark.nightly
def test_the_page_plays_the_world_and_the_recording_runs_again(
    browser: Browser, played: Served, recordings: Path, null_world: Path
) -> None:
    """The displayed images show a held key, a jump, a drag and a wheel notch. Replaying the
    recording produces frames identical to the original ones.
    """
    with browser.page(f"http://127.0.0.1:{played.port}/omni/") as page:
        enter_key(page, KEY)
        page.wait_for("document.body.dataset.link === 'up'")
        page.click("#start .main")
        page.wait_for(HAS_IMAGE, 60)
        page.key("keyDown", "w")
        sees(page, [240, 0, 120, 120], [255, 15, 136, 136])
        page.press(" ")
        sees(page, [240, 240, 120, 120], [255, 255, 136, 136])
        page.drag("#view", -60, 0)
        sees(page, [240, 0, 140, 120], [255, 15, 255, 136])
        page.key("keyUp", "w")
        x, y = page.middle_of("#view")
        page.send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=-100)
        sees(page, [0, 0, 120, 245], [15, 15, 136, 255])
        page.click("#leave")
        assert all("401" in error for error in page.errors), page.errors

    def frames() -> list[Any]:
        return [entry for chunk in chunks_of(recordings) for entry in chunk.params.actions or []]

    wait_until(
        lambda: any(isinstance(frame, ActionFrame) and frame.scroll == 1.0 for frame in frames())
    )
    typed = [frame for frame in frames() if isinstance(frame, ActionFrame)]
    assert sum(frame.axes.get("dx", 0.0) for frame in typed) == pytest.approx(60.0)
    assert ["run", "jump"] in frames()
    (path,) = recordings.glob("*.recording")
    command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "replay", str(path)]
    environ = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=seconds(300), check=False, env=environ
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "identical" in result.stdout.splitlines()[-1]


def test_unsupported_actions_are_refused_by_the_real_server(played: Served) -> None:
    """A real server refuses unsupported actions and lists the actions that the served model's
    options define.
    """
    with played.client(**AUTHORIZED) as client:
        assert [button["name"] for button in client.hello["actions"]["buttons"]] == ["run", "jump"]
        response = client.request({"endpoint": "infer", "actions": [["fly"]] * 3})
        assert response["code"] == "invalid_action"
        assert "this model takes buttons run, jump; axes dx; scroll" in response["message"]
        response = client.request({"endpoint": "infer", "actions": [["run"]] * 3, "prompt": "rain"})
        assert response["code"] == "invalid_prompt"
