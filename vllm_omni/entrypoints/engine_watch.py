# SPDX-License-Identifier: Apache-2.0
"""`EngineWatch`: ends an API server process when its engine dies or stands still.

It is woken by the kernel when a process of the engine ends, and asks vLLM twenty times a second whether the engine
lives, which also covers processes on other machines and failures that end none. When it does not, the doors tell every
client, the server ends, and its exit status is `ENGINE_DIED`: stock vLLM looks every 5 s, closes sockets as for a
planned stop and exits with 0, so no supervisor restarts it. vLLM reports a dead worker only when the others have left,
which may take seconds: those that have not within `_LEAVING_S` are killed, so that HTTP requests learn of the death as
soon as sockets do. A process of the engine that has been stopped (SIGSTOP) for `stopped_timeout_s` is killed: then the
engine is dead and all of this follows. A server that was told to stop (SIGTERM, SIGINT) exits with 0.

The status is that of a plain `vllm serve`, too: a task raises SystemExit when the event loop is closed.
Held by tests/entrypoints/test_engine_watch.py and tests/entrypoints/realtime/test_death_served.py.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, Final

from fastapi import FastAPI
from vllm import envs

from vllm_omni.exit_codes import ENGINE_DIED
from vllm_omni.processes import is_stopped

logger = logging.getLogger("vllm." + __name__)

_POLL_S: Final = 0.05
_LOOK_S: Final = 0.25
_OWN_GAP_S: Final = 2.0
"""A loop that was held up for so long cannot tell for how long others were stopped."""
_LEAVING_S: Final = 0.3
"""How long the rest of a dead engine has to log why and to end by itself."""
_CLOSING_S: Final = 3
"""How long connections may take to close once the engine is dead."""


async def _nobody() -> None:
    """Nobody is to be told."""


class EngineWatch:
    """`attach` while the application is built, after everything that handles signals; `start` with the engine."""

    def __init__(self) -> None:
        self._is_dead: Callable[[], bool] | None = None
        self._pids: Sequence[int] = ()
        self._stopped_timeout_s: float | None = None
        self._tell: Callable[[], Awaitable[None]] = _nobody
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(
        self,
        is_dead: Callable[[], bool],
        pids: Sequence[int] = (),
        stopped_timeout_s: float | None = None,
        tell: Callable[[], Awaitable[None]] = _nobody,
    ) -> None:
        """pids: the engine's processes on this machine. tell: returns when the doors' clients know."""
        self._is_dead, self._tell = is_dead, tell
        self._pids = [pid for pid in pids if pid != os.getpid()]
        self._stopped_timeout_s = stopped_timeout_s

    def attach(self, app: FastAPI) -> None:
        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(starting: FastAPI) -> AsyncIterator[Any]:
            async with inner(starting) as state:
                watching = None
                if self._is_dead is not None:
                    self._note_signals()
                    watching = asyncio.create_task(self._watch(starting, self._is_dead))
                try:
                    yield state
                finally:
                    if watching is not None:
                        watching.cancel()

        app.router.lifespan_context = lifespan

    def _note_signals(self) -> None:
        """Remember that a stop was asked for: after it, an engine that ends is no accident.

        Event loops get signals through a descriptor to which Python writes their numbers; the handler that Python runs
        besides is a dummy of theirs, which this replaces.
        """

        def note(number: int, frame: FrameType | None) -> None:
            self._is_stopping = True

        with contextlib.suppress(ValueError):  # not the main thread: nobody's signals are handled here
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, note)

    async def _watch(self, app: FastAPI, is_dead: Callable[[], bool]) -> None:
        with _end_of_any(self._pids) as ended:
            await self._wait_for_death(is_dead, ended)
        if not self._is_stopping:
            await self._end(app, is_dead)

    async def _wait_for_death(self, is_dead: Callable[[], bool], ended: asyncio.Event) -> None:
        looked_s = time.monotonic()
        running_s = dict.fromkeys(self._pids, looked_s)
        while not (ended.is_set() or is_dead()):
            now_s = time.monotonic()
            if self._stopped_timeout_s is not None and now_s - looked_s >= _LOOK_S:
                for pid in self._pids:
                    if now_s - looked_s > _OWN_GAP_S or not is_stopped(pid):
                        running_s[pid] = now_s
                    elif now_s - running_s[pid] >= self._stopped_timeout_s:
                        _end_stopped(pid, self._stopped_timeout_s)
                looked_s = now_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await ended.wait()

    async def _end_rest(self, is_dead: Callable[[], bool]) -> None:
        """Have vLLM notice the end of one of the engine's processes by the end of all."""
        give_up_s = time.monotonic() + _LEAVING_S
        while not is_dead() and time.monotonic() < give_up_s:
            await asyncio.sleep(_POLL_S)
        if not is_dead():
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def _end(self, app: FastAPI, is_dead: Callable[[], bool]) -> None:
        logger.critical("engine_died: clients are told, and this server ends with status %d", ENGINE_DIED)
        self._tasks.append(asyncio.create_task(_exit_with(ENGINE_DIED)))
        await asyncio.gather(self._tell(), self._end_rest(is_dead))
        if not envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
            app.state.server.config.timeout_graceful_shutdown = _CLOSING_S
            app.state.server.should_exit = True


@contextmanager
def _end_of_any(pids: Sequence[int]) -> Iterator[asyncio.Event]:
    """An event that is set as soon as one of these processes ends."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    watched: set[int] = set()

    def end(descriptor: int) -> None:
        loop.remove_reader(descriptor)
        ended.set()

    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            ended.set()
        except OSError as error:  # a kernel before 5.3, or a sandbox without this call: vLLM tells
            logger.warning("the end of the engine's process %d may be noticed late: %s", pid, error)
        else:
            watched.add(descriptor)
            loop.add_reader(descriptor, end, descriptor)
    try:
        yield ended
    finally:
        for descriptor in watched:
            loop.remove_reader(descriptor)
            os.close(descriptor)


def _end_stopped(pid: int, timeout_s: float) -> None:
    logger.critical("process %d of the engine has been stopped for %g s: ending it", pid, timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def _exit_with(status: int) -> None:
    """Wait for the end of the event loop, which cancels running tasks, and make it the end of the process."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(_POLL_S)  # the other tasks end first
        raise SystemExit(status) from None
