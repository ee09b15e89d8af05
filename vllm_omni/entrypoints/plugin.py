# SPDX-License-Identifier: Apache-2.0
"""The `vllm.endpoint_plugins` entry point: adds this package's endpoints to stock vLLM.

vLLM loads it when `VLLM_PLUGINS` names `vllm_omni` (`vllm serve --omni` sets it) and the served
model accepts pooling requests of the task `plugin`. `server.py` lists the endpoints.
"""

from argparse import Namespace

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.tasks import SupportedTask

from vllm_omni.entrypoints.server import OmniServer
from vllm_omni.runtime.processes import end_with_parent


class OmniEndpoints:
    """All endpoints of this package in one API server process. Satisfies `EndpointPlugin`."""

    name = "vllm_omni"
    required_tasks: tuple[SupportedTask, ...] | None = ("plugin",)

    def __init__(self) -> None:
        self._server = OmniServer()

    def attach_router(self, app: FastAPI) -> None:
        self._server.attach(app)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        # A render-only server has no engine. `required_tasks` excludes this plugin there.
        if engine_client is None:
            return
        end_with_parent()  # this may be one of several API server processes
        await self._server.start(engine_client, state, args)


def create_plugin() -> OmniEndpoints:
    """Return the plugin. setup.py names this function as an entry point."""
    return OmniEndpoints()
