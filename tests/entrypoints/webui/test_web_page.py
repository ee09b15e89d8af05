# SPDX-License-Identifier: Apache-2.0
"""The web page as a visitor uses it: headless Chromium, real sockets, and a fake engine that
tells what reached it.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from browser import Browser, Page
from helpers.fake_engine import FIRST, LATER, Call, FakeEngine
from helpers.waits import pause, wait_until
from page_server import MakeServer, PageServer
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.actions import ActionSpace, as_frame
from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed
from vllm_omni.worlds.description import WorldGrid, read_description
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.start_pose import StartPose

PARTS = "import('/omni/js/main.js').then((m) => m.parts)"
STATUS = "document.querySelector('#status').textContent"
STALLS = f"{PARTS}.then(({{ app }}) => app.player.numStalls)"


@pytest.fixture
def real_time(browser: Browser, make_server: MakeServer) -> Iterator[Page]:
    """The page of a world with 16 frames a second; the other tests have a faster one, to be done
    sooner.
    """
    with browser.page(make_server(info={"fps": 16.0}).url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        yield page
        assert page.errors == []


def start_now(page: Page) -> None:
    """Start with what the panel offers and wait for the first picture."""
    page.click("#start .main")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")


def later_chunks(engine: FakeEngine, count: int = 3) -> list[Call]:
    """The next `count` chunks that are asked for from now on (one may be under way already and
    is left out).
    """
    start = len(engine.chunks) + 1
    wait_until(lambda: len(engine.chunks) >= start + count)
    return engine.chunks[start : start + count]


def axes(calls: list[Call]) -> list[dict[str, float]]:
    """What moves the camera in each latent frame."""
    return [as_frame(entry).axes for call in calls for entry in call.params.actions or []]


def moved(engine: FakeEngine, axis: str) -> float:
    """By how much an axis has moved the camera so far."""
    return sum(frame.get(axis, 0.0) for frame in axes(engine.chunks))


def rest(page: Page, engine: FakeEngine) -> None:
    """Wait until the page asks for nothing more."""
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.isResting)")
    count = len(engine.chunks)
    pause(0.5)
    assert len(engine.chunks) == count


def shown(page: Page) -> int:
    return page.run(f"{PARTS}.then(({{ app }}) => app.player.numShown)")


def grey(page: Page) -> int:
    """Brightness of the picture's middle: the fake engine's frame n is n % 256."""
    code = (
        "{ const c = document.querySelector('#view'); return "
        "c.getContext('2d').getImageData(40, 24, 1, 1).data[1]; }"
    )
    return page.run(f"(() => {code})()")


# ---- the world moves
# ------------------------------------------------------------------------------------------------


def test_what_is_chosen_starts_the_world(page: Page, engine: FakeEngine) -> None:
    """Picture, prompt, size and seed of the panel arrive; the first frame is seen from the
    start.
    """
    page.run("document.querySelectorAll('.tile input')[1].click()")
    page.run("document.querySelector('#start').elements.seed.value = 77")
    start_now(page)
    first = engine.chunks[0]
    assert first.params.seed == 77
    assert "desert" in str(first.params.prompt).lower()
    assert (first.params.height, first.params.width) == (48, 80)
    assert first.arrays["image"].shape == (48, 80, 3)
    assert first.arrays["image"].std() > 10
    assert list(first.arrays) == ["image"]
    assert first.params.actions == [[], [], []]
    assert "start_pose" not in first.params.options, "the server recognises its own pictures"


def test_an_own_image_can_be_dropped_in(page: Page, engine: FakeEngine) -> None:
    """A dropped file is shown and sent; another kind of file is refused with a word."""
    drop = """(async (type) => { const canvas = new OffscreenCanvas(32, 32); const c = canvas.getContext("2d");
        c.fillStyle = "#00ff00"; c.fillRect(0, 0, 32, 32);
        const blob = await canvas.convertToBlob({ type: "image/png" });
        const dataTransfer = new DataTransfer(); dataTransfer.items.add(new File([blob], "mine.png", { type }));
        document.querySelector("#stage").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true })); })"""  # noqa: E501
    page.run(f"{drop}('application/pdf')")
    assert "PNG" in page.wait_for("!notices.hidden && notices.textContent")
    page.run(f"{drop}('image/png')")
    page.wait_for("document.querySelector('.upload .caption').textContent === 'mine.png'")
    start_now(page)
    assert np.abs(engine.chunks[0].arrays["image"].mean((0, 1)) - [0, 255, 0]).max() < 3


CHOOSE = """((name, type, bytes) => { const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name, { type }));
    document.querySelector("#stage").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true })); })"""  # noqa: E501


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("broken.png", "image/png", "broken.png is no picture that can be read"),
        ("IMG_1.HEIC", "image/heic", "Browsers cannot read HEIC pictures"),
        ("IMG_2.heic", "", "Browsers cannot read HEIC pictures"),
    ],
)
def test_a_file_that_is_no_image_does_not_become_a_tile(
    page: Page, name: str, kind: str, said: str
) -> None:
    """It is refused with the reason when it is chosen, not when the world begins."""
    page.run(f"{CHOOSE}({name!r}, {kind!r}, new Uint8Array([1, 2, 3]))")
    page.wait_for("!notices.hidden")
    assert said in page.text("#notices")
    assert not page.run("document.querySelector('.upload').classList.contains('has-image')")
    page.errors.clear()


def test_a_large_image_is_scaled_down_in_the_browser(page: Page, engine: FakeEngine) -> None:
    """Noise of 3000 x 1500 pixels, more bytes than the server takes, arrives as a picture of
    2048 x 1024.
    """
    page.run(f"""(async () => {{ const canvas = new OffscreenCanvas(3000, 1500), c = canvas.getContext("2d");
        const image = c.createImageData(3000, 1500);
        image.data.forEach((_, i) => (image.data[i] = i % 4 === 3 ? 255 : 96 + 64 * Math.random()));
        c.putImageData(image, 0, 0); const blob = await canvas.convertToBlob({{ type: "image/png" }});
        {CHOOSE}("large.png", "image/png", blob); }})()""")  # noqa: E501
    page.wait_for("document.querySelector('.upload img').naturalWidth === 2048")
    assert page.run("document.querySelector('.upload img').naturalHeight") == 1024
    start_now(page)
    assert engine.chunks[0].arrays["image"].mean() == pytest.approx(128, abs=5)


# ---- a world with a card
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def village_page(browser: Browser, make_server: MakeServer, village: Path) -> Iterator[Page]:
    """The page of a server whose checkpoint says what its world is; the engine is the fake one
    all the same.
    """
    with browser.page(make_server(world=village, info={"fps": 48.0}).url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        page.wait_for(
            "[...document.querySelectorAll('.tile img')].every((i) => !i.src || i.naturalWidth "
            "=== 160)"
        )
        yield page
        assert page.errors == []


TILES = """[...document.querySelectorAll('[name=sample]')].map((radio) =>
    radio.closest('label').querySelector('img').src.split('/').at(-1).replace('.png', ''))"""
PRESSED = "document.querySelector('{} [aria-pressed=true]')?.textContent"


def test_a_world_offers_its_own_images_and_prompts(village_page: Page, engine: FakeEngine) -> None:
    """A prompt's button shows the pictures that fit it; the chosen one begins the world."""
    page = village_page
    assert page.run(TILES) == ["square_day", "street_day", "pond_day"]
    assert page.run(
        "[...document.querySelectorAll('#start [name=size] option')].map((o) => o.value)"
    ) == ["160x96"]
    page.run("document.querySelectorAll('[name=sample]')[1].click()")
    page.run("document.querySelectorAll('#start .prompts button')[2].click()")
    assert page.run(TILES) == ["square_snow", "street_snow", "pond_snow"]
    assert page.run("document.querySelector('[name=sample]:checked').value") == "Street", (
        "the place stays"
    )
    assert page.run(PRESSED.format("#start .prompts")) == "Snow"
    start_now(page)
    first = engine.chunks[0]
    assert first.params.prompt == "the village in the snow"
    assert first.arrays["image"].mean() > 150, "the snowy picture"


