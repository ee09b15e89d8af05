# SPDX-License-Identifier: Apache-2.0
"""`/omni/ready`: reports whether this server accepts new work now. In contrast, `/health` reports
whether the server is alive.

Status 200 means that the server accepts work. Status 503 with `capacity` means that the server
works but would refuse new work. Status 503 with `engine_dead` means that the server does not work.
The worker statistics behind this reply also update the gauges in `../telemetry/metrics.py` every
`stats_interval_s`.

Workers respond only between engine steps, but a probe must be answered within a second. The route
therefore returns the latest statistics and their age. If a request to the workers takes too long,
it continues, and the next probe uses its result.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.limits.access import READY_PATH
from vllm_omni.entrypoints.realtime.encoding.implementations import EncoderChoice
from vllm_omni.entrypoints.server_context import ServerContext
from vllm_omni.entrypoints.telemetry.metrics import endpoint_metrics
from vllm_omni.outputs import RequestFailed

logger = logging.getLogger("vllm." + __name__)

_FRESH_S: Final = 0.25
_COUNTED: Final = (
    "sessions",
    "max_sessions",
    "bytes",
    "max_bytes",
    "suspended",
    "suspended_bytes",
    "on_disk",
    "disk_bytes",
)
_PATIENCE_S: Final = 0.5  # Kubernetes gives a probe one second by default


class FastPathReply(BaseModel):
    """State of one fast path, as listed in `ReadyReply.fast_paths`."""

    name: str
    """Name of the fast path."""
    on: bool
    """Whether the engine uses the fast path."""
    reason: str
    """Reason why the fast path is disabled. Empty if it is enabled."""


class EncoderReply(BaseModel):
    """Encoder chosen for one live-video codec, as listed in `ReadyReply.encoders`."""

    codec: str
    """Live-video codec: `h264` or `jpeg`."""
    implementation: str
    """Encoder implementation that this process uses."""
    reason: str
    """Reason why no faster implementation is used. Empty if the fastest implementation is used."""


class ReadyReply(BaseModel):
    """Response body of `/omni/ready`.

    Counts and sizes are sums over all data-parallel ranks.
    """

    status: str
    """Readiness of the server: `ready`, `capacity` or `engine_dead`."""
    sessions: int | None = None
    """Number of sessions in the engine."""
    max_sessions: int | None = None
    """Maximum number of sessions."""
    bytes: int | None = None
    """Total size of the sessions in bytes."""
    max_bytes: int | None = None
    """Maximum total size of the sessions in bytes. None: the size is not limited."""
    suspended: int | None = None
    """Number of sessions suspended to host memory (`omni.suspend_idle_s`)."""
    suspended_bytes: int | None = None
    """Total size in bytes of the sessions suspended to host memory, which `bytes` does not include.
    """
    on_disk: int | None = None
    """Number of sessions suspended to disk (`omni.suspend_dir`)."""
    disk_bytes: int | None = None
    """Total size in bytes of the sessions suspended to disk, which neither `bytes` nor
    `suspended_bytes` includes.
    """
    age_s: float | None = None
    """Age of the statistics in seconds. During a long engine step, it exceeds one second. None: no
    statistics are available yet.
    """
    ranks: list[dict[str, int | None]] | None = None
    """Statistics of each data-parallel rank. None: the engine has only one rank."""
    fast_paths: list[FastPathReply] | None = None
    """Fast paths of the engine. None: the engine has not reported them yet."""
    encoders: list[EncoderReply] | None = None
    """Live-video encoders. None: the model has no sessions."""


class Readiness:
    """Computes the readiness of one API server process.

    Args:
        engine: Interface to vLLM's engine.
        interval_s: Seconds between updates of the gauges.
        has_room: Function that returns whether this process's endpoints accept new work.
        can_make_room: Function that returns whether a session could be evicted for a new one. None:
            the model has no sessions, and its requests are queued.
        media_bytes: Function that returns the total size of the stored media files in bytes. It is
            called on a worker thread.
        reply_bytes: Function that returns the total size of retained replies in bytes.
        encoders: Live-video encoders. None: the model has no sessions.
    """

    def __init__(
        self,
        engine: OmniEngine,
        interval_s: float,
        has_room: Callable[[], bool],
        can_make_room: Callable[[], bool] | None,
        media_bytes: Callable[[], int],
        reply_bytes: Callable[[], int],
        encoders: Sequence[EncoderChoice] | None = None,
    ) -> None:
        self._engine, self._interval_s = engine, interval_s
        self._has_room, self._can_make_room = has_room, can_make_room
        self._media_bytes, self._reply_bytes = media_bytes, reply_bytes
        self._encoders = (
            None if encoders is None else [EncoderReply(**one.as_json()) for one in encoders]
        )
        self._stats: list[dict[str, Any]] = []  # one entry per data-parallel rank
        self._responded_s: float | None = None
        self._fast_paths: list[FastPathReply] | None = None  # requested once: they do not change
        self._stats_request: asyncio.Task[RequestFailed | None] | None = None
        self._sampler = asyncio.create_task(self._sample())

    async def ready(self) -> Response:
        if self._engine.is_dead:
            return JSONResponse(ReadyReply(status="engine_dead").model_dump(), 503)
        age_s = self._age_s()
        if age_s is None or age_s >= _FRESH_S:
            # A timeout of `wait` does not cancel the request to the workers.
            responded, _ = await asyncio.wait([self._probe()], timeout=_PATIENCE_S)
            if any(request.result() is not None for request in responded):
                return JSONResponse(ReadyReply(status="engine_dead").model_dump(), 503)
            age_s = self._age_s()
        has_room = self._has_room() and (
            self._can_make_room is None or self._engine_has_room() or self._can_make_room()
        )
        reply = ReadyReply(
            status="ready" if has_room else "capacity",
            **_sums(self._stats),
            age_s=None if age_s is None else round(age_s, 3),
            ranks=[{name: rank[name] for name in _COUNTED} for rank in self._stats]
            if len(self._stats) > 1
            else None,
            fast_paths=self._fast_paths,
            encoders=self._encoders,
        )
        headers = {} if has_room else {"Retry-After": "2"}
        return JSONResponse(reply.model_dump(), 200 if has_room else 503, headers)

    def _engine_has_room(self) -> bool:
        """Return whether any data-parallel rank has room for one more session of average size."""
        return not self._stats or any(_has_room(rank) for rank in self._stats)

    def _age_s(self) -> float | None:
        return None if self._responded_s is None else time.monotonic() - self._responded_s

    def _probe(self) -> "asyncio.Task[RequestFailed | None]":
        """Return the task that requests statistics from the workers. If none is in flight, start
        one.
        """
        if self._stats_request is None or self._stats_request.done():
            # The context is empty, because the task does not belong to a single HTTP request.
            self._stats_request = asyncio.create_task(
                self._refresh(), context=contextvars.Context()
            )
        return self._stats_request

    async def _refresh(self) -> RequestFailed | None:
        try:
            self._stats = await self._engine.session_stats()
            if self._fast_paths is None:
                paths = await self._engine.fast_paths()
                self._fast_paths = [FastPathReply(**path.as_json()) for path in paths]
        except RequestFailed as failure:
            return failure
        self._responded_s = time.monotonic()
        endpoint_metrics().engine_state(_sums(self._stats))
        return None

    async def _sample(self) -> None:
        while not self._engine.is_dead:
            failure = await asyncio.shield(self._probe())
            if failure is not None:
                logger.debug("statistics not available: %s", failure)
            try:
                endpoint_metrics().endpoint_bytes(
                    await asyncio.to_thread(self._media_bytes), self._reply_bytes()
                )
            except OSError as error:
                logger.debug("size of stored files not available: %s", error)
            await asyncio.sleep(self._interval_s)


def _has_room(stats: Mapping[str, Any]) -> bool:
    on_device = stats["sessions"] - stats["suspended"] - stats["on_disk"]
    one_more = stats["bytes"] / max(1, on_device)
    fits = stats["max_bytes"] is None or stats["bytes"] + one_more <= stats["max_bytes"]
    fits = fits or stats["can_suspend"]
    return bool(stats["sessions"] < stats["max_sessions"] and fits)


def _sums(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sum of each statistic over all data-parallel ranks, or None for a statistic that
    has no value on some rank.
    """
    sums: dict[str, Any] = {}
    for name in _COUNTED if ranks else ():
        values = [rank[name] for rank in ranks]
        sums[name] = None if None in values else sum(values)
    return sums


