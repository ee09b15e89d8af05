# SPDX-License-Identifier: Apache-2.0
"""`RemoteEngine`: runs environments on a server (`/v1/environments`). `RemoteEngine` requires
neither a model nor vLLM on the client's machine.

`RemoteEngine` keeps one connection open. If the server has closed the connection, for example after
the client has paused, the request is sent once more. Sending a request twice is safe, because a
server closes a connection only between requests. In addition, a step request contains its chunk
index, so a server that has already run the step refuses the second request.
"""

import base64
import contextlib
import http.client
import io
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch
from PIL import Image

from vllm_omni.actions import ActionFrame
from vllm_omni.entrypoints.environments.protocol import (
    PATH,
    VERSION,
    ChunksReply,
    CreateReply,
    CreateRequest,
    EnvironmentSpec,
    ForkRequest,
    ResetEntry,
    ResetRequest,
    StepEntry,
    StepRequest,
)
from vllm_omni.environments.engine import Episode, Outcome, WorldEngine, WorldSettings
from vllm_omni.outputs import RequestFailed, unpack_arrays
from vllm_omni.runtime.replies import read_error

_STALE: Final = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)

T = TypeVar("T")


class RemoteEngine(WorldEngine):
    """Runs environments on a server.

    Args:
        url: Server address, for example `http://127.0.0.1:8000`.
        api_key: The server's API key, or None if the server needs no key.
        timeout_s: Maximum time in seconds to wait for a response from the server.

    Raises:
        RequestFailed: The server refuses the key or does not serve a world.
        ValueError: The server uses another protocol version.
        OSError: The server does not respond.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        address = urlsplit(url)
        kinds = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        if address.scheme not in kinds or not address.hostname:
            raise ValueError(f"the address must be http://HOST:PORT or https://HOST, got {url!r}")
        self._connection = kinds[address.scheme](address.hostname, address.port, timeout=timeout_s)
        self._path = address.path.rstrip("/") + PATH
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._id: str | None = None
        described = msgspec.json.decode(self._call("GET", self._path))
        if described.get("version") != VERSION:
            raise ValueError(
                f"the server speaks version {described.get('version')} of the protocol, this "
                f"client version {VERSION}; install the same release on both"
            )
        self.spec = msgspec.convert(described, EnvironmentSpec)

    def open(self, settings: WorldSettings) -> None:
        height, width = settings.size
        request = CreateRequest(
            num_envs=settings.num_envs,
            height=height,
            width=width,
            image=None if settings.image is None else _data_url(settings.image),
            images={name: _data_url(image) for name, image in settings.images.items()},
            output=settings.output,
            trajectory=settings.trajectory,
        )
        reply = self._call("POST", self._path, request)
        self._id = msgspec.json.decode(reply, type=CreateReply).id

    def start(self, which: Sequence[int], episodes: Sequence[Episode]) -> list[Outcome]:
        entries = [
            ResetEntry(
                environment=index,
                seed=episode.seed,
                prompt=episode.prompt,
                start_pose=episode.start_pose,
            )
            for index, episode in zip(which, episodes, strict=True)
        ]
        return self._chunks("reset", ResetRequest(episodes=entries))

    def advance(
        self, which: Sequence[int], episodes: Sequence[Episode], actions: Sequence[ActionFrame]
    ) -> list[Outcome]:
        entries = [
            StepEntry(environment=index, chunk_index=episode.chunks, action=action)
            for index, episode, action in zip(which, episodes, actions, strict=True)
        ]
        return self._chunks("step", StepRequest(steps=entries))

    def fork(self, source: int, targets: Sequence[int]) -> None:
        request = ForkRequest(source=source, targets=list(targets))
        self._call("POST", f"{self._path}/{self._id}/fork", request)

    def close(self) -> None:
        if self._id is not None:
            # Failures are ignored, because the server frees environments that have not been used
            # for some time.
            with contextlib.suppress(RequestFailed, OSError, http.client.HTTPException):
                self._call("DELETE", f"{self._path}/{self._id}")
            self._id = None
        self._connection.close()

    def _chunks(self, action: str, request: msgspec.Struct) -> list[Outcome]:
        body = self._call("POST", f"{self._path}/{self._id}/{action}", request)
        meta, arrays = unpack_arrays(torch.frombuffer(body, dtype=torch.uint8))
        outcomes: list[Outcome] = []
        for chunk in msgspec.convert(meta, ChunksReply).chunks:
            if chunk.error is not None:
                outcomes.append(RequestFailed(chunk.error["code"], chunk.error["message"]))
                continue
            suffix = f".{chunk.environment}"
            named = {
                name.removesuffix(suffix): array
                for name, array in arrays.items()
                if name.endswith(suffix)
            }
            poses = {} if chunk.world_poses is None else {"world_poses": chunk.world_poses}
            outcomes.append((poses, named))
        return outcomes

    def _call(self, method: str, path: str, message: msgspec.Struct | None = None) -> bytearray:
        """Send a request and return the body of the server's response.

        Raises:
            RequestFailed: The server refused the request.
        """
        body = None if message is None else msgspec.json.encode(message)
        kind = {} if message is None else {"Content-Type": "application/json"}
        is_reused = self._connection.sock is not None
        try:
            response = self._send(method, path, body, {**self._headers, **kind})
        except _STALE:
            self._connection.close()
            if not is_reused:
                raise
            response = self._send(method, path, body, {**self._headers, **kind})
        data = bytearray(response.length or 0)
        if response.length is None:
            data += response.read()
        else:
            view = memoryview(data)
            while view and (count := response.readinto(view)):
                view = view[count:]
            response.read()  # allows the connection to be reused
            if view:
                self._connection.close()
                raise http.client.IncompleteRead(bytes(data[: -len(view)]), len(view))
        if response.status >= 300:
            raise _failure(response.status, bytes(data))
        return data

    def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        try:
            self._connection.request(method, path, body, headers)
            return self._connection.getresponse()
        except BaseException:
            self._connection.close()  # so that a later request cannot read this request's response
            raise


def _failure(status: int, body: bytes) -> RequestFailed:
    """Convert an error response to an exception. The response may come from this package's server
    or from a proxy.
    """
    code = "unauthorized" if status == 401 else f"http_{status}"
    if (error := read_error(body)) is not None:
        return RequestFailed(error.code or code, error.message)
    said = "it needs an API key (api_key=)" if status == 401 else "its reply has no reason"
    return RequestFailed(code, f"the server refused the request with status {status}: {said}")


def _data_url(image: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