def test_prompt_buttons_change_the_world_in_mid_walk(
    village_page: Page, engine: FakeEngine
) -> None:
    """One click; the button of the prompt that holds is marked."""
    page = village_page
    start_now(page)
    assert page.run(PRESSED.format("#prompts")) == "Day"
    page.run("document.querySelectorAll('#prompts button')[1].click()")
    page.wait_for(f"{PRESSED.format('#prompts')} === 'Dusk'")
    prompts = [call.params.prompt for call in engine.chunks if call.params.prompt is not None]
    assert prompts == ["the village on a sunny day", "the village at dusk"]


def test_a_image_from_elsewhere_is_taken_with_a_word(
    village_page: Page, engine: FakeEngine
) -> None:
    """The panel says what the world can show; it is said again once, when the walk begins."""
    page = village_page
    page.run("""(async () => { const canvas = new OffscreenCanvas(32, 32); const c = canvas.getContext("2d");
        c.fillStyle = "#00ff00"; c.fillRect(0, 0, 32, 32);
        const dataTransfer = new DataTransfer();
        dataTransfer.items.add(new File([await canvas.convertToBlob()], "mine.png", { type: "image/png" }));
        document.querySelector("#stage").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true })); })()""")  # noqa: E501
    page.wait_for("document.querySelector('.upload').classList.contains('has-image')")
    assert "a picture from elsewhere is taken" in page.text("#start .about")
    assert page.run("notices.hidden")
    page.run("document.querySelectorAll('#start .prompts button')[1].click()")
    start_now(page)
    assert "a picture from elsewhere is taken" in page.wait_for(
        "!notices.hidden && notices.textContent"
    )
    assert np.abs(engine.chunks[0].arrays["image"].mean((0, 1)) - [0, 255, 0]).max() < 3
    assert engine.chunks[0].params.prompt == "the village at dusk"


def test_the_panel_holds_a_village_and_two_marks_without_scrolling(
    village_page: Page, engine: FakeEngine
) -> None:
    """In a window of 1280x800: prompts, map, marks whose names are whole, sliders."""
    page = village_page
    engine.start_pose = StartPose(x_m=1.2, z_m=-4.0, heading_degrees=0.0)
    page.desktop(1280, 800)
    page.run("document.querySelector('#start').requestSubmit()")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    for number in (1, 2):
        page.press("b")
        page.wait_for(f"document.querySelectorAll('.marks li').length === {number}")
    cut_off = """(selector) => [...document.querySelectorAll(selector)].filter((e) =>
        e.scrollHeight > e.clientHeight + 1 || e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"""  # noqa: E501
    assert page.run(f"({cut_off})('.panel')") == []
    assert page.run(f"({cut_off})('.mark-text b')") == []
    map_box = "document.querySelector('.path .map').getBoundingClientRect().height"
    assert page.run(map_box) >= 64


