# SPDX-License-Identifier: Apache-2.0
"""`serving`: a uvicorn server in a thread of the test's process."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI


@contextmanager
def serving(config: uvicorn.Config) -> Iterator[int]:
    """Serve the configuration's application on a free port of the loopback address: the port.

    The server is in `app.state.server`, where vLLM puts its own.
    """
    assert isinstance(config.app, FastAPI)
    server = config.app.state.server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)
