# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the web page tests: one headless Chromium for all tests, and servers with a fake
engine.

Without Chromium, browser tests are skipped, or fail if `OMNI_REQUIRE_BROWSER=1` is set. `.ci/run`
sets the variable if Chromium is present or could be installed.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, WHY_NOT, Browser, Page, running_browser
from helpers.fake_engine import FakeEngine
from helpers.walking import SPACE
from page_server import MakeServer, PageServer

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.worlds.description import read_description


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        if os.environ.get("OMNI_REQUIRE_BROWSER") == "1":
            pytest.fail(WHY_NOT)
        pytest.skip(WHY_NOT)
    with running_browser(tmp_path_factory.mktemp("chromium") / "profile") as chromium:
        yield chromium


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_server(engine: FakeEngine) -> Iterator[MakeServer]:
    """Yield a function that starts a server, which is stopped after the test:
    `make_server(keys=[...], environ={...}, info={...}, world=DIR, **limits)`.
    """
    with ExitStack() as stack:

        def make(
            keys: list[str] | None = None,
            environ: dict[str, str] | None = None,
            info: dict[str, Any] | None = None,
            world: Path | None = None,
            origins: Sequence[str] = (),
            **limits: Any,
        ) -> PageServer:
            reported = (
                {"card": read_description(world), "height": 96, "width": 160}
                if world is not None
                else {}
            )
            base = {"actions": SPACE, "height": 48, "width": 80, "model": "fake"}
            all_info = StreamInfo(**{**base, **reported, **(info or {})})
            server = PageServer(
                engine,
                EndpointLimits(**limits),
                all_info,
                keys or [],
                environ or {},
                world,
                origins,
            )
            return stack.enter_context(server)

        yield make


@pytest.fixture
def server(make_server: MakeServer) -> PageServer:
    return make_server(info={"fps": 48.0})  # a chunk of 12 frames plays for 0.25 s


@pytest.fixture
def page(browser: Browser, server: PageServer) -> Iterator[Page]:
    """Yield the page of `server` once it has connected. Unexpected page errors fail the test."""
    with browser.page(server.url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        yield page
        assert page.errors == []


@pytest.fixture
def village_page(browser: Browser, make_server: MakeServer, village: Path) -> Iterator[Page]:
    """Yield the page for a checkpoint that has a world description. The engine is a fake."""
    with browser.page(make_server(world=village, info={"fps": 48.0}).url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        page.wait_for(
            "[...document.querySelectorAll('.tile img')].every((i) => !i.src || i.naturalWidth "
            "=== 160)"
        )
        yield page
        assert page.errors == []