def test_the_map_lies_under_the_path(village_page: Page, engine: FakeEngine) -> None:
    """The ground of the place where one stands is what is drawn there; distances are metres."""
    page = village_page
    engine.start_pose = StartPose(x_m=1.2, z_m=-4.0, heading_degrees=0.0)
    start_now(page)  # on the square at (1.2, -4), on the sandy path, the pond to the east
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.map.path.length > 5)")
    pause(0.3)
    pixel = """((dx, dy) => { const c = document.querySelector('#map'), d = devicePixelRatio || 1;
        const x = c.width / 2 + dx * d, y = c.height / 2 + dy * d;
        return [...c.getContext('2d').getImageData(x, y, 1, 1).data]; })"""
    height = page.run("document.querySelector('#map').clientHeight")
    metre = (height - 36) / 15  # half of the map's 30 m is shown around one who stands still
    assert page.run("document.querySelector('#map').offsetParent !== null")
    red, _, blue, alpha = page.run(f"{pixel}({2.6 * metre}, {0.6 * metre})")
    assert alpha == 255
    assert blue > red + 50, "the pond, 2.6 m east and 0.6 m south"
    red, green, blue, _ = page.run(f"{pixel}({-3 * metre}, {-0.1 * metre})")
    assert green > blue + 30, "grass to the west"
    assert page.text("#map-text").startswith("0.0 m from the start, facing 0°.")


# by the clock; the player itself is tested without one in test_page_modules.py
@pytest.mark.nightly
def test_images_come_in_order_at_a_steady_rate(real_time: Page, engine: FakeEngine) -> None:
    """With chunks that take 0.3 s the picture runs at its 16 frames a second without a wait."""
    page, engine.delay_s = real_time, 0.3
    start_now(page)
    page.key("keyDown", "w")
    pause(1.5)  # the waiting time has to be learned first
    code = f"""{PARTS}.then(async ({{ app }}) => {{ const seen = []; const before = app.player.numStalls;
        const onframe = app.player.onframe;
        app.player.onframe = (frame) => {{ onframe(frame); seen.push(performance.now()); }};
        await new Promise((done) => setTimeout(done, 3000)); app.player.onframe = onframe;
        return [seen.length, app.player.numStalls - before,
                Math.max(...seen.slice(1).map((t, i) => t - seen[i]))]; }})"""  # noqa: E501
    count, waits, worst_gap_ms = page.run(code)
    assert 44 <= count <= 50
    assert waits == 0
    assert worst_gap_ms < 200
    before = grey(page)
    pause(0.5)
    assert 4 <= grey(page) - before <= 14


# by the clock; the player itself is tested without one in test_page_modules.py
@pytest.mark.nightly
def test_a_slow_server_is_played_slowly_not_in_jerks(real_time: Page, engine: FakeEngine) -> None:
    """A chunk of 12 frames every 1.5 s is played at about 8 frames a second."""
    page, engine.delay_s = real_time, 1.5
    start_now(page)
    page.key("keyDown", "w")
    wait_until(lambda: len(engine.chunks) >= 4, 20)
    before = shown(page)
    pause(3)
    assert 17 <= shown(page) - before <= 27
    assert "server" in page.text("[data-stat=rate]")


# ---- controls
# --------------------------------------------------------------------------------------------------


def test_held_keys_move_and_let_go_stop(page: Page, engine: FakeEngine) -> None:
    """W walks ahead by one step in each latent frame while it is held; then nothing moves, and
    nothing is asked for.
    """
    start_now(page)
    page.key("keyDown", "w")
    assert axes(later_chunks(engine)) == [{"forward": 1.0}] * 9
    page.key("keyUp", "w")
    rest(page, engine)
    assert axes(engine.chunks[-1:]) == [{}] * 3, "the last chunk shows the camera at rest"


@pytest.mark.parametrize(
    ("key", "axis", "value"),
    [
        *(
            ("s", "forward", -1),
            ("d", "right", 1),
            ("a", "right", -1),
            ("e", "up", 1),
            ("q", "up", -1),
        ),
        *(("l", "yaw", 6), ("j", "yaw", -6), ("i", "pitch", 4), ("k", "pitch", -4)),
    ],
)
def test_every_key_has_its_direction(
    page: Page, engine: FakeEngine, key: str, axis: str, value: float
) -> None:
    """Steps along the ground and up, degrees to the right and upwards, in each latent frame."""
    start_now(page)
    page.key("keyDown", key)
    assert axes(later_chunks(engine, 1)) == [{axis: value}] * 3
    page.key("keyUp", key)


def test_a_tap_is_never_lost(page: Page, engine: FakeEngine) -> None:
    """A key touched for some milliseconds, wherever in a chunk, moves by one latent frame."""
    engine.delay_s = 0.3
    start_now(page)
    for number in range(1, 4):
        page.press("w")
        wait_until(lambda wanted=number: moved(engine, "forward") == wanted)
    assert {frame.get("forward", 0.0) for frame in axes(engine.chunks)} == {0.0, 1.0}


ACTIVE = "document.activeElement.id"


def test_after_a_click_the_keyboard_is_the_worlds_again(page: Page, engine: FakeEngine) -> None:
    """Space pauses instead of pressing a button once more, arrows look instead of moving a
    slider.
    """
    start_now(page)
    for control in ("#overlay", "#pause", "#pause", ".hud summary"):
        page.click(control)
        page.wait_for(f"{ACTIVE} === 'stage'")
    page.click("#speed")
    page.wait_for(f"{ACTIVE} === 'stage'")
    page.run("document.querySelector('#prompt').focus()")
    page.write("rain")
    page.send(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Enter",
        code="Enter",
        windowsVirtualKeyCode=13,
        text="\r",
    )
    page.wait_for(f"{ACTIVE} === 'stage'")
    page.click("#help")
    page.run("document.querySelector('#help-dialog button').click()")
    page.wait_for(f"{ACTIVE} === 'stage'")
    page.press(" ")
    page.wait_for("document.querySelector('#status').textContent === 'Paused'")


