# SPDX-License-Identifier: Apache-2.0
"""Tests of the web page as a user sees it: controls, prompts, idle time, marks, recordings and
saved images. The tests use headless Chromium, real sockets and a fake engine.

`make test` does not run these tests. The only browser test that it runs is test_page_smoke.py.
"""

import numpy as np
import pytest
from browser import Browser, Page
from helpers.fake_engine import FIRST, LATER, FakeEngine
from helpers.waits import pause, wait_until
from page_driving import (
    PARTS,
    PLACE,
    STALLS,
    axes,
    later_chunks,
    moved,
    press_enter,
    rest,
    shown,
    start_now,
)
from page_server import MakeServer

from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.worlds.start_pose import StartPose

pytestmark = pytest.mark.nightly


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
    """In each latent frame, a held key moves the camera by one step or turns it by a few degrees.
    The key determines the axis and the sign.
    """
    start_now(page)
    page.key("keyDown", key)
    assert axes(later_chunks(engine, 1)) == [{axis: value}] * 3
    page.key("keyUp", key)


ACTIVE = "document.activeElement.id"


def test_after_a_click_keys_steer_the_world(page: Page, engine: FakeEngine) -> None:
    """After a click on a control, keys still steer the camera. Space pauses instead of pressing the
    control again, and the arrow keys look around instead of moving a slider.
    """
    start_now(page)
    for control in ("#overlay", "#pause", "#pause", ".hud summary"):
        page.click(control)
        page.wait_for(f"{ACTIVE} === 'stage'")
    page.click("#speed")
    page.wait_for(f"{ACTIVE} === 'stage'")
    page.run("document.querySelector('#prompt').focus()")
    page.write("rain")
    press_enter(page)
    page.wait_for(f"{ACTIVE} === 'stage'")
    page.click("#help")
    page.run("document.querySelector('#help-dialog button').click()")
    page.wait_for(f"{ACTIVE} === 'stage'")
    page.press(" ")
    page.wait_for("document.querySelector('#status').textContent === 'Paused'")


def test_keys_do_not_move_while_one_types(page: Page, engine: FakeEngine) -> None:
    """Letters typed in the prompt field are text and do not move the camera."""
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
    """When the window loses focus, all keys are released, so the camera does not keep moving while
    the window is in the background.
    """
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.run("dispatchEvent(new Event('blur'))")
    rest(page, engine)


def test_dragging_looks_around(page: Page, engine: FakeEngine) -> None:
    """Dragging to the left turns the camera to the right."""
    start_now(page)
    page.drag("#view", -150, 40)
    wait_until(lambda: moved(engine, "turn") > 17)
    rest(page, engine)
    assert moved(engine, "turn") == pytest.approx(150 * 0.126, abs=0.1)
    assert moved(engine, "look") == pytest.approx(40 * 0.126, abs=0.1)


def test_a_gamepad_steers(page: Page, engine: FakeEngine) -> None:
    """A gamepad's left stick moves the camera in proportion to the stick's deflection. A stick that
    is not deflected has no effect.
    """
    start_now(page)
    pad = (
        "{ connected: true, mapping: 'standard', axes: [0.05, -0.575, 0, 0], buttons: "
        "Array(17).fill({ value: 0 }) }"
    )
    page.run(f"navigator.getGamepads = () => [{pad}]")
    assert axes(later_chunks(engine, 2))[-1] == {"forward": pytest.approx(0.5)}


def test_sliders_change_the_speed(page: Page, engine: FakeEngine) -> None:
    """The sliders for walking and turning speed take effect at the next chunk."""
    start_now(page)
    page.run("speed.value = 2; speed.dispatchEvent(new Event('input'))")
    page.run("turn.value = 0.5; turn.dispatchEvent(new Event('input'))")
    page.key("keyDown", "w")
    page.key("keyDown", "l")
    frame = axes(later_chunks(engine, 1))[0]
    page.key("keyUp", "w")
    page.key("keyUp", "l")
    assert frame == {"forward": 2.0, "yaw": 3.0}


def test_an_idle_page_requests_nothing_and_a_key_resumes(page: Page, engine: FakeEngine) -> None:
    """An idle page requests nothing and keeps showing the last image without a notice. The next key
    press resumes the session and takes effect in the next chunk.
    """
    start_now(page)
    rest(page, engine)
    pause(2.5)  # longer than the delay after which a chunk counts as overdue
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
    """An idle page's pings keep its session alive, although the page requests no chunk within
    `session_idle_s`.
    """
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


def test_input_to_photon_is_measured(page: Page, engine: FakeEngine) -> None:
    """The page measures the time from a key press to the first image that shows the effect. This
    time is at least one chunk's duration.
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


def test_the_prompt_changes_midstream(page: Page, engine: FakeEngine) -> None:
    """A new prompt is sent once, with the next chunk, and the page indicates the frame at which the
    prompt takes effect.
    """
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
    """A paused page requests and shows nothing, even while a key is held."""
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
    """Starting over creates a session with the same image and seed, and frees the old session."""
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
    """A mark keeps a copy of the session, and the user can continue from that copy several
    times.
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
    wait_until(lambda: len(engine.worlds) == 2)  # the marked session and the current session
    page.click("#marks button[data-act=forget]")
    wait_until(lambda: len(engine.worlds) == 1)


def test_a_recording_is_a_real_mp4(page: Page, engine: FakeEngine, browser: Browser) -> None:
    """The downloaded recording is an MP4 file that contains whole chunks, with every frame in
    order.
    """
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
    """When an image of a small world is saved, each pixel is enlarged to a square of four by four
    pixels.
    """
    sizes = f"""{PARTS}.then(async ({{ app }}) => {{ const make = URL.createObjectURL;
        const blob = await new Promise((done) => {{
            URL.createObjectURL = (b) => {{ done(b); return make(b); }}; app.savePicture(); }});
        URL.createObjectURL = make; const picture = await createImageBitmap(blob);
        return [picture.width, picture.height]; }})"""
    start_now(page)
    assert page.run(sizes) == [320, 192]
