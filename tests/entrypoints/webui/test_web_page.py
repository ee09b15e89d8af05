# SPDX-License-Identifier: Apache-2.0
"""The web page as a user sees it: headless Chromium, real sockets and a fake engine.

test_page_smoke.py is the part of it that `make test` runs.
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

pytestmark = pytest.mark.nightly

PARTS = "import('/omni/js/main.js').then((m) => m.parts)"
STATUS = "document.querySelector('#status').textContent"
STALLS = f"{PARTS}.then(({{ app }}) => app.player.numStalls)"


def start_now(page: Page) -> None:
    """Start with the defaults of the panel and wait for the first image."""
    page.click("#start .main")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")


def later_chunks(engine: FakeEngine, count: int = 3) -> list[Call]:
    """The next `count` chunks that are requested from now on, without one that may be in flight."""
    start = len(engine.chunks) + 1
    wait_until(lambda: len(engine.chunks) >= start + count)
    return engine.chunks[start : start + count]


def axes(calls: list[Call]) -> list[dict[str, float]]:
    """Axes of each latent frame."""
    return [as_frame(entry).axes for call in calls for entry in call.params.actions or []]


def moved(engine: FakeEngine, axis: str) -> float:
    """Sum of an axis over all frames so far."""
    return sum(frame.get(axis, 0.0) for frame in axes(engine.chunks))


def rest(page: Page, engine: FakeEngine) -> None:
    """Wait until the page requests no more chunks."""
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.isResting)")
    count = len(engine.chunks)
    pause(0.5)
    assert len(engine.chunks) == count


def shown(page: Page) -> int:
    return page.run(f"{PARTS}.then(({{ app }}) => app.player.numShown)")


def grey(page: Page) -> int:
    """Brightness at the centre of the image: frame n of the fake engine is n % 256."""
    code = (
        "{ const c = document.querySelector('#view'); return "
        "c.getContext('2d').getImageData(40, 24, 1, 1).data[1]; }"
    )
    return page.run(f"(() => {code})()")


# ---- the world moves
# ------------------------------------------------------------------------------------------------


CHOOSE = """((name, type, bytes) => { const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name, { type }));
    document.querySelector("#stage").dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true })); })"""  # noqa: E501


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("broken.png", "image/png", "broken.png is no picture that can be read"),
        ("IMG_1.HEIC", "image/heic", "Browsers cannot read HEIC pictures"),
        ("IMG_2.heic", "", "Browsers cannot read HEIC pictures"),
        ("mine.pdf", "application/pdf", "PNG"),
    ],
)
def test_a_file_that_is_no_image_does_not_become_a_tile(
    page: Page, name: str, kind: str, said: str
) -> None:
    """It is refused with a reason when it is chosen."""
    page.run(f"{CHOOSE}({name!r}, {kind!r}, new Uint8Array([1, 2, 3]))")
    page.wait_for("!notices.hidden")
    assert said in page.text("#notices")
    assert not page.run("document.querySelector('.upload').classList.contains('has-image')")
    page.errors.clear()


def test_a_large_image_is_scaled_down_in_the_browser(page: Page, engine: FakeEngine) -> None:
    """Noise of 3000 x 1500 pixels exceeds the server's limit in bytes and arrives as 2048 x
    1024.
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


# ---- a world with a description
# ---------------------------------------------------------------------------------------------


@pytest.fixture
def village_page(browser: Browser, make_server: MakeServer, village: Path) -> Iterator[Page]:
    """The page of a checkpoint with a world description. The engine is a fake."""
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
    """The button of a prompt shows its images, and the chosen one starts the session."""
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
    """One click changes the prompt, and the active button is marked."""
    page = village_page
    start_now(page)
    assert page.run(PRESSED.format("#prompts")) == "Day"
    page.run("document.querySelectorAll('#prompts button')[1].click()")
    page.wait_for(f"{PRESSED.format('#prompts')} === 'Dusk'")
    prompts = [call.params.prompt for call in engine.chunks if call.params.prompt is not None]
    assert prompts == ["the village on a sunny day", "the village at dusk"]


def test_a_foreign_image_is_accepted_with_a_notice(village_page: Page, engine: FakeEngine) -> None:
    """The panel describes the limits of the world, and a notice repeats them once when the walk
    starts.
    """
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


def test_the_map_shows_the_ground_at_the_position(village_page: Page, engine: FakeEngine) -> None:
    """The map shows the ground at the position, and distances are in metres."""
    page = village_page
    engine.start_pose = StartPose(x_m=1.2, z_m=-4.0, heading_degrees=0.0)
    start_now(page)  # on the square at (1.2, -4), on the sandy path, the pond to the east
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.map.path.length > 5)")
    pause(0.3)
    pixel = """((dx, dy) => { const c = document.querySelector('#map'), d = devicePixelRatio || 1;
        const x = c.width / 2 + dx * d, y = c.height / 2 + dy * d;
        return [...c.getContext('2d').getImageData(x, y, 1, 1).data]; })"""
    height = page.run("document.querySelector('#map').clientHeight")
    metre = (height - 36) / 15  # half of the map's 30 m is shown around a resting camera
    assert page.run("document.querySelector('#map').offsetParent !== null")
    red, _, blue, alpha = page.run(f"{pixel}({2.6 * metre}, {0.6 * metre})")
    assert alpha == 255
    assert blue > red + 50, "the pond, 2.6 m east and 0.6 m south"
    red, green, blue, _ = page.run(f"{pixel}({-3 * metre}, {-0.1 * metre})")
    assert green > blue + 30, "grass to the west"
    assert page.text("#map-text").startswith("0.0 m from the start, facing 0°.")