def test_numbers_open_below_the_row_that_is_always_there(page: Page) -> None:
    start_now(page)
    assert page.run("[hud.open, hud.offsetParent !== null]") == [False, True]
    page.press("o")
    page.wait_for(
        "hud.open && document.querySelector('#overlay').getAttribute('aria-pressed') === 'true'"
    )
    page.click("#overlay")
    page.wait_for("!hud.open && hud.offsetParent !== null")


def test_keys_do_not_move_while_one_types(page: Page, engine: FakeEngine) -> None:
    """Letters in the prompt are letters."""
    start_now(page)
    page.run("document.querySelector('#prompt').focus()")
    page.key("keyDown", "w")
    rest(page, engine)
    page.key("keyUp", "w")
    assert moved(engine, "forward") == 0
    page.run("document.querySelector('#stage').focus()")
    page.key("keyDown", "w")
    later_chunks(engine, 2)
    page.key("keyUp", "w")
    assert moved(engine, "forward") > 0


def test_losing_the_focus_lets_all_keys_go(page: Page, engine: FakeEngine) -> None:
    """A window switched away from does not walk on."""
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.run("dispatchEvent(new Event('blur'))")
    rest(page, engine)


def test_dragging_looks_around(page: Page, engine: FakeEngine) -> None:
    """The picture follows the hand: dragged to the left, one looks to the right."""
    start_now(page)
    page.drag("#view", -150, 40)
    wait_until(lambda: moved(engine, "turn") > 17)
    rest(page, engine)
    assert moved(engine, "turn") == pytest.approx(150 * 0.126, abs=0.1)
    assert moved(engine, "look") == pytest.approx(40 * 0.126, abs=0.1)


def test_a_gamepad_steers(page: Page, engine: FakeEngine) -> None:
    """Left stick walks by how far it is pushed; a resting stick does nothing."""
    start_now(page)
    pad = (
        "{ connected: true, mapping: 'standard', axes: [0.05, -0.575, 0, 0], buttons: "
        "Array(17).fill({ value: 0 }) }"
    )
    page.run(f"navigator.getGamepads = () => [{pad}]")
    assert axes(later_chunks(engine, 2))[-1] == {"forward": pytest.approx(0.5)}


def test_sliders_change_the_pace(page: Page, engine: FakeEngine) -> None:
    """Walking and turning speed apply from the next chunk."""
    start_now(page)
    page.run("speed.value = 2; speed.dispatchEvent(new Event('input'))")
    page.run("turn.value = 0.5; turn.dispatchEvent(new Event('input'))")
    page.key("keyDown", "w")
    page.key("keyDown", "l")
    frame = axes(later_chunks(engine, 1))[0]
    page.key("keyUp", "w")
    page.key("keyUp", "l")
    assert frame == {"forward": 2.0, "yaw": 3.0}


# ---- where the camera is
# --------------------------------------------------------------------------------------------

PLACE = f"{PARTS}.then(({{ app }}) => app.map.path.at(-1))"
IS_ON_PAGE = "document.querySelector('{}').offsetParent !== null"


def test_the_map_draws_what_the_server_says(village_page: Page, engine: FakeEngine) -> None:
    """A wall that stops the walker stops the dot."""
    page = village_page
    cells = torch.zeros(30, 30, dtype=torch.bool)
    cells[14 - 2] = True  # blocked from 2 m to the north on
    engine.grid = OccupancyGrid(cells, 30.0)
    engine.start_pose = StartPose(x_m=1.0, z_m=0.0, heading_degrees=0.0)
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 8)
    page.key("keyUp", "w")
    rest(page, engine)
    position = page.run(PLACE)
    assert moved(engine, "forward") * 0.5 > 4
    assert (position["x"], position["z"]) == (pytest.approx(1.0), pytest.approx(2.0, abs=0.1))
    assert page.text("#map-text").startswith(f"{position['z']:.1f} m from the start, facing 0°")


def test_there_is_no_map_of_an_unknown_place(village_page: Page, engine: FakeEngine) -> None:
    """A picture from elsewhere: the server does not say where the camera is."""
    start_now(village_page)
    later_chunks(engine, 1)
    assert not village_page.run(IS_ON_PAGE.format("#map"))
    engine.start_pose = StartPose(x_m=1.0, z_m=0.0, heading_degrees=0.0)
    village_page.press("r")
    village_page.wait_for(IS_ON_PAGE.format("#map"))


def test_a_world_started_from_the_view_starts_where_that_was(
    page: Page, engine: FakeEngine
) -> None:
    """The pose of the picture on the screen goes with it."""
    engine.start_pose = StartPose(x_m=1.0, z_m=2.0, heading_degrees=90.0)
    start_now(page)
    page.key("keyDown", "w")
    page.key("keyDown", "i")
    later_chunks(engine, 1)
    page.key("keyUp", "w")
    page.key("keyUp", "i")
    rest(page, engine)
    position = page.run(PLACE)
    page.run(f"{PARTS}.then(({{ app }}) => app.beginFromView())")
    wait_until(lambda: sum("image" in call.arrays for call in engine.chunks) == 2)
    start = next(call for call in reversed(engine.chunks) if "image" in call.arrays).params.options[
        "start_pose"
    ]
    assert (start["x_m"], start["z_m"]) == (pytest.approx(position["x"]), pytest.approx(2.0))
    assert start["x_m"] > 2
    assert start["heading_degrees"] == pytest.approx(90)
    assert start["pitch_degrees"] == pytest.approx(np.degrees(position["pitch"]))


