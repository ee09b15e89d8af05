# SPDX-License-Identifier: Apache-2.0
"""`GracefulStop`: draining of an API server process between SIGTERM and its end.

Stock vLLM answers SIGTERM by stopping the engine at once (or, with `--shutdown-timeout`, after its requests), which is
too late for anything that needs the engine: chunks in flight, snapshots. This installs another handler for the signal
on the same event loop, from the application's lifespan, which uvicorn runs before it listens. It refuses new work, lets
the doors finish, bounded by `drain_timeout_s`, and then ends uvicorn by its own flag (`should_exit`), after which vLLM
stops the engine as after any end of its server. A second SIGTERM ends the waiting.

The signal must reach the API server alone first: a process manager that signals the engine's process at the same moment
(systemd without `KillMode=mixed`) takes the engine away. Held by tests/entrypoints/test_graceful_stop.py and
tests/entrypoints/realtime/test_drain_served.py.
"""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger("vllm." + __name__)

READY_PATH: Final = "/omni/ready"
_REFUSED_METHODS: Final = frozenset({"POST", "PUT", "PATCH"})
_LEAST_CLOSING_S: Final = 3.0
"""Left for connections to close, whatever the drain has used up."""


class GracefulStop:
    """`attach` while the application is built; `start` once the doors to finish are known."""

    def __init__(self) -> None:
        self.is_draining = False
        self.in_flight = 0
        """HTTP requests that make something."""
        self._finish: Callable[[], Awaitable[None]] | None = None
        self._timeout_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self, finish: Callable[[], Awaitable[None]], timeout_s: float) -> None:
        """finish: returns when the doors have finished. timeout_s: 0 = vLLM's own way of stopping stays."""
        self._finish, self._timeout_s = finish, timeout_s

    def attach(self, app: FastAPI) -> None:
        app.add_middleware(DrainGuard, stop=self)
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(starting: FastAPI) -> AsyncIterator[Any]:
            async with inner(starting) as state:
                self._listen(starting)
                yield state

        app.router.lifespan_context = lifespan

    def _listen(self, app: FastAPI) -> None:
        if self._finish is None or self._timeout_s == 0:
            return
        try:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stop, app)
        except (NotImplementedError, RuntimeError, ValueError):  # no main thread, or no signals on this platform
            logger.info("this server cannot be stopped gracefully: it has no signal handlers")

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
            logger.warning("drain_timed_out after_s=%g: what is left is dropped", self._timeout_s)
        except Exception:
            logger.exception("drain failed")
        finally:
            server = app.state.server
            left_s = max(_LEAST_CLOSING_S, self._timeout_s - (time.monotonic() - started_s))
            server.config.timeout_graceful_shutdown = int(left_s)
            server.should_exit = True


class DrainGuard:
    """ASGI middleware: while draining, new work is answered 503, and the readiness probe `draining`."""

    def __init__(self, app: ASGIApp, stop: GracefulStop) -> None:
        self._app, self._stop = app, stop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        works = scope["method"] in _REFUSED_METHODS
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        if self._stop.is_draining and (works or path == READY_PATH):
            await _refusal(path).__call__(scope, receive, send)
            return
        self._stop.in_flight += works
        try:
            await self._app(scope, receive, send)
        finally:
            self._stop.in_flight -= works


def _refusal(path: str) -> JSONResponse:
    headers = {"Retry-After": "5", "Connection": "close"}
    if path == READY_PATH:
        return JSONResponse({"status": "draining"}, 503, headers)
    error = {"message": "the server is stopping", "type": "server_error", "param": None, "code": "draining"}
    return JSONResponse({"error": error}, 503, headers)
