# SPDX-License-Identifier: Apache-2.0
"""`make docs`: every page appears in the navigation once, and linked files are copied."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import snippets as docs
from helpers.scripts import load_script
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import encode_mp4

script = load_script(docs.REPO / "scripts" / "docs_site.py")


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(
        r"^ +- (?:[^:\n]+: )?(\S+\.md)$", (docs.REPO / "mkdocs.yml").read_text(), re.M
    )
    listed += re.findall(r"^  - [^:\n]+: (\S+\.md)$", (docs.REPO / "mkdocs.yml").read_text(), re.M)
    assert sorted(set(listed)) == sorted(
        str(page.relative_to(docs.REPO)) for page in script.pages()
    )
    assert len(re.findall(r"\.md$", (docs.REPO / "mkdocs.yml").read_text(), re.M)) == len(
        set(listed)
    )


def test_links_of_the_laid_out_pages_lead_to_files(tmp_path: Path) -> None:
    script.lay_out(tmp_path)
    assert (tmp_path / "README.md").is_file() and len(list(tmp_path.rglob("*.md"))) == len(
        script.pages()
    )
    dead = [
        f"{page.relative_to(tmp_path)}: {link['target']}"
        for page in tmp_path.rglob("*.md")
        for link in script.links(page.read_text())
        if not (page.parent / link["target"]).is_file()
    ]
    assert not dead
    assert list(tmp_path.rglob("*.svg")), "pictures come along"


def test_the_readme_animation_has_the_size_that_its_script_writes(tmp_path: Path) -> None:
    """The animation in the README has the size that `scripts/film.py` gives to a video of the
    shipped world.

    The script drops every second frame of the demo's video and enlarges the remaining frames.
    """
    film = load_script(docs.REPO / "scripts" / "film.py")
    frames_THWC = np.random.default_rng(0).integers(0, 256, (5, 96, 160, 3), np.uint8)
    (tmp_path / "demo.mp4").write_bytes(encode_mp4(frames_THWC, 16))
    assert film.main(tmp_path / "demo.mp4", tmp_path / "walk.webp") == 0
    for path, frames in ((tmp_path / "walk.webp", 3), (film.FILM, 71)):
        with Image.open(path) as image:
            assert (image.size, image.n_frames) == ((480, 288), frames)


@pytest.mark.nightly
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """The strict build passes. It would fail on a page outside the navigation, a dead link or a
    dead anchor.

    `make nightly` installs MkDocs.
    """
    assert script.main(tmp_path) == 0
    assert "vllm_omni" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "docs" / "how_to" / "serving.html").is_file()
    for word, page in (("migrate", "fleet"), ("licence", "choosing"), ("fp8", "quantization")):
        assert any(f"/{page}.html" in found for found in pages_with(word, tmp_path)), word


def pages_with(word: str, site: Path) -> list[str]:
    """Return the addresses of the pages that the site's search finds for a word. Each component of
    a path counts as a word.
    """
    index = json.loads((site / "search" / "search_index.json").read_text())
    return [
        entry["location"]
        for entry in index["docs"]
        if word
        in re.split(
            index["config"]["separator"],
            re.sub("<[^>]*>", " ", f"{entry['title']} {entry['text']}").lower(),
        )
    ]