def test_one_stays_on_the_ground_where_walls_are(
    browser: Browser, make_server: MakeServer, village: Path, engine: FakeEngine
) -> None:
    """Q and E are not offered and do nothing in a world with an occupancy grid."""
    description = read_description(village)
    assert description is not None
    walled = msgspec.structs.replace(description, grid=WorldGrid(file="map.png", side_m=30.0))
    server = make_server(world=village, info={"card": walled, "fps": 48.0})
    with browser.page(server.url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        start_now(page)
        page.key("keyDown", "e")
        rest(page, engine)
        page.key("keyUp", "e")
        assert moved(engine, "up") == 0
        page.press("h")
        page.wait_for("document.querySelector('#help-dialog').open")
        assert not page.run(IS_ON_PAGE.format(".rises"))


# ---- idle
# --------------------------------------------------------------------------------------------------


def test_an_idle_page_requests_for_nothing_and_a_key_resumes(
    page: Page, engine: FakeEngine
) -> None:
    """The last picture stays, without a word; the next key acts in the next chunk, whose
    pictures are shown.
    """
    start_now(page)
    rest(page, engine)
    pause(2.5)  # longer than a chunk that is overdue
    count, images, stalls = len(engine.chunks), shown(page), page.run(STALLS)
    assert (page.text("#status"), page.run("notices.hidden")) == ("Live", True)
    page.press("w")
    wait_until(lambda: len(engine.chunks) > count)
    assert axes(engine.chunks[count : count + 1])[0] == {"forward": 1.0}
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.player.numShown >= {images + LATER})")
    rest(page, engine)
    assert page.run(STALLS) == stalls, "to run out of pictures is no stall then"


def test_a_prompt_or_a_recording_keeps_an_idle_page_busy(page: Page, engine: FakeEngine) -> None:
    """A prompt for the two seconds that it takes to act, a recording until it ends."""
    start_now(page)
    rest(page, engine)
    count = len(engine.chunks)
    page.run(f"{PARTS}.then(({{ app }}) => app.setPrompt('rain'))")
    wait_until(lambda: len(engine.chunks) > count)
    assert engine.chunks[count].params.prompt == "rain"
    rest(page, engine)
    assert len(engine.chunks) - count == pytest.approx(1 + 2 * 48 / LATER, abs=1)
    page.press("v")
    later_chunks(engine, 12)
    page.press("v")
    rest(page, engine)