# ---- controls
# --------------------------------------------------------------------------------------------------


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
    """Steps along the ground and up, degrees to the right and up, in each latent frame."""
    start_now(page)
    page.key("keyDown", key)
    assert axes(later_chunks(engine, 1)) == [{axis: value}] * 3
    page.key("keyUp", key)


ACTIVE = "document.activeElement.id"


def test_after_a_click_keys_steer_the_world(page: Page, engine: FakeEngine) -> None:
    """Space pauses instead of pressing a button again, and arrows look instead of moving a
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


def test_keys_do_not_move_while_one_types(page: Page, engine: FakeEngine) -> None:
    """Letters in the prompt field are text."""
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


def test_losing_the_focus_releases_all_keys(page: Page, engine: FakeEngine) -> None:
    """A window in the background does not walk on."""
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.run("dispatchEvent(new Event('blur'))")
    rest(page, engine)


def test_dragging_looks_around(page: Page, engine: FakeEngine) -> None:
    """A drag to the left looks to the right."""
    start_now(page)
    page.drag("#view", -150, 40)
    wait_until(lambda: moved(engine, "turn") > 17)
    rest(page, engine)
    assert moved(engine, "turn") == pytest.approx(150 * 0.126, abs=0.1)
    assert moved(engine, "look") == pytest.approx(40 * 0.126, abs=0.1)


def test_a_gamepad_steers(page: Page, engine: FakeEngine) -> None:
    """The left stick walks in proportion, and a resting stick does nothing."""
    start_now(page)
    pad = (
        "{ connected: true, mapping: 'standard', axes: [0.05, -0.575, 0, 0], buttons: "
        "Array(17).fill({ value: 0 }) }"
    )
    page.run(f"navigator.getGamepads = () => [{pad}]")
    assert axes(later_chunks(engine, 2))[-1] == {"forward": pytest.approx(0.5)}


def test_sliders_change_the_speed(page: Page, engine: FakeEngine) -> None:
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


def test_the_map_shows_the_poses_of_the_server(village_page: Page, engine: FakeEngine) -> None:
    """The dot stops at a wall."""
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


def test_there_is_no_map_without_a_pose(village_page: Page, engine: FakeEngine) -> None:
    """The server reports no pose for a foreign image."""
    start_now(village_page)
    later_chunks(engine, 1)
    assert not village_page.run(IS_ON_PAGE.format("#map"))
    engine.start_pose = StartPose(x_m=1.0, z_m=0.0, heading_degrees=0.0)
    village_page.press("r")
    village_page.wait_for(IS_ON_PAGE.format("#map"))


def test_a_world_started_from_the_view_has_its_pose(page: Page, engine: FakeEngine) -> None:
    """The request holds the pose of the shown image."""
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


def test_the_camera_stays_on_the_ground_in_a_world_with_walls(
    browser: Browser, make_server: MakeServer, village: Path, engine: FakeEngine
) -> None:
    """Q and E are neither offered nor used in a world with an occupancy grid."""
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


def test_an_idle_page_requests_nothing_and_a_key_resumes(page: Page, engine: FakeEngine) -> None:
    """The last image stays without a notice, and the next key acts in the next chunk."""
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


def test_an_idle_page_keeps_its_session(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """Its pings keep the session although no chunk is requested in `session_idle_s`."""
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
    """The time from the key to the first image with its effect is at least that of one chunk."""
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


# ---- other controls
# ---------------------------------------------------------------------------------------------


def test_the_prompt_changes_midstream(page: Page, engine: FakeEngine) -> None:
    """The next chunk holds the new text once, and the page shows the frame from which it acts."""
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
    """A paused page requests and shows nothing although a key is held."""
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
    """Image and seed are the same, and the old session is freed."""
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


def test_a_mark_restores_its_session(page: Page, engine: FakeEngine) -> None:
    """A mark keeps a copy of the session, which can be continued several times."""
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


def test_a_recording_is_a_real_mp4(page: Page, engine: FakeEngine, browser: Browser) -> None:
    """The downloaded file holds whole chunks with every frame in order."""
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


def test_a_saved_image_of_a_small_world_is_four_times_as_large(
    page: Page, engine: FakeEngine
) -> None:
    """Each pixel becomes a square."""
    sizes = f"""{PARTS}.then(async ({{ app }}) => {{ const make = URL.createObjectURL;
        const blob = await new Promise((done) => {{
            URL.createObjectURL = (b) => {{ done(b); return make(b); }}; app.savePicture(); }});
        URL.createObjectURL = make; const picture = await createImageBitmap(blob);
        return [picture.width, picture.height]; }})"""
    start_now(page)
    assert page.run(sizes) == [320, 192]


# ---- errors
# ------------------------------------------------------------------------------------------------


def test_a_lost_connection_is_resumed(page: Page, engine: FakeEngine, server: PageServer) -> None:
    """The session continues with every chunk once and in order, and the page shows the state."""
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
    # the first chunks may have been requested before the key was pressed
    walking = walked[walked.index(1.0) :]
    assert len(walking) > 15
    assert set(walking) == {1.0}
    page.wait_for("notices.hidden")


def test_a_missing_image_is_reported_and_dimmed(page: Page, engine: FakeEngine) -> None:
    """The notice comes after two seconds, although the connection is up, and ends with the next
    image.
    """
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 3)
    engine.delay_s = 4.0
    page.wait_for(f"{STATUS} === 'No picture comes from the server'", 8)
    assert page.run("getComputedStyle(document.querySelector('#view')).filter") != "none"
    engine.delay_s = 0.0
    page.wait_for(f"{STATUS} === 'Live'", 8)
    page.wait_for("!document.querySelector('#stage').classList.contains('is-dimmed')")


def test_a_broken_image_offers_to_go_back(village_page: Page, engine: FakeEngine) -> None:
    """The page offers the copy that it made ten seconds before, and the session continues there."""
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


def test_an_image_of_the_ground_is_not_taken_for_broken(
    village_page: Page, engine: FakeEngine
) -> None:
    """Looking far down, the right picture may be flat, and the page does not judge it."""
    page, engine.start_pose = village_page, StartPose(x_m=0, z_m=0, heading_degrees=0)
    page.run(
        f"{PARTS}.then(({{ app }}) => {{ window.judged = 0; app.watch.look = () => judged++; }})"
    )
    start_now(page)
    page.key("keyDown", "k")
    wait_until(lambda: moved(engine, "pitch") < -40)
    later_chunks(engine, 4)
    judged = page.run("judged")
    later_chunks(engine, 4)
    assert judged > 0 and page.run("judged") == judged
    page.key("keyUp", "k")


def test_a_connection_lost_before_the_first_image(
    page: Page, engine: FakeEngine, server: PageServer
) -> None:
    """The first request is sent again."""
    engine.delay_s = 0.5
    page.click("#start .main")
    wait_until(lambda: engine.chunks)
    server.cut_connections()
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    later_chunks(engine, 1)


def test_a_lost_world_can_continue_from_its_last_image(page: Page, engine: FakeEngine) -> None:
    """The page offers a new session that starts with the last image."""
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
def test_a_dead_engine_is_reported(page: Page, engine: FakeEngine, retained: bool) -> None:
    """It is not shown as a pause. The page reports a resumed or a lost session only after the
    server has shown which it is.
    """
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.run(REMEMBER)
    engine.fail = dead
    page.wait_for(f"{STATUS} === 'The engine has stopped'", 1.5)
    assert "The engine has stopped" in page.text("#notices")
    pause(1.5)  # the server still answers `resume`, but generates nothing
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


def test_a_refused_request_stops_the_world_until_tried_again(
    page: Page, engine: FakeEngine
) -> None:
    """The page shows the reason, which differs from a pause, and requests nothing meanwhile."""

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


def test_a_full_server_is_reported_and_retried(page: Page, engine: FakeEngine) -> None:
    """`capacity` closes the connection, and the page retries."""
    engine.max_worlds = 0
    page.click("#start .main")
    page.wait_for("!notices.hidden && /room|live|full|again/i.test(notices.textContent)")
    engine.max_worlds = 1
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')", 30)


def test_a_model_without_controls_is_reported(browser: Browser, make_server: MakeServer) -> None:
    """The page shows the reason and stops retrying."""
    server = make_server(info={"actions": ActionSpace()})
    with browser.page(server.url) as page:
        page.wait_for("document.body.dataset.link === 'refused'")
        assert "camera" in page.text("#notices")
        assert page.run("document.querySelector('#start').elements.start.disabled")


def test_sizes_and_frame_rate_come_from_the_server(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """Sizes and frame rate are the server's."""
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


# ---- access and accessibility
# --------------------------------------------------------------------------------------------------


def test_the_world_page_asks_for_the_key(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """A wrong key gets an error. The right one is exchanged for tickets and is in no address and no
    storage.
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
    """Every requested address is this server's, and the policy forbids others."""
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
    """Everything fits the width, and the left stick walks."""
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
    """Buttons and fields have names, the tab order is natural, and a session can be started and
    steered without a mouse.
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
    """The contrast of text is at least 4.5 to 1 in the dark and the light scheme (WCAG AA)."""
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
