# SPDX-License-Identifier: Apache-2.0
"""Add steps to an application's lifespan.

uvicorn runs the lifespan before it listens, and reads its config for each new connection. A
lifespan step can therefore change `app.state.server.config`. vLLM stores the uvicorn server and the
parsed arguments in `app.state` before the lifespan starts.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI


def run_before_serving(app: FastAPI, step: Callable[[FastAPI], None]) -> None:
    """Register a function that runs after all earlier steps have started and before the server
    listens.
    """

    @asynccontextmanager
    async def around(starting: FastAPI) -> AsyncIterator[None]:
        step(starting)
        yield

    run_while_serving(app, around)


def run_while_serving(
    app: FastAPI, step: Callable[[FastAPI], AbstractAsyncContextManager[None]]
) -> None:
    """Register a context manager that is entered after all earlier steps have started and exited
    before any of them ends.
    """
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(starting: FastAPI) -> AsyncIterator[Any]:
        async with inner(starting) as state, step(starting):
            yield state

    app.router.lifespan_context = lifespan