def test_an_idle_page_keeps_its_session(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """Its pings do, though no chunk is asked for in `session_idle_s`."""
    server = make_server(info={"fps": 48.0, "session_idle_s": 6.0})
    with browser.page(server.url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        start_now(page)
        rest(page, engine)
        pause(9)
        assert len(engine.worlds) == 1
        page.press("w")
        later_chunks(engine, 0)
        rest(page, engine)
        assert page.text("#status") == "Live"


# ---- measurements
# --------------------------------------------------------------------------------------------------


def test_input_to_photon_is_measured(page: Page, engine: FakeEngine) -> None:
    """From the key to the first picture that knows of it: at least one chunk's time, and not
    much more.
    """
    engine.delay_s = 0.2
    start_now(page)
    pause(1)
    for _ in range(3):
        page.press("d", 0.05)
        pause(0.8)
    text = page.wait_for(
        "(t => t !== '–' && t)(document.querySelector('[data-stat=photon]').textContent)"
    )
    assert 200 <= int(text.split()[0]) <= 1200
    total_ms, *parts_ms = (
        page.run(f"""{PARTS}.then(({{ app: {{ stats }} }}) => [stats.inputToPhotonMs.last,
        ...["waiting", "making", "buffer"].map((name) => stats.photonParts[name].last)])""")
    )
    assert sum(parts_ms) == pytest.approx(total_ms, abs=0.5)
    assert parts_ms[1] >= 190
    for name in ("waiting", "making", "buffered"):
        assert page.text(f".hud dl [data-stat={name}]").endswith(" ms")


LONGEST_MS = f"{PARTS}.then(({{ app }}) => app.stats.inputToPhotonMs.quantile(1))"


@pytest.mark.parametrize("kind", ["pause", "outage"])
def test_input_to_photon_leaves_out_what_is_not_the_servers(
    page: Page, server: PageServer, kind: str
) -> None:
    """A key pressed in a pause, or just before the connection broke, is no measurement; later
    ones are.
    """
    page.run(
        "window.ask = fetch; window.fetch = (...a) => (window.isDown ? Promise.reject(new Error()) "
        ": ask(...a))"
    )
    start_now(page)
    if kind == "pause":
        page.press(" ")
        page.press("d")
        pause(2)
        page.press(" ")
    else:
        page.run("window.isDown = true")
        server.cut_connections()
        page.press("d")
        page.wait_for("document.body.dataset.link === 'down'")
        pause(2)
        page.run("window.isDown = false")
        page.wait_for("document.body.dataset.link === 'up'")
    pause(1)
    for _ in range(2):
        page.press("d")
        pause(0.8)
    longest_ms = page.wait_for(LONGEST_MS)
    assert longest_ms < 1500


# ---- what else one does
# ---------------------------------------------------------------------------------------------


def test_the_prompt_changes_midstream(page: Page, engine: FakeEngine) -> None:
    """The new text goes with the next chunk, once, and the page says from which frame it holds."""
    start_now(page)
    page.run(
        "document.querySelector('#prompt').focus(); document.querySelector('#prompt').select()"
    )
    page.write("a snow storm")
    page.click("#apply")
    wait_until(lambda: any(call.params.prompt == "a snow storm" for call in engine.chunks))
    assert "Holds from frame" in page.wait_for(
        "(t => t.startsWith('Holds') && t)(document.querySelector('#prompt-state').textContent)"
    )
    rest(page, engine)
    assert [call.params.prompt for call in engine.chunks].count("a snow storm") == 1


def test_pause_stops_everything_and_continues(page: Page, engine: FakeEngine) -> None:
    """No chunk is asked for and no picture shown while paused, though a key is held."""
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.press(" ")
    pause(0.4)
    count, images = len(engine.chunks), shown(page)
    pause(0.6)
    assert (len(engine.chunks), shown(page)) == (count, images)
    assert page.text("#pause .label") == "Resume"
    assert page.text("#status") == "Paused"
    page.press(" ")
    later_chunks(engine, 1)


def test_starting_over_makes_the_same_world_again(page: Page, engine: FakeEngine) -> None:
    """Same picture, same seed, from the start; the old world is freed."""
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.key("keyUp", "w")
    seed = engine.chunks[0].params.seed
    page.click("#restart")
    wait_until(lambda: sum("image" in call.arrays for call in engine.chunks) == 2)
    again = next(call for call in reversed(engine.chunks) if "image" in call.arrays)
    assert again.params.seed == seed
    assert len(engine.worlds) == 1


def test_marks_are_places_to_go_back_to(page: Page, engine: FakeEngine) -> None:
    """A mark keeps the world; going back goes on from there, place and all, as often as one
    likes.
    """
    engine.start_pose = StartPose(x_m=0.0, z_m=0.0, heading_degrees=0.0)
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.key("keyUp", "w")
    page.press("b")
    page.wait_for("document.querySelectorAll('#marks li').length === 1")
    assert len(engine.worlds) == 2
    marked_z = page.run(f"{PARTS}.then(({{ app }}) => app.marks.all[0].place.z)")
    chunk = page.run(f"{PARTS}.then(({{ app }}) => app.marks.all[0].nextChunk)")
    assert marked_z > 0
    for _ in range(2):
        page.key("keyDown", "d")
        later_chunks(engine, 1)
        page.key("keyUp", "d")
        requested = len(engine.chunks)
        page.click("#marks button[data-act=back]")
        page.wait_for(
            f"{PARTS}.then(({{ app }}) => app.world.lastChunk >= {chunk} && !app.world.isHeld)"
        )
        wait_until(
            lambda before=requested: any(
                c.params.chunk_index == chunk for c in engine.chunks[before:]
            )
        )
        rest(page, engine)
        position = page.run(PLACE)
        assert (position["x"], position["z"]) == (
            pytest.approx(0, abs=1e-6),
            pytest.approx(marked_z, abs=1e-6),
        )
    wait_until(lambda: len(engine.worlds) == 2)  # the one marked and the one walked in
    page.click("#marks button[data-act=forget]")
    wait_until(lambda: len(engine.worlds) == 1)


def test_marks_requested_for_at_once_are_all_set(page: Page, engine: FakeEngine) -> None:
    """One after the other, between two chunks; none is dropped because another one is being set."""
    engine.delay_s = 0.2
    start_now(page)
    page.key("keyDown", "w")
    page.run(f"{PARTS}.then(({{ app }}) => {{ app.mark(); app.mark(); app.mark(); }})")
    page.wait_for("document.querySelectorAll('#marks li').length === 3")
    page.key("keyUp", "w")


def test_a_recording_is_a_real_mp4(page: Page, engine: FakeEngine, browser: Browser) -> None:
    """Downloaded as a file that other programs read: whole chunks, every frame in order."""
    before = browser.videos()
    start_now(page)
    page.press("v")
    later_chunks(engine, 3)
    page.press("v")
    [file] = wait_until(lambda: browser.videos() - before)
    frames_THWC, fps = decode_mp4(file.read_bytes())
    assert frames_THWC.shape[1:] == (192, 320, 3), "four times the world's 80 x 48"
    assert fps == 48
    assert len(frames_THWC) % LATER in (0, FIRST)
    assert len(frames_THWC) >= 2 * LATER
    brightness = frames_THWC[:, 96, 160, 1].astype(int)
    assert np.abs(np.diff(brightness) - 1).max() <= 2
    assert brightness[-1] - brightness[0] == pytest.approx(len(frames_THWC) - 1, abs=3)


def test_a_saved_image_and_a_recording_of_a_small_world_are_four_times_as_large(
    page: Page, engine: FakeEngine
) -> None:
    """Each pixel is a square of its colour."""
    sizes = f"""{PARTS}.then(async ({{ app }}) => {{ const make = URL.createObjectURL;
        const blob = await new Promise((done) => {{
            URL.createObjectURL = (b) => {{ done(b); return make(b); }}; app.savePicture(); }});
        URL.createObjectURL = make; const picture = await createImageBitmap(blob);
        return [picture.width, picture.height]; }})"""
    start_now(page)
    assert page.run(sizes) == [320, 192]


# ---- what goes wrong
# ------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_taken_up_again(
    page: Page, engine: FakeEngine, server: PageServer
) -> None:
    """The same world goes on: every chunk once and in order, on a path without a jump; the page
    says what happens.
    """
    engine.delay_s = 0.15
    start_now(page)
    page.key("keyDown", "w")
    indices = f"""{PARTS}.then(({{ app }}) => {{ window.seen = [];
        app.world.addEventListener("chunk", (e) => window.seen.push(e.detail.message.chunk_index)); }})"""  # noqa: E501
    page.run(indices)
    for _ in range(3):
        later_chunks(engine, 2)
        assert server.cut_connections() == 1
        page.wait_for("document.body.dataset.link === 'down'")
        page.wait_for("document.body.dataset.link === 'up'")
    later_chunks(engine, 3)
    page.key("keyUp", "w")
    seen = page.run("window.seen")
    assert seen == list(range(seen[0], seen[0] + len(seen)))
    assert len(engine.worlds) == 1
    delivered = {call.params.chunk_index: call for call in engine.chunks}  # the last try counts
    walked = [frame.get("forward", 0.0) for frame in axes([delivered[index] for index in seen])]
    # the first chunks may have been asked for before the key was down
    walking = walked[walked.index(1.0) :]
    assert len(walking) > 15
    assert set(walking) == {1.0}
    page.wait_for("notices.hidden")


def test_a_image_that_does_not_come_is_said_and_dims(page: Page, engine: FakeEngine) -> None:
    """After two seconds, though the connection is up; all is well again when it comes."""
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 3)
    engine.delay_s = 4.0
    page.wait_for(f"{STATUS} === 'No picture comes from the server'", 8)
    assert page.run("getComputedStyle(document.querySelector('#view')).filter") != "none"
    engine.delay_s = 0.0
    page.wait_for(f"{STATUS} === 'Live'", 8)
    page.wait_for("!document.querySelector('#stage').classList.contains('is-dimmed')")


