# SPDX-License-Identifier: Apache-2.0
"""Runs a uvicorn server in a thread of the test process."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI
from helpers.waits import seconds, wait_until


@contextmanager
def serving(config: uvicorn.Config) -> Iterator[int]:
    """Serve the application on a free loopback port and yield the port.

    The server is available as `app.state.server`, as it is in vLLM.
    """
    assert isinstance(config.app, FastAPI)
    server = config.app.state.server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_until(lambda: server.started or not thread.is_alive())
        assert server.started, "the server did not start"
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(seconds(10))
