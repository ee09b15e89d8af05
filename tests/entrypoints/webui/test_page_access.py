# SPDX-License-Identifier: Apache-2.0
"""Tests of access to the web page, its Content Security Policy and its accessibility. The tests use
headless Chromium, real sockets and a fake engine.
"""

from typing import Any

import pytest
from browser import Browser, Page
from helpers.fake_engine import FakeEngine
from page_driving import axes, enter_key, later_chunks, press_enter, rest, start_now
from page_server import MakeServer, PageServer

pytestmark = pytest.mark.nightly


def test_the_world_page_asks_for_the_key(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """The page asks for the API key and shows an error if the key is wrong. The page exchanges the
    correct key for tickets, and the key appears neither in a URL nor in browser storage.
    """
    server = make_server(keys=["sesame street"])
    with browser.page(server.url) as page:
        for text in ("wrong", "sesame street"):
            enter_key(page, text)
            if text == "wrong":
                page.wait_for("!document.querySelector('#key-dialog .wrong').hidden")
        page.wait_for("document.body.dataset.link === 'up'")
        start_now(page)
        page.key("keyDown", "w")
        server.cut_connections()  # the next connection needs a new ticket
        later_chunks(engine, 2)
        assert not any("sesame" in url or "ticket=" in url for url in page.requested)
        assert (
            page.run("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
            == '[{},{},""]'
        )
        assert all("401" in error for error in page.errors)


def test_nothing_comes_from_elsewhere(page: Page, server: PageServer, engine: FakeEngine) -> None:
    """The page sends requests only to this server, and its Content Security Policy forbids requests
    to any other.
    """
    start_now(page)
    own = (
        f"http://127.0.0.1:{server.port}/",
        f"ws://127.0.0.1:{server.port}/omni/ws/",
        "blob:",
        "data:",
    )
    assert [url for url in page.requested if not url.startswith(own)] == []
    blocked = "fetch('http://127.0.0.1:1/').then(() => 'sent', (e) => 'blocked')"
    assert page.run(blocked) == "blocked"
    page.errors[:] = [error for error in page.errors if "Content Security Policy" not in error]


def test_a_phone_shows_sticks_and_they_steer(page: Page, engine: FakeEngine) -> None:
    """On a phone, everything fits the screen width, and the left stick moves the camera."""
    page.phone()
    start_now(page)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    x, y = page.middle_of("#stick-move")
    page.touch("touchStart", (x, y))
    page.touch("touchMove", (x, y - 60))
    frame = axes(later_chunks(engine, 1))[-1]
    page.touch("touchEnd")
    assert frame == {"forward": pytest.approx(1, abs=0.01)}
    rest(page, engine)


def test_every_control_is_named_and_reachable_by_keyboard(page: Page, engine: FakeEngine) -> None:
    """Buttons and fields have accessible names, and the tab order is natural. Users can start and
    steer a session without a mouse.
    """
    nameless = """[...document.querySelectorAll("button, input, textarea, select, canvas, dialog")].filter((e) =>
        !(e.textContent.trim() || e.ariaLabel || e.getAttribute("aria-labelledby") || e.labels?.length))
        .map((e) => e.outerHTML)"""  # noqa: E501
    assert page.run(nameless) == []
    assert page.run("[...document.querySelectorAll('[tabindex]')].every((e) => e.tabIndex <= 0)")
    page.run("document.activeElement.blur()")
    for _ in range(30):
        page.send(
            "Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9
        )
        page.send(
            "Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9
        )
        if page.run("document.activeElement.name === 'start'"):
            break
    press_enter(page)
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    page.key("keyDown", "w")
    assert axes(later_chunks(engine, 1))[-1] == {"forward": 1.0}
    page.key("keyUp", "w")


def test_text_is_readable(page: Page, engine: FakeEngine) -> None:
    """The text contrast is at least 4.5 to 1 (WCAG AA) in both the dark and the light colour
    scheme.
    """
    for scheme in ("dark", "light"):
        page.send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        colours: dict[str, Any] = page.run(
            """Object.fromEntries(
            ["ground", "raised", "sunken", "text", "muted", "accent", "on-accent", "bad"].map((n) =>
            [n, getComputedStyle(document.documentElement).getPropertyValue("--" + n).trim()]))"""
        )
        pairs = [
            (text, on) for text in ("text", "muted", "accent", "bad") for on in ("ground", "raised")
        ]
        for text, ground in [
            *pairs,
            ("text", "sunken"),
            ("muted", "sunken"),
            ("on-accent", "accent"),
        ]:
            assert contrast(colours[text], colours[ground]) >= 4.5, (scheme, text, ground)


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)
