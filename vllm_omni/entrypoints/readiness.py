# SPDX-License-Identifier: Apache-2.0
"""`/omni/ready`: whether this server takes new work now, as opposed to `/health`, which says whether it lives.

200 = there is room; 503 with `status` `capacity` = it works, but would refuse; 503 with `engine_dead` = it does not
work. The same worker statistics feed the gauges of `metrics.py`, every `stats_interval_s`.

Workers answer between engine steps, a probe answers within a second whatever the step: it gives the newest numbers and
says their age. The question is not dropped with the probe that asked it, so its answer serves the next one.
Held by tests/entrypoints/test_readiness.py and tests/entrypoints/openai/test_openai_served.py.
"""

import asyncio
import contextvars
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.responses import Response

from vllm_omni.entrypoints.engine import OmniEngine
from vllm_omni.entrypoints.metrics import door_metrics
from vllm_omni.outputs import RequestFailed

logger = logging.getLogger("vllm." + __name__)

PATH: Final = "/omni/ready"
_FRESH_S: Final = 0.25
_COUNTED: Final = ("sessions", "max_sessions", "bytes", "max_bytes")
_PATIENCE_S: Final = 0.5  # Kubernetes gives a probe one second unless told otherwise


class ReadyReply(BaseModel):
    """status: `ready`, `capacity` or `engine_dead`. bytes, max_bytes: of sessions; over all data-parallel ranks.

    age_s: seconds since the workers said so; more than a second if an engine step takes that long. None: they have said
    nothing yet. ranks: the numbers of each rank, if there are several.
    """

    status: str
    sessions: int | None = None
    max_sessions: int | None = None
    bytes: int | None = None
    max_bytes: int | None = None
    age_s: float | None = None
    ranks: list[dict[str, int | None]] | None = None


class Readiness:
    """has_room: asks the doors of this process. media_bytes: of files kept (called on a thread); reply_bytes: of
    the realtime doors' replies.

    can_make_room: whether a session could be closed for a new one; None: sessions do not matter, since requests of a
    model that is no world queue for them.
    """

    def __init__(
        self,
        engine: OmniEngine,
        interval_s: float,
        has_room: Callable[[], bool],
        can_make_room: Callable[[], bool] | None,
        media_bytes: Callable[[], int],
        reply_bytes: Callable[[], int],
    ) -> None:
        self._engine, self._interval_s = engine, interval_s
        self._has_room, self._can_make_room = has_room, can_make_room
        self._media_bytes, self._reply_bytes = media_bytes, reply_bytes
        self._stats: list[dict[str, Any]] = []  # of each data-parallel rank
        self._answered_s: float | None = None
        self._question: asyncio.Task[RequestFailed | None] | None = None
        self._sampler = asyncio.create_task(self._sample())

    async def ready(self) -> Response:
        if self._engine.is_dead:
            return JSONResponse(ReadyReply(status="engine_dead").model_dump(), 503)
        age_s = self._age_s()
        if age_s is None or age_s >= _FRESH_S:
            answered, _ = await asyncio.wait([self._ask()], timeout=_PATIENCE_S)  # does not cancel the question
            if any(question.result() is not None for question in answered):
                return JSONResponse(ReadyReply(status="engine_dead").model_dump(), 503)
            age_s = self._age_s()
        has_room = self._has_room() and (
            self._can_make_room is None or self._engine_has_room() or self._can_make_room()
        )
        reply = ReadyReply(
            status="ready" if has_room else "capacity",
            **_sums(self._stats),
            age_s=None if age_s is None else round(age_s, 3),
            ranks=[{name: rank[name] for name in _COUNTED} for rank in self._stats] if len(self._stats) > 1 else None,
        )
        headers = {} if has_room else {"Retry-After": "2"}
        return JSONResponse(reply.model_dump(), 200 if has_room else 503, headers)

    def _engine_has_room(self) -> bool:
        """Whether one more session fits on some rank, as large as those that it holds."""
        return not self._stats or any(_has_room(rank) for rank in self._stats)

    def _age_s(self) -> float | None:
        return None if self._answered_s is None else time.monotonic() - self._answered_s

    def _ask(self) -> "asyncio.Task[RequestFailed | None]":
        """The one question to the workers that is under way; its result is why there is no answer."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._refresh(), context=contextvars.Context())  # everybody's question
        return self._question

    async def _refresh(self) -> RequestFailed | None:
        try:
            self._stats = await self._engine.session_stats()
        except RequestFailed as failure:
            return failure
        self._answered_s = time.monotonic()
        door_metrics().engine_state(_sums(self._stats))
        return None

    async def _sample(self) -> None:
        while not self._engine.is_dead:
            failure = await asyncio.shield(self._ask())
            if failure is not None:
                logger.debug("no statistics this time: %s", failure)
            try:
                door_metrics().door_bytes(await asyncio.to_thread(self._media_bytes), self._reply_bytes())
            except OSError as error:
                logger.debug("no size of the files kept this time: %s", error)
            await asyncio.sleep(self._interval_s)


def _has_room(stats: Mapping[str, Any]) -> bool:
    if not stats["sessions"]:
        return True
    one_more = stats["bytes"] / stats["sessions"]
    fits = stats["max_bytes"] is None or stats["bytes"] + one_more <= stats["max_bytes"]
    return bool(stats["sessions"] < stats["max_sessions"] and fits)


def _sums(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over all ranks; None where a rank has no number."""
    sums: dict[str, Any] = {}
    for name in _COUNTED if ranks else ():
        values = [rank[name] for rank in ranks]
        sums[name] = None if None in values else sum(values)
    return sums


class ReadyRoute:
    """`attach` while the application is built; `readiness` when the engine is there."""

    def __init__(self) -> None:
        self.readiness: Readiness | None = None

    def attach(self, app: FastAPI) -> None:
        responses: dict[int | str, dict[str, Any]] = {
            200: {"model": ReadyReply, "description": "There is room."},
            503: {"model": ReadyReply, "description": "It works but is full (`capacity`), or its engine has stopped."},
        }
        app.add_api_route(
            PATH, self._ready, methods=["GET"], response_class=Response, response_model=None, responses=responses
        )

    async def _ready(self, request: Request) -> Response:
        """Whether this server takes new work now."""
        assert self.readiness is not None, "vLLM initialises state before it serves"
        return await self.readiness.ready()