class ReadyRoute:
    """The readiness route of one API server process."""

    def __init__(self) -> None:
        self._readiness: Readiness | None = None

    async def start_serving(self, server: ServerContext) -> None:
        sessions = server.sessions
        encoders = None
        if server.is_world:
            encoders = (await asyncio.to_thread(sessions.implementations)).choices
            logger.info("encoders: %s", "; ".join(map(str, encoders)))
        self._readiness = Readiness(
            server.engine,
            server.media_limits.stats_interval_s,
            has_room=lambda: sessions.has_room and all(check() for check in server.room_checks),
            can_make_room=(lambda: sessions.can_make_room) if server.is_world else None,
            media_bytes=server.media_bytes,
            reply_bytes=lambda: sessions.held_bytes,
            encoders=encoders,
        )

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        responses: dict[int | str, dict[str, Any]] = {
            200: {"model": ReadyReply, "description": "The server accepts new work."},
            503: {
                "model": ReadyReply,
                "description": "The server is full (`capacity`), or its engine has stopped.",
            },
        }
        app.add_api_route(
            READY_PATH,
            self._ready,
            methods=["GET"],
            response_class=Response,
            response_model=None,
            responses=responses,
        )
        return ()

    async def _ready(self, request: Request) -> Response:
        """Return whether this server accepts new work now."""
        assert self._readiness is not None, "vLLM initialises state before it serves"
        return await self._readiness.ready()
