# SPDX-License-Identifier: Apache-2.0
"""The web page at `/omni/`, which consists of static files with headers that restrict the page to
this server.

The page gets all dynamic data from the WebSocket's `hello` message. The page can be loaded without
a key because it contains no secrets and cannot generate anything without a key.
"""

import hashlib
import importlib.resources
import logging
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.responses import RedirectResponse, Response

from vllm_omni.entrypoints.fleet.servers import Fleet
from vllm_omni.entrypoints.server_context import ServerContext
from vllm_omni.entrypoints.webui.address import PAGE_PATH, page_url
from vllm_omni.worlds.description import description_file, read_description

logger = logging.getLogger("vllm." + __name__)

CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpg": "image/jpeg",
}

_CONNECT: Final = "connect-src 'self'"
"""Content-Security-Policy directive that allows the page to use the WebSocket and the ticket route
on this host.
"""

HEADERS: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' blob: data:",
            "media-src 'self' blob:",
            _CONNECT,
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), display-capture=()",
    "Cache-Control": "no-cache",  # revalidate each time; an unchanged file gets status 304
}


@dataclass(frozen=True)
class StaticPage:
    """One of the page's files, and its headers."""

    body: bytes
    """File contents."""
    content_type: str
    """The file's MIME type."""
    etag: str
    """Value of the `ETag` header."""
    servers: Sequence[str] = ()
    """Origins of other servers that the page may connect to, because its session may be moved
    there.
    """

    async def send(self, request: Request) -> Response:
        policy = HEADERS["Content-Security-Policy"]
        policy = policy.replace(_CONNECT, " ".join((_CONNECT, *self.servers)))
        headers = {**HEADERS, "Content-Security-Policy": policy, "ETag": self.etag}
        if request.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.body, media_type=self.content_type, headers=headers)


class WebPage:
    """Endpoint that serves the web page. Loading the page requires no API key because the page
    itself asks the user for the key.
    """

    def __init__(self) -> None:
        self._is_world = True
        self._servers: list[str] = []

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        world = Path(app.state.args.model)
        return add_pages(app, world, lambda: self._is_world, self._servers)

    async def start_serving(self, server: ServerContext) -> None:
        self._is_world = server.is_world
        fleet = Fleet.read(server.omni.fleet, server.omni.server_name)
        self._servers += connect_sources(one.public_url for one in fleet.others.values())
        if (address := local_address(server.args)) is not None:
            logger.info("web page: %s", address)


def connect_sources(urls: Iterable[str | None]) -> list[str]:
    """Return the Content-Security-Policy sources that allow connections to servers' HTTP and
    WebSocket addresses.
    """
    origins = ["{0.scheme}://{0.netloc}".format(urlsplit(url)) for url in urls if url is not None]
    return [*origins, *(origin.replace("http", "ws", 1) for origin in origins)]


def add_pages(
    app: FastAPI,
    world: Path | None = None,
    is_world: Callable[[], bool] = lambda: True,
    servers: Sequence[str] = (),
) -> list[str]:
    """Add a route for every file under `static/`. All files are read during this call.

    Args:
        app: The application.
        world: Checkpoint directory. Images that the world description names are added under
            `world/`.
        is_world: Function that returns whether the model has sessions. It is called for each page
            request because models without sessions have a different page.
        servers: Origins of other servers. The sequence may be extended later.

    Returns:
        The routes' paths.
    """
    pages = dict(_pages(_static(), ""))
    if world is not None and (description := read_description(world)) is not None:
        pages |= {
            f"world/{name}": _page(name, description_file(world, name))
            for name in description.images
        }
    pages = {name: replace(page, servers=servers) for name, page in pages.items()}
    by_path = {f"{PAGE_PATH}/{name}": page for name, page in pages.items()}

    async def to_slash(request: Request) -> Response:
        # A relative URL also works behind a proxy that adds a path prefix.
        return RedirectResponse("omni/", 307, headers=HEADERS)

    for path in ("/", PAGE_PATH):
        app.add_route(path, to_slash, methods=["GET"], include_in_schema=False)

    async def index(request: Request) -> Response:
        return await pages["index.html" if is_world() else "create.html"].send(request)

    app.add_route(f"{PAGE_PATH}/", index, methods=["GET"], include_in_schema=False)
    for path, page in by_path.items():
        # Starlette adds HEAD to GET routes.
        app.add_route(path, page.send, methods=["GET"], include_in_schema=False)
    return ["/", PAGE_PATH, f"{PAGE_PATH}/", *by_path]


def local_address(args: Namespace) -> str | None:
    """Return the page's URL on this machine, or None if the server listens on a Unix socket."""
    if args.uds:
        return None
    scheme = "https" if args.ssl_certfile else "http"
    return page_url(args.host, args.port, scheme, args.root_path or "")


def _static() -> Traversable:
    return importlib.resources.files(__package__) / "static"


def _pages(folder: Traversable, prefix: str) -> Iterator[tuple[str, StaticPage]]:
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _pages(entry, name + "/")
        elif name.rpartition(".")[2] in CONTENT_TYPES:
            yield name, _page(name, entry)


def _page(name: str, file: Traversable) -> StaticPage:
    body = file.read_bytes()
    return StaticPage(
        body, CONTENT_TYPES[name.rpartition(".")[2]], f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    )
