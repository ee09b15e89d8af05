# SPDX-License-Identifier: Apache-2.0
"""Tests of the page layout at common window sizes, based on the elements' rectangles in
Chromium.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, Page
from helpers.fake_engine import FakeEngine
from helpers.waits import seconds
from page_server import MakeServer

pytestmark = pytest.mark.nightly

DESKTOPS = [(1280, 800), (1440, 900)]
UPRIGHT, SIDEWAYS = (390, 844), (844, 390)
WINDOWS = [*DESKTOPS, UPRIGHT, SIDEWAYS]
SIZES = [(832, 480), (160, 96)]
"""Image sizes (width, height) of the reference model and the packaged world."""

BOX = """((selector) => { const e = document.querySelector(selector); const b = e.getBoundingClientRect();
    return { left: b.left, top: b.top, right: b.right, bottom: b.bottom, width: b.width, height: b.height }; })"""  # noqa: E501


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]}-wide")
def shape(request: pytest.FixtureRequest) -> tuple[int, int]:
    size: tuple[int, int] = request.param
    return size


@pytest.fixture
def page(browser: Browser, make_server: MakeServer, shape: tuple[int, int]) -> Iterator[Page]:
    """Yield the page for images of size `shape`, before a session starts."""
    width, height = shape
    with browser.page(
        make_server(info={"height": height, "width": width, "fps": 16.0}).url
    ) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        yield page
        assert page.errors == []


def be(page: Page, window: tuple[int, int], scheme: str = "dark") -> None:
    (page.phone if min(window) < 500 else page.desktop)(*window)
    page.send(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    settle(page)


def settle(page: Page) -> None:
    """Wait until observers and styles have been applied."""
    page.run(
        "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
        "setTimeout(done, 50))))"
    )


def start(page: Page) -> None:
    page.run("document.querySelector('#start').requestSubmit()")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    settle(page)


def box(page: Page, selector: str) -> dict[str, float]:
    return dict(page.run(f"{BOX}({selector!r})"))


def overlap(one: dict[str, float], other: dict[str, float]) -> float:
    """Return the area in square pixels where two boxes overlap."""
    width = min(one["right"], other["right"]) - max(one["left"], other["left"])
    height = min(one["bottom"], other["bottom"]) - max(one["top"], other["top"])
    return max(0.0, width) * max(0.0, height)


def scrolls(page: Page, selector: str = "html") -> bool:
    over = "(e => e.scrollHeight > e.clientHeight || e.scrollWidth > e.clientWidth)"
    return bool(page.run(f"{over}(document.querySelector({selector!r}))"))


@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: "x".join(map(str, window)))
def test_the_image_keeps_its_shape_and_fills_the_window(
    page: Page, shape: tuple[int, int], window: tuple[int, int]
) -> None:
    """The image keeps its aspect ratio and fills the window in both the dark and the light colour
    scheme.
    """
    be(page, window, "dark")
    start(page)
    check_image(page, shape, window)
    be(page, window, "light")
    check_image(page, shape, window)


def check_image(page: Page, shape: tuple[int, int], window: tuple[int, int]) -> None:
    """Check that the image has no bars and is not covered. It must either be as wide as its column
    or end just above the element below it.
    """
    frame, view, column = box(page, "#frame"), box(page, "#view"), box(page, ".stage-column")
    assert frame == view
    assert frame["width"] / frame["height"] == pytest.approx(shape[0] / shape[1], rel=0.01)
    assert frame["right"] <= window[0] + 0.5
    assert frame["bottom"] <= window[1] + 0.5
    below = box(page, ".tools")
    full_width = frame["width"] >= 0.94 * column["width"]
    full_height = (
        below["bottom"] >= window[1] - 24 and box(page, ".hud")["top"] - frame["bottom"] <= 32
    )
    assert full_width or full_height
    for part in (".hud", ".tools", ".bar"):
        assert overlap(frame, box(page, part)) == 0, part


@pytest.mark.parametrize(
    "window", [*DESKTOPS, SIDEWAYS], ids=lambda window: "x".join(map(str, window))
)
def test_nothing_scrolls_before_or_in_a_world(page: Page, window: tuple[int, int]) -> None:
    """Neither the page nor the panel needs to scroll, before or during a session. On a phone held
    upright, the settings are below the image, and everything fits the screen's width.
    """
    be(page, window)
    assert not scrolls(page)
    assert box(page, "#start .main")["bottom"] <= window[1]
    start(page)
    assert not scrolls(page)
    assert box(page, ".tools")["bottom"] <= window[1]
    if window != SIDEWAYS:
        assert not scrolls(page, ".panel")
        for _ in range(2):
            page.press("b")
            page.wait_for("!document.querySelector('#notices').hidden")
        assert not scrolls(page)


def test_an_upright_phone_fits_its_width_and_shows_the_controls_at_once(page: Page) -> None:
    be(page, UPRIGHT)
    start(page)
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    for part in (".sticks", ".hud", ".tools"):
        assert box(page, part)["bottom"] <= UPRIGHT[1], part


@pytest.mark.parametrize(
    "window", [UPRIGHT, SIDEWAYS], ids=lambda window: "x".join(map(str, window))
)
def test_sticks_are_alongside_the_image(page: Page, window: tuple[int, int]) -> None:
    """The sticks are next to the image and cover nothing, whether or not the detailed statistics
    are shown.
    """
    be(page, window)
    start(page)
    for _ in range(2):
        for stick in ("#stick-move", "#stick-look"):
            stick_box = box(page, stick)
            assert stick_box["width"] > 80
            for part in ("#frame", ".tools", ".hud summary"):
                assert overlap(stick_box, box(page, part)) == 0, (stick, part)
        page.run("document.querySelector('#hud').open = true")
        settle(page)


def test_a_button_opens_the_settings_of_a_sideways_phone(page: Page) -> None:
    be(page, SIDEWAYS)
    start(page)
    assert box(page, ".panel")["width"] == 0
    page.click("#settings")
    panel = box(page, ".panel")
    assert panel["width"] > 250
    assert panel["right"] <= SIDEWAYS[0]
    assert panel["bottom"] <= SIDEWAYS[1]
    page.click("#settings")
    assert box(page, ".panel")["width"] == 0


def test_the_start_image_is_shown_at_once(
    page: Page, engine: FakeEngine, shape: tuple[int, int]
) -> None:
    """While the first chunk is being generated, the page shows the start image at frame size."""
    engine.delay_s = 2.0
    page.run("document.querySelectorAll('.tile input')[1].click()")
    page.run("document.querySelector('#start').requestSubmit()")
    started_s = time.monotonic()
    page.wait_for("document.querySelector('#view').classList.contains('has-start')", 1.5)
    assert not page.run("document.querySelector('#view').classList.contains('has-picture')")
    seen: dict[str, Any] = page.run("""(async () => { const view = document.querySelector("#view");
        const image = new Image(); image.src = document.querySelectorAll(".tile img")[1].src; await image.decode();
        const other = new OffscreenCanvas(view.width, view.height).getContext("2d");
        other.drawImage(image, 0, 0, view.width, view.height);
        const [a, b] = [view.getContext("2d"), other].map((c) => c.getImageData(0, 0, view.width, view.height).data);
        return { size: [view.width, view.height], off: a.reduce((sum, v, i) => sum + Math.abs(v - b[i]), 0) / a.length,
            mean: a.reduce((sum, v) => sum + v, 0) / a.length, opacity: getComputedStyle(view).opacity,
            words: document.querySelector("#notices").textContent }; })()""")  # noqa: E501
    assert time.monotonic() - started_s < seconds(2.0)
    assert seen["size"] == list(shape)
    assert seen["off"] < 2
    assert seen["mean"] > 70  # the mean includes alpha, which is 255
    assert "first pictures" in seen["words"]
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    page.wait_for("document.querySelector('#notices').hidden")
    assert page.run(
        "document.querySelector('#view').getContext('2d').getImageData(40, 24, 1, 1).data[1] < 40"
    )


def test_full_screen_shows_the_image_alone_as_large_as_it_can(page: Page) -> None:
    """In full screen, only the image is shown, and it reaches two opposite edges of the screen.
    When full screen ends, everything else is shown again.
    """
    be(page, (1280, 800))
    start(page)
    page.click("#full")
    page.wait_for("document.fullscreenElement !== null")
    settle(page)
    view = box(page, "#view")
    width, height = page.run("[innerWidth, innerHeight]")
    assert (
        max((view["right"] - view["left"]) / width, (view["bottom"] - view["top"]) / height) > 0.99
    )
    assert not page.run("document.querySelector('.tools').offsetParent !== null")
    page.press("f")
    page.wait_for(
        "document.fullscreenElement === null && document.querySelector('.tools').offsetParent "
        "!== null"
    )
