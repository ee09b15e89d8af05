# SPDX-License-Identifier: Apache-2.0
"""Helpers that operate the web page and read the state of the page and its fake engine."""

from browser import Page
from helpers.fake_engine import Call, FakeEngine
from helpers.waits import pause, wait_until

from vllm_omni.actions import as_frame

PARTS = "import('/omni/js/main.js').then((m) => m.parts)"
STATUS = "document.querySelector('#status').textContent"
STALLS = f"{PARTS}.then(({{ app }}) => app.player.numStalls)"


def enter_key(page: Page, key: str) -> None:
    """Enter an API key in the dialog that asks for it."""
    page.wait_for("document.querySelector('#key-dialog').open")
    page.run("document.querySelector('#key-dialog input').focus()")
    page.write(key)
    page.click("#key-dialog .main")


def start_now(page: Page) -> None:
    """Start a session with the panel's defaults and wait for the first image."""
    page.click("#start .main")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")


def press_enter(page: Page) -> None:
    """Press Enter as a keyboard does. The event includes the key's text, because without it the
    browser would not activate the focused control.
    """
    page.send(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Enter",
        code="Enter",
        windowsVirtualKeyCode=13,
        text="\r",
    )


def later_chunks(engine: FakeEngine, count: int = 3) -> list[Call]:
    """Wait for `count` more chunk requests and return them. The first request after this call is
    skipped, because it may already have been in flight.
    """
    start = len(engine.chunks) + 1
    wait_until(lambda: len(engine.chunks) >= start + count)
    return engine.chunks[start : start + count]


def axes(calls: list[Call]) -> list[dict[str, float]]:
    """Return the axis values of each latent frame."""
    return [as_frame(entry).axes for call in calls for entry in call.params.actions or []]


def moved(engine: FakeEngine, axis: str) -> float:
    """Return the sum of an axis's values over all frames so far."""
    return sum(frame.get(axis, 0.0) for frame in axes(engine.chunks))


def rest(page: Page, engine: FakeEngine) -> None:
    """Wait until the page stops requesting chunks."""
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.isResting)")
    count = len(engine.chunks)
    pause(0.5)
    assert len(engine.chunks) == count


def shown(page: Page) -> int:
    return page.run(f"{PARTS}.then(({{ app }}) => app.player.numShown)")


def grey(page: Page) -> int:
    """Return the brightness at the centre of the image. The fake engine gives frame n the
    brightness n % 256.
    """
    code = (
        "{ const c = document.querySelector('#view'); return "
        "c.getContext('2d').getImageData(40, 24, 1, 1).data[1]; }"
    )
    return page.run(f"(() => {code})()")


PLACE = f"{PARTS}.then(({{ app }}) => app.map.path.at(-1))"
