# SPDX-License-Identifier: Apache-2.0
"""For a model with buttons, axes and a wheel, the page offers the model's actions, and only those
actions reach the engine.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import Browser, Page
from helpers.fake_engine import FIRST, FakeEngine
from helpers.waits import seconds, wait_until
from page_server import MakeServer, PageServer

from vllm_omni.actions import ActionFrame, ActionSpace, Axis, Button

pytestmark = pytest.mark.nightly

HAS_IMAGE = "document.querySelector('#view').classList.contains('has-picture')"
IS_SHOWN = "getComputedStyle(document.querySelector('{}')).display !== 'none'"
PLAY = ActionSpace(
    buttons=(
        Button("forward", "run", ("KeyW",)),
        Button("left", "step left", ("KeyA", "ArrowLeft")),
        Button("jump", "jump", ("Space",)),
        Button("fire", "fire", ("Mouse0", "KeyF")),
        Button("unseen", "no key presses it"),
    ),
    axes=(
        Axis(name="dx", title="turn", unit="pixels", kind="motion", mouse="x"),
        Axis(name="dy", title="look up", unit="pixels", kind="motion", mouse="y", scale=-1.0),
        Axis(name="throttle", title="speed", unit="of full speed", low=-1, high=1),
    ),
    scroll=True,
    prompt="none",
    image="none",
)
RUNNER = ActionSpace(buttons=PLAY.buttons[:3], exclusive=True, prompt="optional", image="optional")

Frame = tuple[tuple[str, ...], dict[str, float], float]


def frames(engine: FakeEngine, start: int = 0) -> list[Frame]:
    """Return the action frames that have reached the engine, starting at chunk `start`."""
    found: list[Frame] = []
    for call in engine.chunks[start:]:
        for entry in call.params.actions or []:
            typed = entry if isinstance(entry, ActionFrame) else ActionFrame(tuple(entry))
            found.append((typed.buttons, typed.axes, typed.scroll))
    return found


def reaches(engine: FakeEngine, condition: Callable[[list[Frame]], Any]) -> None:
    wait_until(lambda: condition(frames(engine)))


@pytest.fixture
def open_page(browser: Browser, make_server: MakeServer) -> Callable[[ActionSpace], Any]:
    """Return a function that returns a context manager: `with open_page(space) as page` opens the
    page of a server with that action space and waits until the page has connected.
    """

    def opened(space: ActionSpace) -> Any:
        server: PageServer = make_server(info={"actions": space, "fps": 48.0})
        return browser.page(server.url)

    return opened


@pytest.fixture
def play(open_page: Callable[[ActionSpace], Any]) -> Iterator[Page]:
    with open_page(PLAY) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        yield page
        assert page.errors == []


def start_now(page: Page) -> None:
    page.click("#start .main")
    page.wait_for(HAS_IMAGE)


def test_the_page_shows_the_actions_of_the_model(play: Page, engine: FakeEngine) -> None:
    """The page shows each of the model's buttons with its name and key, as well as a slider and the
    mouse. It shows no prompt, images, camera keys or map.
    """
    assert not play.run(IS_SHOWN.format("#start .gallery")) and not play.run(
        IS_SHOWN.format(".prompt-field")
    )
    start_now(play)
    labels = play.run("[...document.querySelectorAll('#actions button')].map((b) => b.textContent)")
    assert labels == ["Wrun", "A←step left", "Spacejump", "mouse leftFfire"]
    assert play.run(
        "[...document.querySelectorAll('#actions input')].map((i) => i.dataset.axis)"
    ) == ["throttle"]
    assert play.run(IS_SHOWN.format("#look"))
    for hidden in (".keys", "#map", "#prompt-form", "#speed"):
        assert not play.run(f"document.querySelector('{hidden}').offsetParent !== null"), hidden
    assert "run" in play.text("#help-actions") and "Wheel" in play.text("#help-actions")
    first = engine.chunks[0]
    assert (first.params.prompt, list(first.arrays)) == (None, [])
    assert first.params.actions == [[], [], []]


def test_a_key_holds_a_button_and_a_short_press_acts_once(play: Page, engine: FakeEngine) -> None:
    """A held key takes effect in every frame, whereas a key pressed and released between two
    requests takes effect in only one.
    """
    start_now(play)
    play.key("keyDown", "w")
    reaches(engine, lambda got: got[-3:] == [(("forward",), {}, 0.0)] * 3)
    play.wait_for(
        "document.querySelector('#actions [aria-pressed=true]').dataset.button === 'forward'"
    )
    play.key("keyUp", "w")
    play.press(" ")
    reaches(engine, lambda got: any("jump" in buttons for buttons, _, _ in got))
    reaches(engine, lambda got: got[-3:] == [((), {}, 0.0)] * 3)
    assert play.run("document.body.dataset.live") == "true", (
        "the space bar jumps, it does not pause"
    )


def test_the_mouse_moves_axes_and_the_wheel_scrolls(play: Page, engine: FakeEngine) -> None:
    """Dragging 40 pixels to the left turns the view to the right by 40 pixels, and dragging up
    turns it down (a negative `dy`). One wheel notch is one step.
    """
    start_now(play)
    play.drag("#view", -40, -20)

    def total(axis: str) -> float:
        return sum(axes.get(axis, 0.0) for _, axes, _ in frames(engine))

    wait_until(
        lambda: (
            total("dx") == pytest.approx(40, abs=0.01)
            and total("dy") == pytest.approx(-20, abs=0.01)
        )
    )
    x, y = play.middle_of("#view")
    play.send("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=100)
    reaches(engine, lambda got: [scroll for _, _, scroll in got if scroll] == [-1.0])


def test_a_captured_mouse_moves_and_its_button_fires(play: Page, engine: FakeEngine) -> None:
    """After a click on Look, the page captures the mouse. Moving the mouse then moves the view
    without a pressed button, and clicking presses one of the model's buttons.
    """
    start_now(play)
    play.click("#look")
    play.wait_for("document.pointerLockElement === document.querySelector('#view')")
    x, y = play.middle_of("#view")
    for step in (10, 20, 30):
        play.send("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)
    reaches(engine, lambda got: sum(axes.get("dx", 0.0) for _, axes, _ in got) > 0)
    for kind in ("mousePressed", "mouseReleased"):
        play.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
    reaches(engine, lambda got: any("fire" in buttons for buttons, _, _ in got))


def test_a_slider_sets_an_axis_until_it_is_moved(play: Page, engine: FakeEngine) -> None:
    start_now(play)
    play.run(
        "(() => { const s = document.querySelector('#actions input'); s.value = 0.5;"
        " s.dispatchEvent(new Event('input', { bubbles: true })); })()"
    )
    reaches(engine, lambda got: got[-6:] == [((), {"throttle": 0.5}, 0.0)] * 6)


def test_fingers_hold_the_buttons_on_the_page(play: Page, engine: FakeEngine) -> None:
    """On a phone, the left stick presses the four direction buttons, and the right stick moves the
    mouse axes.
    """
    play.phone()
    start_now(play)
    play.touch("touchStart", play.middle_of("[data-button=jump]"))
    reaches(engine, lambda got: got[-3:] == [(("jump",), {}, 0.0)] * 3)
    play.touch("touchEnd")
    x, y = play.middle_of("#stick-move")
    play.touch("touchStart", (x, y))
    play.touch("touchMove", (x - 60, y))
    reaches(engine, lambda got: got[-3:] == [(("left",), {}, 0.0)] * 3)
    play.touch("touchEnd")
    reaches(engine, lambda got: got[-3:] == [((), {}, 0.0)] * 3)
    x, y = play.middle_of("#stick-look")
    play.touch("touchStart", (x, y))
    play.touch("touchMove", (x + 60, y))
    reaches(engine, lambda got: got[-1][1].get("dx", 0) > 0)
    play.touch("touchEnd")


def test_one_button_at_a_time_in_an_exclusive_space(
    open_page: Callable[..., Any], engine: FakeEngine
) -> None:
    """In an exclusive action space, only the most recently pressed button is active, and the mouse
    cannot be captured. The prompt and the image are optional.
    """
    with open_page(RUNNER) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        assert page.text("#start .tile .caption") == "No picture"
        page.run("document.querySelector('[name=sample]').click()")
        page.run("document.querySelector('#start').elements.prompt.value = ''")
        start_now(page)
        assert not page.run("document.querySelector('#look').offsetParent !== null")
        page.key("keyDown", "w")
        page.key("keyDown", "a")
        reaches(engine, lambda got: got[-3:] == [(("left",), {}, 0.0)] * 3)
        page.key("keyUp", "a")
        reaches(engine, lambda got: got[-3:] == [(("forward",), {}, 0.0)] * 3)
        page.key("keyUp", "w")
        assert all(len(buttons) <= 1 for buttons, _, _ in frames(engine))
        assert list(engine.chunks[0].arrays) == []
        assert page.errors == []


def test_a_lost_world_without_images_is_started_over(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """If a session is lost and its model takes no start image, the page offers to start over,
    because there is no image to resume from.
    """
    with browser.page(make_server(info={"actions": PLAY, "fps": 48.0}).url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        start_now(page)
        engine.worlds.clear()
        page.wait_for("document.querySelector('#notices').textContent.includes('lost')")
        started_s = time.monotonic()
        page.click("#notices button")
        wait_until(lambda: [call.params.chunk_index for call in engine.chunks].count(0) == 2)
        page.wait_for("document.body.dataset.world === 'good'")
        assert time.monotonic() - started_s < seconds(30) and FIRST == 9
