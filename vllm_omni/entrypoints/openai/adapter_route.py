# SPDX-License-Identifier: Apache-2.0
"""`POST /v1/load_lora_adapter`: vLLM's route, modified to return status 400 if an adapter cannot be
loaded.

vLLM returns 500 whenever an adapter cannot be loaded. However, an adapter that does not match the
model is a client error, unlike a dead engine.
"""

from collections.abc import Iterable
from typing import Final

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest

from vllm_omni.entrypoints.server_context import ServerContext

PATH: Final = "/v1/load_lora_adapter"


class AdapterRoute:
    """The adapter route of one API server process."""

    def add_routes(self, app: FastAPI) -> Iterable[str]:
        """Replace vLLM's route if the server can load adapters at run time."""
        stock = next(
            (route for route in app.routes if isinstance(route, APIRoute) and route.path == PATH),
            None,
        )
        if stock is None:
            return ()
        handler = stock.endpoint

        async def load_lora_adapter(
            request: LoadLoRAAdapterRequest, raw_request: Request
        ) -> Response:
            """Load a LoRA adapter and make it available under a name."""
            response: Response = await handler(request, raw_request)
            if response.status_code != 500 or raw_request.app.state.engine_client.errored:
                return response
            body = msgspec.json.decode(response.body)
            body["error"] |= {"type": "BadRequestError", "code": 400}
            return JSONResponse(body, 400)

        app.add_api_route(
            PATH,
            load_lora_adapter,
            methods=["POST"],
            dependencies=stock.dependencies,
            response_model=None,
        )
        return ()

    async def start_serving(self, server: ServerContext) -> None:
        """Do nothing, because the route uses vLLM's own handler."""
