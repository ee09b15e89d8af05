# SPDX-License-Identifier: Apache-2.0
"""All of the page's files are served with the right headers, and they contain no external
references.
"""

import re
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest
from helpers.waits import seconds
from page_server import PageServer

from vllm_omni.entrypoints.webui import pages

STATIC = Path(pages.__file__).parent / "static"
REPO = Path(__file__).parents[3]
REFERENCE = re.compile(r"""(?:\b(?:src|href)="|\bfrom "|\bfile: ")([^"#]+)""")


def get(server: PageServer, name: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(server.url + name, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds(10)) as response:
            return response.status, dict(response.headers), response.read()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read()


def test_every_file_is_served_as_it_is(server: PageServer) -> None:
    """Every file is sent exactly as stored, with its content type and the headers that restrict the
    page to this server.
    """
    files = [file for file in STATIC.rglob("*") if file.is_file()]
    assert len(files) > 20
    for file in files:
        status, headers, body = get(server, file.relative_to(STATIC).as_posix())
        assert (status, body) == (200, file.read_bytes()), file
        assert headers["content-type"] == pages.CONTENT_TYPES[file.suffix[1:]]
        for name, value in pages.HEADERS.items():
            assert headers[name.lower()] == value


def test_an_unchanged_file_is_not_sent_again(server: PageServer) -> None:
    """An unchanged file is not sent again: a request with the current ETag gets 304."""
    _, headers, _ = get(server, "js/main.js")
    assert get(server, "js/main.js", **{"If-None-Match": headers["etag"]})[0] == 304


@pytest.mark.parametrize(
    "name", ["nothing.js", "../webui/pages.py", "..%2fpages.py", "js/", "static/index.html"]
)
def test_nothing_else_is_served(server: PageServer, name: str) -> None:
    assert get(server, name)[0] == 404


def test_the_address_without_a_slash_redirects_to_the_page(server: PageServer) -> None:
    with urllib.request.urlopen(server.url.rstrip("/"), timeout=seconds(10)) as response:
        assert response.url == server.url
        assert b"<!doctype html>" in response.read()


def test_all_references_are_to_files_of_the_page() -> None:
    """The page refers to no other host and no missing file. It has no inline scripts or styles,
    because its Content Security Policy would block them.
    """
    for file in STATIC.rglob("*"):
        if file.suffix not in (".html", ".js", ".css", ".svg"):
            continue
        text = file.read_text()
        addresses = set(re.findall(r"https?://[^\s\"'`)]+", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, file
        for reference in REFERENCE.findall(text):
            base = file.parent if reference.startswith((".", "/")) else STATIC
            assert (base / reference).resolve().is_file(), f"{file.name} names {reference}"
        assert not re.search(
            r"""<script(?![^>]*\bsrc=)|\son[a-z]+="|\sstyle="|<style|innerHTML|\beval\(""", text
        ), file
    assert "script-src 'self';" in pages.HEADERS["Content-Security-Policy"]


def test_every_element_that_the_scripts_use_exists() -> None:
    """Every id used in `main.js` exists in `index.html`, and every label refers to an existing
    field.
    """
    html = (STATIC / "index.html").read_text()
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    script = (STATIC / "js/main.js").read_text()
    requested = set(re.findall(r'\bby\("([^"]+)"\)', script))
    assert len(requested) > 15
    assert requested <= set(ids)
    for attribute in ("for", "aria-labelledby"):
        assert set(re.findall(rf'\b{attribute}="([^"]+)"', html)) <= set(ids)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"host": None, "port": 8000}, "http://localhost:8000/omni/"),
        ({"host": "0.0.0.0", "port": 80}, "http://localhost:80/omni/"),
        ({"host": "::1", "port": 8000}, "http://[::1]:8000/omni/"),
        (
            {"host": "gpu.example", "port": 443, "ssl_certfile": "c"},
            "https://gpu.example:443/omni/",
        ),
        ({"host": "h", "port": 1, "root_path": "/proxy/"}, "http://h:1/proxy/omni/"),
        ({"host": "h", "port": 1, "uds": "/run/s"}, None),
    ],
)
def test_the_pages_address(args: dict[str, object], expected: str | None) -> None:
    """The address that the server prints can be opened in a browser on the same machine. A server
    on a Unix socket prints none.
    """
    defaults = {"uds": None, "ssl_certfile": None, "root_path": ""}
    assert pages.local_address(Namespace(**{**defaults, **args})) == expected


@pytest.mark.nightly
def test_wheel_and_source_archive_hold_the_page(tmp_path: Path) -> None:
    """The wheel and the source archive contain every page file in the repository."""
    names = {
        f"vllm_omni/entrypoints/webui/static/{file.relative_to(STATIC).as_posix()}"
        for file in STATIC.rglob("*.*")
    }
    code = (
        "import sys; from setuptools import build_meta; getattr(build_meta, "
        "sys.argv.pop(1))(sys.argv.pop(1))"
    )
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", REPO, clone], check=True)
    world = subprocess.run(
        ["git", "ls-files", "vllm_omni/worlds"],
        cwd=clone,
        check=True,
        capture_output=True,
        text=True,
    )
    names |= set(world.stdout.split())
    assert "vllm_omni/worlds/village/world.json" in names
    for build in ("build_sdist", "build_wheel"):
        subprocess.run(
            [sys.executable, "-c", code, build, tmp_path],
            cwd=clone,
            check=True,
            capture_output=True,
        )
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert names <= set(wheel.namelist())
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        assert names <= {name.partition("/")[2] for name in archive.getnames()}
