# SPDX-License-Identifier: Apache-2.0
"""Tests of the web page that servers without a world model provide. The tests use headless
Chromium, real routes and an engine that responds instantly.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from browser import Browser, Page
from fastapi import FastAPI
from helpers.instant_engine import InstantEngine, Results
from helpers.uvicorn_thread import serving
from page_driving import enter_key

from vllm_omni.entrypoints.limits.access import BrowserAccess
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.routes import OpenAIRoutes
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.webui import pages
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.capabilities import Capabilities

pytestmark = pytest.mark.nightly

LANCE = Capabilities(
    tasks=("text_to_image", "image_edit", "text_to_video", "image_to_video"),
    reads=("image",),
    frame_stride=4,
)
IMAGES = Capabilities(tasks=("text_to_image",))


class MediaEngine(InstantEngine):
    """An engine that also responds instantly to understanding requests."""

    def __init__(self) -> None:
        super().__init__()
        self.is_world = False

    async def run_request(self, params: DiffusionParams, arrays: Any) -> Results:
        if params.op == "generate" and params.options.get("modalities") == ["text"]:
            self.requests.append((params, tuple(arrays)))
            return {
                "text": "a grey square",
                "finish_reason": "stop",
                "prompt_tokens": 9,
                "completion_tokens": 3,
            }, {}
        return await super().run_request(params, arrays)


@pytest.fixture
def engine() -> MediaEngine:  # type: ignore[override]
    return MediaEngine()


@pytest.fixture
def open_page(browser: Browser, engine: MediaEngine, tmp_path: Path) -> Iterator[Any]:
    """Yield a function, called as `open_page(capabilities, keys)`, that opens the page of a server
    whose model has the given capabilities.
    """
    with ExitStack() as stack:

        def opened(capabilities: Capabilities, keys: tuple[str, ...] = ()) -> Any:
            executor = stack.enter_context(ThreadPoolExecutor(2))
            limits, endpoints = MediaLimits(media_dir=str(tmp_path)), EndpointLimits()
            served = ServedModel(("painter",), capabilities, 64, 48, 64 * 48, 4)
            routes = OpenAIRoutes()
            routes.connect_engine(engine, served, limits, endpoints, executor)
            app = FastAPI()
            routes.add_routes(app)
            BrowserAccess(keys, {}).attach_to_app(
                app, pages.add_pages(app, is_world=lambda: capabilities.is_world)
            )
            port = stack.enter_context(serving(uvicorn.Config(app, log_level="warning")))
            return stack.enter_context(browser.page(f"http://127.0.0.1:{port}/omni/"))

        yield opened


def ready(page: Page) -> None:
    page.wait_for("document.querySelector('#status').textContent === 'Ready'")


def create(page: Page, mode: str, prompt: str) -> None:
    page.run(f"document.querySelector('[data-name={mode}]').click()")
    page.run(f"document.querySelector('#form').elements.prompt.value = {prompt!r}")
    page.run("document.querySelector('#form').requestSubmit()")
    page.wait_for(
        "document.querySelector('#results li') !== null || !document.querySelector('#wrong').hidden"
    )
    ready(page)


CHOOSE = """(async () => { const canvas = new OffscreenCanvas(64, 48); canvas.getContext("2d").fillRect(0, 0, 64, 48);
    const files = new DataTransfer();
    files.items.add(new File([await canvas.convertToBlob()], "mine.png", { type: "image/png" }));
    document.querySelector("#form").elements.file.files = files.files; })()"""  # noqa: E501
SIZE = (
    "(i => i && i.naturalWidth && [i.naturalWidth, "
    "i.naturalHeight])(document.querySelector('#results img'))"
)


def test_a_prompt_becomes_an_image(open_page: Any, engine: MediaEngine) -> None:
    """The page shows an image generated from the prompt, with the given seed and at the model's
    size. The page offers only the tasks that the model supports.
    """
    page = open_page(IMAGES)
    ready(page)
    assert page.text("#model") == "painter"
    assert page.run(
        "[...document.querySelectorAll('#modes button')].map((b) => b.dataset.name)"
    ) == ["make"]
    assert not page.run("document.querySelector('.takes-file').offsetParent !== null")
    page.run("document.querySelector('#form').elements.seed.value = 7")
    create(page, "make", "a grey square")
    assert page.wait_for(SIZE) == [64, 48]
    assert "seed 7" in page.text("#results li")
    ((params, _),) = engine.requests
    assert (params.prompt, params.seed) == ("a grey square", 7)
    assert page.errors == []


def test_an_image_is_edited_described_and_made_a_video(open_page: Any, engine: MediaEngine) -> None:
    page = open_page(LANCE)
    ready(page)
    page.run(CHOOSE)
    create(page, "edit", "make it blue")
    assert page.wait_for(SIZE) == [64, 48]
    page.run("document.querySelector('#results').replaceChildren()")
    create(page, "ask", "what is this?")
    assert "a grey square" in page.text("#results li")
    page.run("document.querySelector('#results').replaceChildren()")
    create(page, "film", "a walk")
    assert page.wait_for("document.querySelector('#results video')?.videoWidth") == 64
    assert [(params.prompt, arrays) for params, arrays in engine.requests] == [
        (prompt, ("image",)) for prompt in ("make it blue", "what is this?", "a walk")
    ]


def test_a_refusal_shows_the_error_of_the_server(open_page: Any) -> None:
    page = open_page(IMAGES)
    ready(page)
    page.run("document.querySelector('#form').elements.size.value = '63x48'")
    create(page, "make", "a cat")
    assert "width must be a multiple of 16" in page.text("#wrong")
    assert page.run("document.querySelector('#results').children.length") == 0


def test_the_page_asks_for_the_key(open_page: Any) -> None:
    """The page asks for the API key and works once the key has been entered."""
    page = open_page(IMAGES, ("sesame",))
    enter_key(page, "sesame")
    ready(page)
    create(page, "make", "a cat")
    assert page.wait_for(SIZE) == [64, 48]


def test_a_world_keeps_its_own_page(open_page: Any) -> None:
    page = open_page(Capabilities())
    assert page.run("document.title").startswith("World")
    page.errors.clear()
