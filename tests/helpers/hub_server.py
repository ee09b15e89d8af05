# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face hub that serves local folders on the loopback address.

The hub implements the routes that `huggingface_hub.snapshot_download` requests.
"""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
"""The first repository's only commit. Each other repository has a different commit, because the
client expects commits to be unique.
"""


@contextlib.contextmanager
def hub_server(repos: dict[str, Path], cut: str | None = None) -> Iterator[tuple[str, list[str]]]:
    """Serve folders as hub repositories.

    Args:
        repos: Folder of each repository, by repository name.
        cut: File whose first response is cut off halfway.

    Yields:
        The address for HF_ENDPOINT, and the list of files fetched so far. An entry such as
        `name[8:]` means that the fetch started at byte 8.
    """
    fetched: list[str] = []

    def commit(repo: str) -> str:
        return COMMIT if repo == next(iter(repos)) else hashlib.sha1(repo.encode()).hexdigest()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._response(send_body=False)

        def do_GET(self) -> None:
            self._response(send_body=True)

        def _response(self, *, send_body: bool) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._send_info("/".join(parts[2:4]), parts[4:5] == ["tree"], send_body)
            else:
                self._send_file("/".join(parts[:2]), "/".join(parts[4:]), send_body)

        def _send_info(self, repo: str, tree: bool, send_body: bool) -> None:
            if repo not in repos:
                self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, send_body)
                return
            files = sorted(path for path in repos[repo].rglob("*") if path.is_file())
            sizes = {str(path.relative_to(repos[repo])): path.stat().st_size for path in files}
            info: Any = {
                "id": repo,
                "sha": commit(repo),
                "siblings": [{"rfilename": name} for name in sizes],
            }
            if tree:
                info = [
                    {"type": "file", "path": name, "size": size, "oid": "0"}
                    for name, size in sizes.items()
                ]
            self._send(
                200, json.dumps(info).encode(), {"Content-Type": "application/json"}, send_body
            )

        def _send_file(self, repo: str, name: str, send_body: bool) -> None:
            path = repos.get(repo, Path("/nonexistent")) / name
            if not path.is_file():
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, send_body)
                return
            body = path.read_bytes()
            headers = {
                "ETag": f'"{hashlib.sha256(body).hexdigest()}"',
                "X-Repo-Commit": commit(repo),
                "Accept-Ranges": "bytes",
            }
            resumed = re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")
            if send_body and resumed:
                start = int(resumed[1])
                fetched.append(f"{name}[{start}:]")
                headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
                self._send(206, body[start:], headers, True)
                return
            if send_body:
                fetched.append(name)
            interrupted = send_body and name == cut and fetched.count(name) == 1
            self._send(200, body, headers, send_body, len(body) // 2 if interrupted else None)
            self.close_connection |= interrupted

        def _send(
            self,
            status: int,
            body: bytes,
            headers: dict[str, str],
            send_body: bool,
            sent: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if send_body:
                self.wfile.write(body[:sent])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
