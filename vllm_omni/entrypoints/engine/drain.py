# SPDX-License-Identifier: Apache-2.0
"""`GracefulStop`: drains an API server process after SIGTERM, before the process exits.

On SIGTERM, stock vLLM stops the engine immediately, or with `--shutdown-timeout` as soon as its
requests have finished. In either case the engine stops too early, because chunks in flight and
snapshots still need it. This class therefore installs its own SIGTERM handler on the same event
loop, in the application's lifespan, which uvicorn runs before it listens. The handler refuses new
work, waits up to `drain_timeout_s` for the endpoints to finish, and then stops uvicorn by setting
`should_exit`. vLLM then stops the engine as usual. A second SIGTERM ends the wait.

The API server must receive SIGTERM before the engine does. If a process manager, such as systemd
without `KillMode=mixed`, signals the engine process at the same time, the engine stops too early.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import FastAPI
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.lifespan import run_before_serving
from vllm_omni.entrypoints.limits.access import READY_PATH, route_path

logger = logging.getLogger("vllm." + __name__)

_REFUSED_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})
_LEAST_CLOSING_S: Final = 3.0
"""Minimum time in seconds for closing connections, regardless of the time spent draining."""


class GracefulStop:
    """Drains one API server process after SIGTERM.

    Call `attach_to_app` while vLLM builds the application, and `start_handling_signals` after the
    endpoints have started.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.in_flight = 0
        """Number of HTTP requests in progress that change state or generate output."""
        self._finish: Callable[[], Awaitable[None]] | None = None
        self._timeout_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start_handling_signals(
        self, finish: Callable[[], Awaitable[None]], timeout_s: float
    ) -> None:
        """Configure what happens between SIGTERM and the server's exit.

        Args:
            finish: Coroutine function that returns when the endpoints have finished.
            timeout_s: Time limit in seconds; 0 leaves vLLM's own shutdown unchanged.
        """
        self._finish, self._timeout_s = finish, timeout_s

    def attach_to_app(self, app: FastAPI) -> None:
        app.add_middleware(DrainGuard, stop=self)
        run_before_serving(app, self._listen)

    def _listen(self, app: FastAPI) -> None:
        if self._finish is None or self._timeout_s == 0:
            return
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop, app)
        # The caller is not on the main thread, or the platform does not support signal handlers.
        except (NotImplementedError, RuntimeError, ValueError):
            logger.info("graceful shutdown is not available: this server has no signal handlers")

    def _stop(self, app: FastAPI) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._drain(app))
        else:
            logger.info("drain_cut_short: stopping now")
            self._task.cancel()

    async def _drain(self, app: FastAPI) -> None:
        assert self._finish is not None
        started_s = time.monotonic()
        logger.info("drain_started timeout_s=%g", self._timeout_s)
        self.is_draining = True
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._finish()
                while self.in_flight:
                    await asyncio.sleep(0.02)
            logger.info("drain_ended lasted_s=%.3f", time.monotonic() - started_s)
        except TimeoutError:
            logger.warning("drain_timed_out after_s=%g: remaining work is dropped", self._timeout_s)
        except Exception:
            logger.exception("drain failed")
        finally:
            server = app.state.server
            left_s = max(_LEAST_CLOSING_S, self._timeout_s - (time.monotonic() - started_s))
            server.config.timeout_graceful_shutdown = int(left_s)
            server.should_exit = True


class DrainGuard:
    """ASGI middleware that refuses new work with status 503 while the server drains.

    During this time, the readiness probe reports `draining`.
    """

    def __init__(self, app: ASGIApp, stop: GracefulStop) -> None:
        self._app, self._stop = app, stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        works = scope["method"] in _REFUSED_METHODS
        path = route_path(scope)
        if self._stop.is_draining and (works or path == READY_PATH):
            await _refusal(path).__call__(scope, receive, send)
            return
        self._stop.in_flight += works
        try:
            await self._app(scope, receive, send)
        finally:
            self._stop.in_flight -= works


def _refusal(path: str) -> Response:
    if path == READY_PATH:
        response: Response = JSONResponse({"status": "draining"}, 503, {"Retry-After": "5"})
    else:
        error = ApiError(503, "the server is stopping", code="draining", retry_after_s=5)
        response = error.response()
    response.headers["Connection"] = "close"
    return response
