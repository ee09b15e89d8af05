# SPDX-License-Identifier: Apache-2.0
"""Build the documentation site: `make docs`, or `python scripts/docs_site.py [FOLDER]`.

The default folder is `build/site`. In the repository, pages remain where they are, for example
guides under docs/ and a model's notes next to its code. MkDocs requires a single folder, so this
script copies the pages, and the files to which they link, into one folder. A link to a folder
becomes a link to its README, or plain text if the folder has no README.
tests/docs/test_docs_site.py verifies the result.
"""

import functools
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "docs/**/*.md",
    "benchmarks/*.md",
    "deploy/**/*.md",
    "examples/**/*.md",
    "training/**/*.md",
    "vllm_omni/**/*.md",
    "benchmarks/*/*.md",
)
_LINK = re.compile(
    r"\[(?P<text>[^\]]*(?:\[[^\]]*\][^\]]*)?)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)"
)
_FENCE = "```"


@functools.cache
def pages() -> tuple[Path, ...]:
    return tuple(sorted(path for pattern in PAGES for path in REPO.glob(pattern)))


def lay_out(folder: Path) -> None:
    """Copy every page, and every file of the repository that a page links to, into `folder`."""
    for page in pages():
        out = folder / page.relative_to(REPO)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("".join(_lines(page, folder)))


def _lines(page: Path, folder: Path) -> Iterator[str]:
    for line, is_prose in _prose(page.read_text()):
        yield _LINK.sub(lambda link: _linked(link, page, folder), line) if is_prose else line


def links(text: str) -> Iterator[re.Match[str]]:
    """Yield a page's links to other files in the repository, as matches with the `text`, `target`
    and `anchor` groups.
    """
    for line, is_prose in _prose(text):
        if is_prose:
            yield from (link for link in _LINK.finditer(line) if _is_file(link["target"]))


def _prose(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line of a page, and whether the line is outside fenced code."""
    fenced = False
    for line in text.splitlines(keepends=True):
        fenced ^= line.lstrip().startswith(_FENCE)
        yield line, not fenced


def _is_file(target: str) -> bool:
    return bool(target) and ":" not in target


def _linked(link: re.Match[str], page: Path, folder: Path) -> str:
    """Return a link as it appears on the site, and copy the linked file."""
    text, target, anchor = link["text"], link["target"], link["anchor"] or ""
    if not _is_file(target):
        return link[0]
    path = Path(os.path.normpath(page.parent / target))
    if path.is_dir():
        if not (path / "README.md").is_file() or (path / "README.md") not in pages():
            return text
        path /= "README.md"
    elif path.suffix != ".md":
        out = folder / path.relative_to(REPO)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, out)
    elif path not in pages():
        return text
    return f"[{text}]({os.path.relpath(path, page.parent)}{anchor})"


def main(layer: Path) -> int:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    with tempfile.TemporaryDirectory() as folder:
        lay_out(Path(folder))
        try:
            build(
                load_config(
                    str(REPO / "mkdocs.yml"), docs_dir=folder, site_dir=str(layer), strict=True
                )
            )
        except Abort as warned:
            return warned.code if isinstance(warned.code, int) else 1
    print(f"wrote {layer}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else REPO / "build" / "site").resolve()))
