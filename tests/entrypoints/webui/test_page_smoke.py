# SPDX-License-Identifier: Apache-2.0
"""This is the only browser test that `make test` runs. The other browser tests run nightly."""

from browser import Page
from helpers.fake_engine import FIRST, LATER, FakeEngine
from helpers.waits import wait_until

from vllm_omni.actions import as_frame


def test_the_page_starts_and_steers_a_world(page: Page, engine: FakeEngine) -> None:
    """The first chunk request contains the image, prompt, size and seed from the panel. A held key
    moves the camera until it is released.
    """
    page.run("document.querySelectorAll('.tile input')[1].click()")
    page.run("document.querySelector('#start').elements.seed.value = 77")
    page.click("#start .main")
    page.wait_for("document.querySelector('#view').classList.contains('has-picture')")
    # The page uses H.264 only if the browser can decode it, because some Chromium builds have no
    # H.264 decoder.
    app = "import('/omni/js/main.js').then(({ parts }) => parts.app)"
    has_h264 = page.run("import('/omni/js/decode.js').then((m) => m.h264Decoder(48))")
    assert page.run(f"{app}.then((app) => app.world.format)") == ("h264" if has_h264 else "jpeg")
    assert page.run(f"{app}.then((app) => app.decoder.numFailures)") == 0
    first = engine.chunks[0]
    assert first.params.seed == 77
    assert "desert" in str(first.params.prompt).lower()
    assert (first.params.height, first.params.width) == (48, 80)
    assert list(first.arrays) == ["image"]
    assert first.arrays["image"].shape == (48, 80, 3)
    assert first.arrays["image"].std() > 10
    assert first.params.actions == [[], [], []]
    assert "start_pose" not in first.params.options, "the server recognises its own images"

    def steps() -> list[float]:
        """Return the forward motion of each latent frame so far."""
        entries = [entry for call in engine.chunks for entry in call.params.actions or []]
        return [as_frame(entry).axes.get("forward", 0.0) for entry in entries]

    page.key("keyDown", "w")
    wait_until(lambda: steps()[-9:] == [1.0] * 9)
    page.key("keyUp", "w")
    wait_until(lambda: steps()[-3:] == [0.0] * 3)
    # Every frame was decoded and shown: the last frame's brightness equals its index.
    shown = f"{app}.then((app) => [app.isResting, app.player.numBuffered, app.player.numShown])"
    page.wait_for(f"{shown}.then(([rests, left]) => rests && left === 0)")
    num_frames = FIRST + LATER * (len(engine.chunks) - 1)
    brightness = page.run(
        "document.querySelector('#view').getContext('2d').getImageData(40, 24, 1, 1).data[1]"
    )
    assert abs(brightness - (num_frames - 1) % 256) <= 3