def test_a_lost_connection_dims_the_image(
    page: Page, engine: FakeEngine, server: PageServer
) -> None:
    """Though nothing was asked for."""
    start_now(page)
    rest(page, engine)
    page.run("window.fetch = () => Promise.reject(new Error('down'))")
    server.cut_connections()
    page.wait_for("document.body.dataset.link === 'down'")
    assert page.run("document.querySelector('#stage').classList.contains('is-dimmed')")


def test_a_broken_image_brings_an_offer_to_go_back(village_page: Page, engine: FakeEngine) -> None:
    """To a copy that the page has taken by itself, ten seconds before; the world goes on from
    there.
    """
    page, before = village_page, len(engine.worlds)
    page.run(f"{PARTS}.then(({{ app }}) => {{ window.at = app; app.watch.look = () => {{}}; }})")
    start_now(page)
    page.run("for (let i = 0; i < 8; i++) at.watch.add({ quiet: 0.5, lively: 10 }, 0)")
    page.key("keyDown", "w")
    wait_until(lambda: len(engine.worlds) == before + 2, 20)
    chunk = max(call.params.chunk_index or 0 for call in engine.chunks)
    later_chunks(engine, 8)
    page.run("at.watch.add({ quiet: 0, lively: 0.1 }, performance.now() - 3000)")
    page.wait_for("notices.textContent.includes('lost its world')")
    assert page.text("#notices button") == "Go back 10 s"
    requested = len(engine.chunks)
    page.click("#notices button")
    page.wait_for("notices.textContent === 'Back where the world was whole.'")
    wait_until(
        lambda: any(
            (call.params.chunk_index or 0) <= chunk + 2 for call in engine.chunks[requested:]
        )
    )
    page.key("keyUp", "w")


def test_a_connection_lost_before_the_first_image(
    page: Page, engine: FakeEngine, server: PageServer
) -> None:
    """The beginning itself is asked for again."""
    engine.delay_s = 0.5
    page.click("#start .main")
    wait_until(lambda: engine.chunks)
    server.cut_connections()
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    later_chunks(engine, 1)


def test_a_world_the_server_lost_can_be_gone_on_from_its_image(
    page: Page, engine: FakeEngine
) -> None:
    """The page says so and offers the way out; the new world begins with the last picture."""
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 2)
    engine.worlds.clear()
    page.wait_for("notices.textContent.includes('no longer keeps')")
    last = grey(page)
    page.run("notices.querySelector('button').click()")
    wait_until(lambda: sum("image" in call.arrays for call in engine.chunks) == 2)
    image = next(call for call in reversed(engine.chunks) if "image" in call.arrays).arrays["image"]
    assert abs(int(image[24, 40, 1]) - last) <= 3
    later_chunks(engine, 1)


REMEMBER = """new MutationObserver(() => (window.told ??= []).push(document.querySelector("#status").textContent))
    .observe(document.querySelector("#status"), { childList: true, characterData: true, subtree: true })"""  # noqa: E501


def dead(params: DiffusionParams) -> None:
    raise EngineDeadError


@pytest.mark.parametrize("retained", [True, False], ids=["kept", "lost"])
def test_a_dead_engine_is_notified_at_once_and_as_it_is(
    page: Page, engine: FakeEngine, retained: bool
) -> None:
    """Not as a pause.

    The world is resumed or lost only when the server has shown which; both are said.
    """
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.run(REMEMBER)
    engine.fail = dead
    page.wait_for(f"{STATUS} === 'The engine has stopped'", 1.5)
    assert "The engine has stopped" in page.text("#notices")
    pause(1.5)  # the server still answers `resume`, but makes nothing
    assert page.text("#status") == "The engine has stopped"
    assert "resumed" not in page.text("#notices")
    last = page.run(f"{PARTS}.then(({{ app }}) => app.world.lastChunk)")
    if not retained:
        engine.worlds.clear()
    engine.fail = lambda params: None
    if retained:
        page.wait_for("notices.textContent === 'This world is resumed.'")
        page.wait_for(f"{STATUS} === 'Live'")
        page.wait_for(f"{PARTS}.then(({{ app }}) => app.world.lastChunk > {last})")
    else:
        page.wait_for("notices.textContent.startsWith('This world is lost')")
        assert page.text("#status") == "This world is lost"
        page.run("notices.querySelector('button').click()")
        page.wait_for(f"{STATUS} === 'Live'")
        wait_until(lambda: sum("image" in call.arrays for call in engine.chunks) == 2)
    assert "Paused" not in page.run("window.told")


