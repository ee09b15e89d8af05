# SPDX-License-Identifier: Apache-2.0
"""The page's session has moved to a server that no longer responds.

Most tests run the page's modules in a browser on a simulated network of two servers, in which time
passes faster. One test uses two real servers.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from browser import Browser, Page
from helpers.fake_engine import FakeEngine
from helpers.fleets import TestFleet, live_sessions, migrate
from helpers.served import KEY, family
from helpers.waits import seconds, wait_until
from page_driving import PARTS, STATUS, enter_key
from page_server import PageServer

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo

pytestmark = pytest.mark.nightly

NETWORK = """
const {Link} = await import('/omni/js/link.js');
const {World} = await import('/omni/js/world.js');
const {decode, encode} = await import('/omni/js/msgpack.js');
const kept = {fetch: window.fetch, WebSocket: window.WebSocket, setTimeout: window.setTimeout};
const soon = (ms = 0) => new Promise((done) => kept.setTimeout.call(window, done, ms));
const visits = [];     // names of the servers that were connected to, in order
const dead = new Set();
const resets = [];     // session ids in `reset` messages
let home = 'a';        // the server that has the session
let open = [];
let count = 0;
const serverOf = (url) => new URL(url).searchParams.get('server') ?? 'a';
window.setTimeout = (run, ms) => kept.setTimeout.call(window, run, ms / 50);
window.fetch = async (url) => dead.has(serverOf(url))
    ? new Response('', {status: 503}) : new Response('{"ticket": null}');
window.WebSocket = class {
  static OPEN = 1;
  readyState = 1;
  constructor(url) {
    this.name = serverOf(url);
    visits.push(this.name);
    open.push(this);
    this.say({session_id: `s${++count}`});
  }
  async say(message) {
    await soon();
    this.onmessage?.({data: encode(message)});
  }
  send(bytes) {
    const {endpoint, session_id, request_id, t} = decode(bytes);
    if (endpoint === 'ping') this.say({type: 'pong', t});
    if (endpoint === 'reset') resets.push(session_id);
    if (endpoint === 'ping' || endpoint === 'reset') return;
    if (session_id === 's1' && home !== this.name) this.say({...moved(), request_id});
    else if (endpoint === 'resume')
      this.say({type: 'resumed', session_id, next_chunk_index: world.lastChunk + 1, replayed: 0});
    else if (endpoint === 'infer')
      this.say({type: 'frame', session_id, request_id, chunk_index: world.lastChunk + 1,
                first_frame: 12 * (world.lastChunk + 1), num_frames: 12, final: true});
  }
  close() { open = open.filter((other) => other !== this); }
};
const moved = () => ({type: 'moved', session_id: 's1', server: home, retryable: true,
                      message: `the session continues on the server '${home}'`});
