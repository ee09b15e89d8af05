# SPDX-License-Identifier: Apache-2.0
"""For a model with named images, the page has a slot for each image. Chosen images reach the
engine.
"""

from collections.abc import Iterator

import pytest
from browser import Browser, Page
from helpers.fake_engine import FakeEngine
from helpers.waits import wait_until
from page_server import MakeServer

from vllm_omni.actions import CAMERA_SPACE, ActionSpace, NamedImage

pytestmark = pytest.mark.nightly

SPACE = ActionSpace(
    buttons=CAMERA_SPACE.buttons,
    images=(NamedImage("head", "head of the character"), NamedImage("back", "its back")),
)
TILE = "document.querySelector('[name=image-{}]').closest('.tile').classList.contains('has-image')"
CHOOSE = """(async () => {{
  const canvas = new OffscreenCanvas({side}, 8);
  canvas.getContext('2d').fillRect(0, 0, 4, 4);
  const files = new DataTransfer();
  files.items.add(new File([await canvas.convertToBlob()], 'a.png', {{ type: 'image/png' }}));
  const input = document.querySelector('[name=image-{name}]');
  input.files = files.files;
  input.dispatchEvent(new Event('change'));
}})()"""


@pytest.fixture
def page(browser: Browser, make_server: MakeServer) -> Iterator[Page]:
    server = make_server(info={"actions": SPACE, "fps": 48.0})
    with browser.page(server.url) as page:
        page.wait_for("document.body.dataset.link === 'up'")
        yield page
        assert page.errors == []


def test_a_chosen_image_is_sent_and_a_removed_one_is_not(page: Page, engine: FakeEngine) -> None:
    """A chosen image is sent, scaled down first if it is large. A click on a filled slot removes
    its image.
    """
    page.run(CHOOSE.format(name="head", side=2000))
    page.run(CHOOSE.format(name="back", side=8))
    page.wait_for(TILE.format("head"))
    page.wait_for(TILE.format("back"))
    page.run("document.querySelector('[name=image-back]').click()")
    page.wait_for(f"!{TILE.format('back')}")
    page.click("#start .main")
    wait_until(lambda: engine.chunks)
    named = {
        name: array.shape
        for name, array in engine.chunks[0].arrays.items()
        if name.startswith("images.")
    }
    assert named == {"images.head": (4, 1024, 3)}
