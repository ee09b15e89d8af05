# SPDX-License-Identifier: Apache-2.0
"""Tests of the web page for a world with a description: images, prompts, map and camera position.
The tests use headless Chromium, real sockets and a fake engine.
"""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from browser import Browser, Page
from helpers.fake_engine import FakeEngine
from helpers.waits import pause, wait_until
from page_driving import PARTS, PLACE, later_chunks, moved, rest, start_now
from page_server import MakeServer

from vllm_omni.worlds.description import WorldGrid, read_description
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.start_pose import StartPose

pytestmark = pytest.mark.nightly

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
    """As soon as the user chooses a file that is not an image, the page rejects it and states the
    reason.
    """
    page.run(f"{CHOOSE}({name!r}, {kind!r}, new Uint8Array([1, 2, 3]))")
    page.wait_for("!notices.hidden")
    assert said in page.text("#notices")
    assert not page.run("document.querySelector('.upload').classList.contains('has-image')")
    page.errors.clear()


def test_a_large_image_is_scaled_down_in_the_browser(page: Page, engine: FakeEngine) -> None:
    """The browser scales a large image down: a noise image of 3000 x 1500 pixels, which exceeds the
    server's byte limit, arrives at 2048 x 1024 pixels.
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


TILES = """[...document.querySelectorAll('[name=sample]')].map((radio) =>
    radio.closest('label').querySelector('img').src.split('/').at(-1).replace('.png', ''))"""
PRESSED = "document.querySelector('{} [aria-pressed=true]')?.textContent"


def test_a_world_offers_its_own_images_and_prompts(village_page: Page, engine: FakeEngine) -> None:
    """Clicking a prompt's button shows the images for that prompt, and the session starts with the
    chosen image.
    """
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
    """One click on a prompt button during a walk changes the prompt, and the button of the active
    prompt is marked.
    """
    page = village_page
    start_now(page)
    assert page.run(PRESSED.format("#prompts")) == "Day"
    page.run("document.querySelectorAll('#prompts button')[1].click()")
    page.wait_for(f"{PRESSED.format('#prompts')} === 'Dusk'")
    prompts = [call.params.prompt for call in engine.chunks if call.params.prompt is not None]
    assert prompts == ["the village on a sunny day", "the village at dusk"]


def test_a_foreign_image_is_accepted_with_a_notice(village_page: Page, engine: FakeEngine) -> None:
    """If the user chooses an image that does not show the world, the panel describes the world's
    limits, and a notice repeats them once when the walk starts.
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
    """The map shows the ground at the camera's position, with a scale in metres."""
    page = village_page
    engine.start_pose = StartPose(x_m=1.2, z_m=-4.0, heading_degrees=0.0)
    start_now(page)  # at (1.2, -4), on the sandy path of the square, west of the pond
    page.wait_for(f"{PARTS}.then(({{ app }}) => app.map.path.length > 5)")
    pause(0.3)
    pixel = """((dx, dy) => { const c = document.querySelector('#map'), d = devicePixelRatio || 1;
        const x = c.width / 2 + dx * d, y = c.height / 2 + dy * d;
        return [...c.getContext('2d').getImageData(x, y, 1, 1).data]; })"""
    height = page.run("document.querySelector('#map').clientHeight")
    metre = (height - 36) / 15  # around a camera at rest, half of the map's 30 m is shown
    assert page.run("document.querySelector('#map').offsetParent !== null")
    red, _, blue, alpha = page.run(f"{pixel}({2.6 * metre}, {0.6 * metre})")
    assert alpha == 255
    assert blue > red + 50, "the pond, 2.6 m east and 0.6 m south"
    red, green, blue, _ = page.run(f"{pixel}({-3 * metre}, {-0.1 * metre})")
    assert green > blue + 30, "grass to the west"
    assert page.text("#map-text").startswith("0.0 m from the start, facing 0°.")


IS_ON_PAGE = "document.querySelector('{}').offsetParent !== null"


def test_the_map_shows_the_poses_of_the_server(village_page: Page, engine: FakeEngine) -> None:
    """The map shows the poses that the server reports, so the dot on the map stops at walls."""
    page = village_page
    cells = torch.zeros(30, 30, dtype=torch.bool)
    cells[14 - 2] = True  # blocked from 2 m to the north
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
    """The page shows no map for an image that does not show the world, because the server reports
    no pose for it.
    """
    start_now(village_page)
    later_chunks(engine, 1)
    assert not village_page.run(IS_ON_PAGE.format("#map"))
    engine.start_pose = StartPose(x_m=1.0, z_m=0.0, heading_degrees=0.0)
    village_page.press("r")
    village_page.wait_for(IS_ON_PAGE.format("#map"))


def test_a_world_started_from_the_view_has_its_pose(page: Page, engine: FakeEngine) -> None:
    """A request to start a new session from the current view contains the pose of the displayed
    image.
    """
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
    """In a world with an occupancy grid, the keys Q and E are neither offered nor used."""
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
