# SPDX-License-Identifier: Apache-2.0
"""Fixtures for the realtime endpoints: a server with a fake engine, and a real server."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_engine import Client, EndpointServer, FakeEngine
from helpers.served import Served

from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_endpoint(engine: FakeEngine) -> Iterator[Callable[..., EndpointServer]]:
    """Return a function: `make_endpoint(info={...}, origins=[...], **limits)` starts a server that
    stops after the test.
    """
    with ExitStack() as stack:

        def make(
            info: dict[str, Any] | None = None, origins: Sequence[str] = (), **limits: Any
        ) -> EndpointServer:
            world = StreamInfo(**{"height": 32, "width": 48, "model": "null", **(info or {})})
            return stack.enter_context(
                EndpointServer(engine, EndpointLimits(**limits), world, origins)
            )

        yield make


@pytest.fixture
def endpoint(make_endpoint: Callable[..., EndpointServer]) -> EndpointServer:
    return make_endpoint()


@pytest.fixture
def client(endpoint: EndpointServer) -> Iterator[Client]:
    with endpoint.client() as client:
        yield client


@pytest.fixture(scope="package")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Served]]:
    """Yield the list of all servers started so far. The last server is still running unless a test
    has killed it.
    """
    running: list[Served] = []
    yield running
    for server in running:
        server.stop()


@pytest.fixture
def served(
    _served: list[Served], null_world: Path, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    """Return a real server that the tests of all endpoints share. If a test has killed the server,
    a new one is started.
    """
    if not _served or not _served[-1].is_healthy():
        environ = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_OMNI_BODY_GRACE_S": "4"}
        server = Served(null_world, tmp_path_factory.mktemp("served"), environ=environ)
        _served.append(server)
        server.wait_until_healthy()
    return _served[-1]
