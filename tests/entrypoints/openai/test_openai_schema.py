# SPDX-License-Identifier: Apache-2.0
"""Tests of the image and video routes' OpenAPI description with schemathesis, over real HTTP and
with an engine that responds instantly.

Neither calls that follow the description nor calls that violate it may result in a 5xx or in an
undocumented status or content type. Replies match the description, and calls that violate it are
rejected. A short run checks each merge, and a long run takes place every night. This module selects
the operations itself, because schemathesis's fixtures do not work with pytest 9.
"""

import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from helpers.instant_engine import InstantEngine
from helpers.needs_schemathesis import schemathesis
from helpers.waits import seconds, wait_until
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.routes import OpenAIRoutes
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.testing.null.image.family import CAPABILITIES

ROUTES = [
    ("/v1/images/generations", "POST"),
    ("/v1/images/edits", "POST"),
    ("/v1/files/{file_id}/content", "GET"),
    ("/v1/videos", "POST"),
    ("/v1/videos", "GET"),
    ("/v1/videos/{video_id}", "GET"),
    ("/v1/videos/{video_id}", "DELETE"),
    ("/v1/videos/{video_id}/cancel", "POST"),
    ("/v1/videos/{video_id}/content", "GET"),
]
UNBREAKABLE = ROUTES[2:3] + ROUTES[5:8]
"""Calls to these routes cannot violate the description, because any text is a valid id."""
CALLS = [
    pytest.param(path, method, mode, id=f"{method} {path} {mode.value}")
    for path, method in ROUTES
    for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    if mode is GenerationMode.POSITIVE or (path, method) not in UNBREAKABLE
]
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]

REFUSED = [400, 401, 403, 404, 405, 406, 409, 413, 415, 422, 428, 429]
"""Status codes of refused calls. A call that violates the description may also be too large (413);
the size is checked first.
"""
CONFIG = schemathesis.Config.from_dict(
    {"checks": {"negative_data_rejection": {"expected-statuses": REFUSED}}}
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Serve only these routes and load their OpenAPI description."""
    limits = MediaLimits(media_dir=str(tmp_path_factory.mktemp("media")), max_body_bytes=1 << 20)
    engine = InstantEngine()
    engine.is_world = False
    model = ServedModel(("m",), CAPABILITIES, 160, 96, 256 * 256, 4)
    routes = OpenAIRoutes()
    with ThreadPoolExecutor(2) as executor:

        @contextlib.asynccontextmanager
        async def start(app: FastAPI) -> AsyncIterator[None]:
            routes.connect_engine(engine, model, limits, EndpointLimits(), executor)
            yield

        app = FastAPI(lifespan=start)
        routes.add_routes(app)

        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        thread = threading.Thread(target=server.run)
        thread.start()
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield schemathesis.openapi.from_url(f"http://127.0.0.1:{port}/openapi.json", config=CONFIG)
        server.should_exit = True
        thread.join()


def run(api: Any, path: str, method: str, mode: GenerationMode, max_examples: int) -> None:
    """Generate calls to one operation and check their responses."""

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        statuses.append(case.call_and_validate(checks=CHECKS, timeout=seconds(60)).status_code)

    statuses: list[int] = []
    call()
    assert statuses, "no call was made"


@pytest.mark.parametrize(
    "max_examples", [10, pytest.param(500, marks=pytest.mark.nightly)], ids=["short", "long"]
)
@pytest.mark.parametrize(("path", "method", "mode"), CALLS)
def test_a_route_conforms_to_its_description(
    api: Any, path: str, method: str, mode: GenerationMode, max_examples: int
) -> None:
    """Each route conforms to its description in ten generated calls of each kind, or 500 in the
    nightly run.
    """
    run(api, path, method, mode, max_examples)


def test_every_route_is_tested(api: Any) -> None:
    """The description contains no image, file or video route that is not tested."""
    paths = api.raw_schema["paths"]
    ours = {
        (path, method.upper())
        for path, methods in paths.items()
        for method in methods
        if re.match(r"/v1/(images|files|videos)", path)
    }
    assert ours == set(ROUTES)
