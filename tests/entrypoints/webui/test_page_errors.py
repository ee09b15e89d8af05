# SPDX-License-Identifier: Apache-2.0
"""Tests of the errors that the web page shows and of how the user can continue. The tests use
headless Chromium, real sockets and a fake engine.
"""

import pytest
import torch
from browser import Browser, Page
from helpers.fake_engine import FakeEngine
from helpers.waits import pause, wait_until
from page_driving import PARTS, STATUS, axes, grey, later_chunks, moved, shown, start_now
from page_server import MakeServer, PageServer
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni.actions import ActionSpace
from vllm_omni.inputs import DiffusionParams
from vllm_omni.outputs import RequestFailed
from vllm_omni.worlds.grid import OccupancyGrid
from vllm_omni.worlds.start_pose import StartPose

pytestmark = pytest.mark.nightly


def test_a_lost_connection_is_resumed(page: Page, engine: FakeEngine, server: PageServer) -> None:
    """After a lost connection, the session continues, and every chunk arrives once and in order.
    The page shows the connection state.
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
    # If a chunk was requested several times, only its last request counts.
    delivered = {call.params.chunk_index: call for call in engine.chunks}
    walked = [frame.get("forward", 0.0) for frame in axes([delivered[index] for index in seen])]
    # The page may have requested its first chunks before the key was pressed.
    walking = walked[walked.index(1.0) :]
    assert len(walking) > 15
    assert set(walking) == {1.0}
    page.wait_for("notices.hidden")


def test_a_missing_image_is_reported_and_dimmed(page: Page, engine: FakeEngine) -> None:
    """If no image arrives for two seconds, the page dims the last image and shows a notice, even if
    the connection is up. When the next image arrives, the notice disappears.
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
    """When images break down, the page offers to go back to a copy of the session made ten seconds
    earlier. If the user accepts, the session continues from that copy.
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


def test_an_image_of_the_ground_is_not_taken_for_broken(
    village_page: Page, engine: FakeEngine
) -> None:
    """When the camera looks far down, a correct image may have little detail, so the page does not
    check whether the image is broken.
    """
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


def test_an_image_of_a_wall_is_not_taken_for_broken(village_page: Page, engine: FakeEngine) -> None:
    """When an obstacle stops the camera, a correct image may have little detail, so the page does
    not check images until the camera moves freely again.
    """
    page, engine.start_pose = village_page, StartPose(x_m=0, z_m=0, heading_degrees=0)
    cells = torch.zeros(30, 30, dtype=torch.bool)
    cells[14 - 3] = True  # blocked from 3 m to the north
    engine.grid = OccupancyGrid(cells, 30.0)
    page.run(
        f"{PARTS}.then(({{ app }}) => {{ window.judged = 0; app.watch.look = () => judged++; }})"
    )
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 12)
    judged = page.run("judged")
    later_chunks(engine, 4)
    assert judged > 0 and page.run("judged") == judged
    page.key("keyUp", "w")
    page.key("keyDown", "s")
    page.wait_for(f"judged > {judged}")
    page.key("keyUp", "s")


def test_a_connection_lost_before_the_first_image(
    page: Page, engine: FakeEngine, server: PageServer
) -> None:
    """If the connection is lost before the first image arrives, the page sends its first request
    again.
    """
    engine.delay_s = 0.5
    page.click("#start .main")
    wait_until(lambda: engine.chunks)
    server.cut_connections()
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    later_chunks(engine, 1)


def test_a_lost_world_can_continue_from_its_last_image(page: Page, engine: FakeEngine) -> None:
    """When the server has lost the session, the page offers to start a new session from the last
    image.
    """
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
    """A dead engine is not shown as a pause. The page reports the session as resumed or lost only
    when the server's behaviour shows which of the two applies.
    """
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.run(REMEMBER)
    engine.fail = dead
    page.wait_for(f"{STATUS} === 'The engine has stopped'", 1.5)
    assert "The engine has stopped" in page.text("#notices")
    pause(1.5)  # the server still responds to `resume`, but generates nothing
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


SILENT = "Connection lost (the connection went silent). Reconnecting …"
REMEMBER_NOTICES = """new MutationObserver(() => (window.told ??= []).push(notices.textContent))
    .observe(notices, { childList: true, characterData: true, subtree: true })"""


def test_an_unanswered_ping_is_not_taken_for_a_dead_engine(
    page: Page, engine: FakeEngine, server: PageServer
) -> None:
    """A server that gets no reply to its pings, for example because the laptop slept, closes the
    connection with 1011. The page reports a silent connection and resumes the session.
    """
    start_now(page)
    page.key("keyDown", "w")
    later_chunks(engine, 1)
    page.run(REMEMBER_NOTICES)
    assert server.time_out_pings() == 1
    page.wait_for(f"window.told?.includes({SILENT!r})")
    page.wait_for("window.told.includes('This world is resumed.')")
    later_chunks(engine, 2)
    assert not any("engine" in text for text in page.run("window.told"))


@pytest.mark.parametrize("is_later", [False, True], ids=["at_once", "after_a_later_chunk"])
def test_an_unanswered_ping_after_an_engine_error(
    page: Page, engine: FakeEngine, server: PageServer, is_later: bool
) -> None:
    """An unanswered ping means a dead engine if `engine_error` came before. It does not if a chunk
    has arrived since that error, because the chunk shows that the engine is alive.
    """

    def fail(params: DiffusionParams) -> None:
        raise RequestFailed("engine_error", "no such luck")

    start_now(page)
    page.key("keyDown", "w")
    engine.fail = fail
    page.wait_for("notices.textContent.includes('no such luck')")
    page.run(REMEMBER_NOTICES)
    engine.fail = lambda params: None
    if is_later:
        last = page.run(f"{PARTS}.then(({{ app }}) => app.world.lastChunk)")
        page.run("notices.querySelector('button').click()")
        page.wait_for(f"{PARTS}.then(({{ app }}) => app.world.lastChunk > {last})")
    server.time_out_pings()
    expected = SILENT if is_later else "The engine has stopped"
    page.wait_for(f"window.told?.some((text) => text.startsWith({expected!r}))")
    page.wait_for("window.told.includes('This world is resumed.')")


def test_a_refused_request_stops_the_world_until_tried_again(
    page: Page, engine: FakeEngine
) -> None:
    """After a refused request, the page shows the reason and a status other than `Paused`. It
    requests nothing until the user tries again.
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


def test_a_full_server_is_reported_and_retried(page: Page, engine: FakeEngine) -> None:
    """When a full server closes the connection with `capacity`, the page says that the server is
    full and retries.
    """
    engine.max_worlds = 0
    page.click("#start .main")
    page.wait_for("!notices.hidden && /room|live|full|again/i.test(notices.textContent)")
    engine.max_worlds = 1
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')", 30)


def test_a_model_without_controls_is_reported(browser: Browser, make_server: MakeServer) -> None:
    """If the model has no controls, the page shows the reason and stops retrying."""
    server = make_server(info={"actions": ActionSpace()})
    with browser.page(server.url) as page:
        page.wait_for("document.body.dataset.link === 'refused'")
        assert "camera" in page.text("#notices")
        assert page.run("document.querySelector('#start').elements.start.disabled")


def test_sizes_and_frame_rate_come_from_the_server(
    browser: Browser, make_server: MakeServer, engine: FakeEngine
) -> None:
    """The page uses the image sizes and the frame rate that the server reports."""
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
