# SPDX-License-Identifier: Apache-2.0
"""`EngineWatch`: stops an API server process if its engine dies or stays stopped.

The kernel reports when an engine process on this machine ends. In addition, vLLM's own state is
polled twenty times a second, to detect when processes on other machines end and when the engine
fails without exiting. If the engine is dead, the endpoints send an error to every client, and the
server exits with `ENGINE_DIED`. Stock vLLM, in contrast, polls every 5 s, closes sockets as in a
planned shutdown and exits with 0, so supervisors do not restart it.

vLLM reports a dead worker only after the other workers have exited, which may take seconds. Engine
processes that have not exited within `_LEAVING_S` are killed, so HTTP requests fail as early as
WebSockets do. An engine process that has been stopped (SIGSTOP) for `stopped_timeout_s` is also
killed. After SIGTERM or SIGINT, the server exits with 0. docs/how_to/operations.md ("Who watches
whom") compares `EngineWatch` with the other dead-process checks.

If the engine dies, a plain `vllm serve` with this package also exits with `ENGINE_DIED`, because a
task raises SystemExit when the event loop closes.
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
from typing import Final

from fastapi import FastAPI
from vllm import envs

from vllm_omni.entrypoints.lifespan import run_while_serving
from vllm_omni.runtime.exit_codes import ENGINE_DIED
from vllm_omni.runtime.processes import is_stopped

logger = logging.getLogger("vllm." + __name__)

_POLL_S: Final = 0.05
_LOOK_S: Final = 0.25
_OWN_GAP_S: Final = 2.0
"""Maximum expected interval in seconds between two checks. After a longer interval, this process
itself must have been paused, so the counters for stopped engine processes restart at zero.
"""
_LEAVING_S: Final = 0.3
"""Time in seconds that a dead engine's remaining processes have to log the reason and exit."""
_CLOSING_S: Final = 3
"""Time in seconds that connections have to close after the engine has died."""


async def _notify_no_client() -> None:
    """Do nothing. This function is the default for servers without long-lived connections."""


class EngineWatch:
    """Watches the engine of one API server process and stops the process if the engine dies.

    Call `attach_to_app` while vLLM builds the application, after all other code that installs
    signal handlers has run. Call `start_watching` after engine startup.
    """

    def __init__(self) -> None:
        self._is_dead: Callable[[], bool] | None = None
        self._pids: Sequence[int] = ()
        self._stopped_timeout_s: float | None = None
        self._notify_clients: Callable[[], Awaitable[None]] = _notify_no_client
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start_watching(
        self,
        is_dead: Callable[[], bool],
        pids: Sequence[int] = (),
        stopped_timeout_s: float | None = None,
        notify_clients: Callable[[], Awaitable[None]] = _notify_no_client,
    ) -> None:
        """Set the engine that is watched while the application runs.

        Args:
            is_dead: Function that returns whether the engine has died.
            pids: Ids of the engine processes on this machine.
            stopped_timeout_s: Seconds after which a stopped process is killed. Default: never.
            notify_clients: Coroutine function that sends an error to all of the endpoints' clients.
        """
        self._is_dead, self._notify_clients = is_dead, notify_clients
        self._pids = [pid for pid in pids if pid != os.getpid()]
        self._stopped_timeout_s = stopped_timeout_s

    def attach_to_app(self, app: FastAPI) -> None:
        run_while_serving(app, self._watching)

    @asynccontextmanager
    async def _watching(self, starting: FastAPI) -> AsyncIterator[None]:
        if self._is_dead is None:
            yield
            return
        self._note_signals()
        task = asyncio.create_task(self._watch(starting, self._is_dead))
        try:
            yield
        finally:
            task.cancel()

    def _note_signals(self) -> None:
        """Record a requested shutdown, because an engine exit is then expected.

        asyncio receives signals through a file descriptor, but must also install a dummy Python
        handler for each signal. This method replaces the dummy handler.
        """

        def note(number: int, frame: FrameType | None) -> None:
            self._is_stopping = True

        with contextlib.suppress(ValueError):  # only the main thread can handle signals
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
        """Kill the engine processes that do not exit on their own, so that vLLM reports the engine
        as dead.
        """
        give_up_s = time.monotonic() + _LEAVING_S
        while not is_dead() and time.monotonic() < give_up_s:
            await asyncio.sleep(_POLL_S)
        if not is_dead():
            for pid in self._pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    async def _end(self, app: FastAPI, is_dead: Callable[[], bool]) -> None:
        logger.critical(
            "engine_died: informing clients; this server exits with status %d", ENGINE_DIED
        )
        self._tasks.append(asyncio.create_task(_exit_with(ENGINE_DIED)))
        await asyncio.gather(self._notify_clients(), self._end_rest(is_dead))
        if not envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH:
            app.state.server.config.timeout_graceful_shutdown = _CLOSING_S
            app.state.server.should_exit = True


@contextmanager
def _end_of_any(pids: Sequence[int]) -> Iterator[asyncio.Event]:
    """Yield an event that is set when one of the processes ends."""
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
        except OSError as error:  # Linux before 5.3, or a sandbox: vLLM reports the death later
            logger.warning("the exit of engine process %d may be detected late: %s", pid, error)
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
    logger.critical("engine process %d has been stopped for %g s: killing it", pid, timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


async def _exit_with(status: int) -> None:
    """Wait until the closing event loop cancels this task, then exit the process."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(_POLL_S)  # let the other tasks end first
        raise SystemExit(status) from None