const move = (name) => { home = name; for (const socket of open) socket.say(moved()); };
const die = (name) => {
  dead.add(name);
  for (const socket of open.filter((each) => each.name === name)) socket.onclose?.({code: 1006});
};
const told = [];
const until = async (holds) => {
  for (const since = Date.now(); !holds();) {
    if (Date.now() - since > a[0]) throw new Error(`not so: ${holds}; ${visits} ${JSON.stringify(told)}`);
    await soon(5);
  }
};
const link = new Link(() => '');
const world = new World(link);
world.addEventListener('resumed', () => told.push('resumed'));
world.addEventListener('trouble', ({detail: {lost, text}}) => told.push([lost ? 'lost' : 'trouble', text]));
const isAt = (name) => link.isUp && !world.isHeld && open.at(-1)?.name === name;
const walk = async () => {
  const last = world.lastChunk;
  world.ask({steering: {actions: []}});
  await until(() => world.lastChunk > last);
};
const numLost = () => told.filter(([what]) => what === 'lost').length;
try {
  link.open();
  await until(() => link.isUp);
  world.begin();
  await walk();
"""  # noqa: E501
END = """
} finally {
  dead.clear();
  home = 'a';
  await until(() => link.isUp).catch(() => {});
  for (const socket of open) socket.onclose?.({code: 1008});  // the link makes no more attempts
  Object.assign(window, kept);
}"""


@pytest.fixture(scope="module")
def module_page(browser: Browser) -> Iterator[Page]:
    with (
        PageServer(FakeEngine(), EndpointLimits(), StreamInfo(), [], {}) as server,
        browser.page(server.url) as page,
    ):
        yield page


def play(page: Page, code: str) -> Any:
    """Play the first chunk of a session on server `a`, and then run `code`."""
    within_ms = seconds(15) * 1000
    return page.call("/omni/js/link.js", NETWORK + code + END, within_ms)


def test_a_world_on_a_dead_server_is_lost(module_page: Page) -> None:
    """If the server that the session has moved to fails, the page's own server sends it there once
    more. When the server fails again, the session is lost, and the page stays connected to its own
    server.
    """
    seen = play(
        module_page,
        """
        move('b'); await until(() => isAt('b')); await walk();
        die('b'); await until(() => numLost() > 0);
        const before = visits.length; await soon(300);
        return {told, visits, more: visits.length - before, isUp: link.isUp, isHeld: world.isHeld}""",  # noqa: E501
    )
    assert seen["visits"] == ["a", "b", "a", "a"]
    assert seen["told"] == [
        "resumed",
        ["lost", "it moved to the server 'b', which does not answer"],
    ]
    assert (seen["more"], seen["isUp"], seen["isHeld"]) == (0, True, True)


def test_a_world_that_moved_while_the_page_was_away_is_lost(module_page: Page) -> None:
    """The session is lost, too, if the page was never connected to the server that failed."""
    seen = play(
        module_page,
        """
        home = 'b'; dead.add('b'); link.reconnect(); await until(() => numLost() > 0);
        return {told, visits}""",
    )
    assert seen["visits"] == ["a", "a", "a", "a"]
    assert [what for what, _ in seen["told"]] == ["lost"]


def test_a_new_world_after_a_lost_one_has_another_id(module_page: Page) -> None:
    """The page's own server answers every message for the lost session with `moved`, so the next
    session needs another id. A later move of the new session is followed.
    """
    seen = play(
        module_page,
        """
        move('b'); await until(() => isAt('b')); await walk();
        die('b'); await until(() => numLost() > 0);
        world.begin(); const id = world.sessionId; await walk(); await walk();
        dead.clear();
        open.at(-1).say({...moved(), session_id: id}); await until(() => isAt('b'));
        return {id, resets, last: world.lastChunk, lost: numLost()}""",
    )
    assert seen["id"] != "s1"
    assert (seen["resets"], seen["last"], seen["lost"]) == ([], 1, 1)


@pytest.mark.parametrize("returns", ["while_tried", "after_the_second_move"])
def test_a_world_on_a_server_that_returns_goes_on(module_page: Page, returns: str) -> None:
    """If the server is back before it has failed twice, the session continues there. Each outage is
    counted by itself.
    """
    back = {
        "while_tried": "await soon(10)",
        "after_the_second_move": "await until(() => visits.at(-1) === 'a')",
    }
    seen = play(
        module_page,
        f"""
        move('b'); await until(() => isAt('b')); await walk();
        for (let outage = 0; outage < 3; outage++) {{
          die('b'); {back[returns]}; dead.clear();
          await until(() => isAt('b')); await walk();
        }}
        return {{lost: numLost(), last: world.lastChunk, visits}}""",
    )
    assert (seen["lost"], seen["last"]) == (0, 4)


@pytest.mark.parametrize("walks", ["await walk()", "await soon()"], ids=["walks", "rests"])
def test_moves_between_live_servers_are_followed(module_page: Page, walks: str) -> None:
    """A session may move back and forth any number of times, whether or not the page requests
    chunks.
    """
    seen = play(
        module_page,
        f"""
        for (let i = 0; i < 6; i++) {{
          const name = i % 2 ? 'a' : 'b';
          move(name); await until(() => isAt(name)); {walks};
        }}
        return {{told, visits}}""",
    )
    assert seen["visits"] == ["a", *"bababa"]
    assert seen["told"] == ["resumed"] * 6


def test_the_page_ends_an_outage_of_another_server(
    browser: Browser, null_world: Path, tmp_path: Path
) -> None:
    """A session moves to a real server, which is then killed. The page reports the session as lost
    after about 15 s and offers to start a new one from the last image.
    """
    fleet = TestFleet(
        null_world,
        tmp_path,
        flags=lambda ports: (
            "--allowed-origins",
            json.dumps([f"http://127.0.0.1:{port}" for port in ports.values()]),
        ),
    )
    try:
        a, b = fleet["a"], fleet["b"]
        with browser.page(f"http://127.0.0.1:{a.port}/omni/") as page:
            enter_key(page, KEY)
            page.wait_for("document.body.dataset.link === 'up'")
            page.click("#start .main")
            page.wait_for("document.querySelector('#view').classList.contains('has-picture')", 60)
            page.key("keyDown", "w")
            wait_until(lambda: len(live_sessions(a)) == 1)
            (session,) = live_sessions(a)
            status, reply = migrate(a, session, "b")
            assert status == 200, reply
            moved = f"app.world.lastChunk >= {reply['next_chunk_index'] + 1}"
            page.wait_for(f"{PARTS}.then(({{ app }}) => {moved})", 30)
            for process in (psutil.Process(b.process.pid), *family(b)):
                process.kill()
            page.wait_for("notices.textContent.startsWith('This world is lost')", 60)
            assert "server 'b', which does not answer" in page.text("#notices")
            assert page.text("#status") == "This world is lost"
            assert page.text("#notices button") == "Go on from this picture"
            page.run("notices.querySelector('button').click()")
            page.wait_for(f"{STATUS} === 'Live'", 30)
            page.wait_for(f"{PARTS}.then(({{ app }}) => app.world.lastChunk >= 2)", 30)
            assert len(live_sessions(a) - {session}) == 1
            page.key("keyUp", "w")
            page.click("#leave")  # otherwise `a` would try to move the session when it stops
            wait_until(lambda: not live_sessions(a))
    finally:
        fleet.stop()
