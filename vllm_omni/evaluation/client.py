# SPDX-License-Identifier: Apache-2.0
"""`EvaluatedServer`: the requests that an evaluation sends to one of this package's servers."""

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, Final

from vllm_omni.entrypoints.loopback import is_loopback, websocket_proxy
from vllm_omni.runtime.replies import read_error

_CAMERA_PATH: Final = "/v1/realtime/world/camera"
_REPLY_S: Final = 60.0
_IMAGE_S: Final = 1800.0
_POLL_S: Final = 0.5


class ServerRefusedError(Exception):
    """The server refused a request or could not be reached.

    Attributes:
        code: Error code from the server's response, or "" if the response contains none.
        param: Name of the request field that the server's error names, or "" if the error names no
            field.
    """

    def __init__(self, message: str, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.code, self.param = code, param


class EvaluatedServer:
    """Client for the running server under evaluation.

    Args:
        url: Server address, `http://HOST:PORT`, with or without a path prefix.
        key: The server's API key, or None if the server requires no key.
        video_s: Maximum time in seconds to wait for one video.
    """

    def __init__(self, url: str, key: str | None = None, video_s: float = 3600.0) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._video_s = video_s
        proxies = [urllib.request.ProxyHandler({})] if is_loopback(self._url) else []
        self._opener = urllib.request.build_opener(*proxies)

    def model(self) -> str:
        """Return the name of the served model."""
        return str(self._json("GET", "/v1/models")["data"][0]["id"])

    def greeting(self) -> dict[str, Any] | None:
        """Return the `hello` message that the server sends for a world model
        (docs/reference/realtime_world_camera.md), or None if the model is not a world model.
        """
        import msgspec
        from websockets.exceptions import WebSocketException
        from websockets.sync.client import connect

        url = self._url.replace("http", "ws", 1) + _CAMERA_PATH
        try:
            with connect(
                url, additional_headers=self._headers, max_size=None, proxy=websocket_proxy(url)
            ) as socket:
                hello = msgspec.msgpack.decode(socket.recv(timeout=_REPLY_S, decode=False))
        except (WebSocketException, OSError, msgspec.DecodeError, TypeError):
            return None
        return hello if isinstance(hello, dict) and "chunk_frames" in hello else None

    def video(self, fields: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """Generate a video through `/v1/videos`, download it, and delete it from the server.

        Args:
            fields: JSON request fields.

        Returns:
            The contents of the MP4 file, and the server's description of the finished job.
        """
        job = self._json("POST", "/v1/videos", fields)
        path = f"/v1/videos/{job['id']}"
        until_s = time.monotonic() + self._video_s
        while job["status"] not in ("completed", "failed"):
            if time.monotonic() > until_s:
                self._send("DELETE", path)
                raise ServerRefusedError(f"a video took longer than {self._video_s:g} s")
            time.sleep(_POLL_S)
            job = self._json("GET", path)
        if job["status"] == "failed":
            error = job.get("error") or {}
            raise ServerRefusedError(str(error.get("message")), str(error.get("code")))
        video = self._send("GET", f"{path}/content")
        self._send("DELETE", path)
        return video, job

    def image(self, fields: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
        """Generate an image through `/v1/images/generations`.

        Returns:
            The contents of the PNG file, and the server's response.
        """
        reply = self._json("POST", "/v1/images/generations", fields, _IMAGE_S)
        return base64.b64decode(reply["data"][0]["b64_json"]), reply

    def page_file(self, name: str) -> bytes:
        """Return the contents of one of the served world's files, for example a start image."""
        return self._send("GET", f"/omni/world/{name}")

    def _json(
        self, method: str, path: str, body: Any = None, timeout_s: float = _REPLY_S
    ) -> dict[str, Any]:
        reply = json.loads(self._send(method, path, body, timeout_s))
        assert isinstance(reply, dict)
        return reply

    def _send(self, method: str, path: str, body: Any = None, timeout_s: float = _REPLY_S) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=timeout_s) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as refused:
            raise _refusal(refused) from refused
        except (OSError, ValueError) as error:
            raise ServerRefusedError(f"{self._url} does not answer: {error}") from error


def _refusal(refused: urllib.error.HTTPError) -> ServerRefusedError:
    try:
        error = read_error(refused.read())
    except OSError:
        error = None
    if error is None:
        return ServerRefusedError(f"HTTP {refused.code}")
    return ServerRefusedError(error.message, error.code or "", error.param or "")
