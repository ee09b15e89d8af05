# SPDX-License-Identifier: Apache-2.0
"""The `vllm.endpoint_plugins` entry point: adds this package's endpoints to stock vLLM's API server.

Loaded when `VLLM_PLUGINS` names `vllm_omni` (`vllm serve --omni` sets it) and the served model accepts pooling requests
of the task `plugin`. `server.py` lists what is added.
"""

from argparse import Namespace

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.tasks import SupportedTask

from vllm_omni.entrypoints.server import OmniServer
from vllm_omni.processes import end_with_parent


class OmniEndpoints:
    """All endpoints of this package in one API server process. Satisfies `EndpointPlugin`."""

    name = "vllm_omni"
    required_tasks: tuple[SupportedTask, ...] | None = ("plugin",)

    def __init__(self) -> None:
        self._server = OmniServer()

    def attach_router(self, app: FastAPI) -> None:
        self._server.attach(app)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        if engine_client is None:  # a render-only server; `required_tasks` keeps us away from it
            return
        end_with_parent()  # one of several API server processes
        await self._server.start(engine_client, state, args)


def create_plugin() -> OmniEndpoints:
    """Return the plugin; named in setup.py's entry points."""
    return OmniEndpoints()
