# SPDX-License-Identifier: Apache-2.0
"""The status code for an adapter that cannot be loaded, tested with a stand-in for vLLM's own
route.
"""

from types import SimpleNamespace

import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

from vllm_omni.entrypoints.openai import adapter_route


@pytest.mark.parametrize(("is_dead", "status"), [(False, 400), (True, 500)])
def test_an_adapter_that_cannot_be_loaded_is_a_client_error(is_dead: bool, status: int) -> None:
    """A request to load an adapter that cannot be loaded gets 400 with vLLM's error text, or 500 if
    the engine is dead.
    """
    app = FastAPI()
    app.state.engine_client = SimpleNamespace(errored=is_dead)

    async def stock(request: LoadLoRAAdapterRequest) -> JSONResponse:
        error = {
            "message": f"{request.lora_name} has rank 0",
            "type": "InternalServerError",
            "code": 500,
        }
        return JSONResponse({"error": error}, 500)

    async def called(request: LoadLoRAAdapterRequest, raw_request: object) -> JSONResponse:
        return await stock(request)

    app.add_api_route(adapter_route.PATH, stock, methods=["POST"])
    app.routes[-1].endpoint = called  # type: ignore[attr-defined]
    adapter_route.AdapterRoute().add_routes(app)
    # vLLM also inserts the routes of endpoint plugins before its own.
    app.router.routes.insert(0, app.router.routes.pop())
    reply = TestClient(app).post(adapter_route.PATH, json={"lora_name": "ink", "lora_path": "/ink"})
    assert reply.status_code == status == reply.json()["error"]["code"]
    assert reply.json()["error"]["message"] == "ink has rank 0"


def test_a_server_that_loads_no_adapters_has_no_such_route() -> None:
    app = FastAPI()
    adapter_route.AdapterRoute().add_routes(app)
    assert TestClient(app).post(adapter_route.PATH, json={}).status_code == 404