def test_a_dead_engine_is_notified_in_a_pause_too(
    page: Page, engine: FakeEngine, server: PageServer
) -> None:
    """A paused page has nothing to ask; when its world is back, that is proven by a chunk, and
    the pause holds.
    """
    start_now(page)
    page.press(" ")
    page.wait_for(f"{STATUS} === 'Paused'")
    page.run(
        f"{PARTS}.then(({{ app }}) => app.interrupted({{ reason: 'x', retryMs: 250, code: 1011 }}))"
    )
    server.cut_connections()
    page.wait_for(f"{STATUS} === 'The engine has stopped'")
    page.wait_for("notices.textContent === 'This world is resumed.'")
    page.wait_for(f"{STATUS} === 'Paused'")
    images = shown(page)
    pause(0.5)
    assert shown(page) == images


def test_a_refused_request_stops_the_world_until_tried_again(
    page: Page, engine: FakeEngine
) -> None:
    """The page says why and that it has stopped; it is not the visitor's pause, and nothing is
    asked for meanwhile.
    """

    def refuse(params: DiffusionParams) -> None:
        raise RequestFailed("invalid_argument", "no such thing")

    start_now(page)
    page.key("keyDown", "w")
    engine.fail = refuse
    page.wait_for("notices.textContent.includes('no such thing')")
    assert page.text("#status") == "Stopped by an error"
    count = len(engine.chunks)
    pause(0.5)
    assert len(engine.chunks) == count
    engine.fail = lambda params: None
    page.run("notices.querySelector('button').click()")
    page.wait_for(f"{STATUS} === 'Live'")
    later_chunks(engine, 1)


def test_a_full_server_says_so_and_lets_in_later(page: Page, engine: FakeEngine) -> None:
    """`capacity` closes the connection; the page tells and goes on trying."""
    engine.max_worlds = 0
    page.click("#start .main")
    page.wait_for("!notices.hidden && /room|live|full|again/i.test(notices.textContent)")
    engine.max_worlds = 1
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')", 30)


def test_a_model_that_nothing_steers_is_notified_apart(
    browser: Browser, make_server: MakeServer
) -> None:
    """The page says why nothing can be walked through, and stops trying."""
    server = make_server(info={"actions": ActionSpace()})
    with browser.page(server.url) as page:
        page.wait_for("document.body.dataset.link === 'refused'")
        assert "camera" in page.text("#notices")
        assert page.run("document.querySelector('#start').elements.start.disabled")


def test_other_geometries_come_from_the_greeting(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """Sizes and frame rate are the server's; nothing is one model's."""
    info = {"height": 96, "width": 128, "fps": 8.0, "patch_size": (1, 4, 4)}
    with browser.page(make_server(info=info).url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        assert page.run(
            "[...document.querySelector('#start').elements.size.options].map((o) => o.value)"
        ) == ["128x96"]
        start_now(page)
        page.key("keyDown", "w")
        before = shown(page)
        pause(2)
        assert 13 <= shown(page) - before <= 19


# ---- who it is for
# --------------------------------------------------------------------------------------------------


def test_with_a_key_the_page_requests_for_it(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """A wrong key is said to be wrong; the right one is traded for tickets and shows up in no
    address and no store.
    """
    server = make_server(keys=["sesame street"])
    with browser.page(server.url) as page:
        for text in ("wrong", "sesame street"):
            page.wait_for("document.querySelector('#key-dialog').open")
            page.run("document.querySelector('#key-dialog input').focus()")
            page.write(text)
            page.click("#key-dialog .main")
            if text == "wrong":
                page.wait_for("!document.querySelector('#key-dialog .wrong').hidden")
        page.wait_for("document.body.dataset.link === 'up'")
        start_now(page)
        page.key("keyDown", "w")
        server.cut_connections()  # the next connection needs another ticket
        later_chunks(engine, 2)
        assert not any("sesame" in url or "ticket=" in url for url in page.requested)
        assert (
            page.run("JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])")
            == '[{},{},""]'
        )
        assert all("401" in error for error in page.errors)


def test_nothing_comes_from_elsewhere(page: Page, server: PageServer, engine: FakeEngine) -> None:
    """Every address asked for is this server's, and the policy forbids others."""
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
    """Everything fits the width; a thumb on the left stick walks."""
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


def test_everything_has_a_name_and_can_be_reached_by_keyboard(
    page: Page, engine: FakeEngine
) -> None:
    """Buttons and fields are named, nothing jumps the tab order, the world is begun and steered
    without a mouse.
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
    page.send(
        "Input.dispatchKeyEvent",
        type="keyDown",
        key="Enter",
        code="Enter",
        windowsVirtualKeyCode=13,
        text="\r",
    )
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    page.key("keyDown", "w")
    assert axes(later_chunks(engine, 1))[-1] == {"forward": 1.0}
    page.key("keyUp", "w")


def test_text_is_readable(page: Page, engine: FakeEngine) -> None:
    """Contrast of text on its ground is at least 4.5 to 1 in the dark and the light scheme (WCAG
    AA).
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
