# SPDX-License-Identifier: Apache-2.0
"""The `vllm.endpoint_plugins` entry point that adds this package's endpoints to stock vLLM.

vLLM loads the plugin if `VLLM_PLUGINS` contains `vllm_omni` (`vllm serve --omni` sets it) and the
served model accepts pooling requests for the `plugin` task. `endpoints.py` lists the endpoints.
"""

from argparse import Namespace

from fastapi import FastAPI
from starlette.datastructures import State
from vllm.engine.protocol import EngineClient
from vllm.tasks import SupportedTask

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.endpoints import ENDPOINTS
from vllm_omni.entrypoints.engine.drain import GracefulStop
from vllm_omni.entrypoints.engine.engine_watch import EngineWatch
from vllm_omni.entrypoints.engine.environment import read_struct
from vllm_omni.entrypoints.limits.access import BrowserAccess, configured_keys
from vllm_omni.entrypoints.limits.body_timeout import BodyLimits, BodyTimeout
from vllm_omni.entrypoints.operations import OperatorFeatures
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.entrypoints.server_context import ServerContext
from vllm_omni.entrypoints.websocket import apply_at_startup
from vllm_omni.runtime.processes import end_with_parent


class OmniEndpoints:
    """The endpoints, middleware and life cycle of one API server process.

    This class implements vLLM's `EndpointPlugin` protocol.
    """

    name = "vllm_omni"
    required_tasks: tuple[SupportedTask, ...] | None = ("plugin",)
    """Tasks that the plugin serves. vLLM loads the plugin only if the served model supports at
    least one of the tasks.
    """

    def __init__(self) -> None:
        self._endpoints = [create() for create in ENDPOINTS]
        self._limits = EndpointLimits()
        self._operations = OperatorFeatures()
        self._stop = GracefulStop()
        self._watch = EngineWatch()

    def attach_router(self, app: FastAPI) -> None:
        """Add all routes and middleware. The middleware added last is the first to process a
        request.
        """
        self._limits = read_struct(EndpointLimits)
        open_paths = [path for endpoint in self._endpoints for path in endpoint.add_routes(app)]
        apply_at_startup(app, self._limits.frame_budget)
        app.add_middleware(BodyTimeout, limits=read_struct(BodyLimits))
        self._stop.attach_to_app(app)
        self._watch.attach_to_app(app)
        self._operations.attach_to_app(app)
        BrowserAccess(configured_keys(app.state.args)).attach_to_app(app, open_paths=open_paths)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        """Start all endpoints, the handler for graceful shutdown and the engine watch."""
        # A render-only server has no engine. `required_tasks` keeps this plugin off such servers.
        if engine_client is None:
            return
        end_with_parent()  # this may be one of several API server processes
        omni = OmniConfig.from_additional_config(engine_client.vllm_config.additional_config)
        await self._operations.start_serving(engine_client, omni)
        server = ServerContext.create(
            engine_client, state, args, omni, self._limits, self._operations.quotas
        )
        for endpoint in self._endpoints:
            await endpoint.start_serving(server)
        sessions, engine = server.sessions, server.engine
        self._stop.start_handling_signals(
            lambda: sessions.drain.drain_sessions(sessions), omni.drain_timeout_s
        )
        self._watch.start_watching(
            lambda: engine.is_dead,
            await engine.process_ids(),
            omni.rank_timeout_s,
            sessions.engine_died,
        )


def create_plugin() -> OmniEndpoints:
    """Create the plugin. `setup.py` registers this function as the entry point."""
    return OmniEndpoints()
