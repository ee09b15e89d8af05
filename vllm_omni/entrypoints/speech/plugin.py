# SPDX-License-Identifier: Apache-2.0
"""The `vllm_omni_speech` entry point in the `vllm.endpoint_plugins` group, which adds speech to
vLLM's language model server.

The checkpoint's model family starts the additional engines (`ModelFamily.start_speech`). The plugin
replaces `/v1/chat/completions` and `/health`, and adds `/v1/audio/speech`. Chat requests without
audio are forwarded to vLLM's own handler. All other routes and options, including `--api-key`, are
vLLM's own.
"""

import contextlib
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from vllm.engine.protocol import EngineClient
from vllm.tasks import SupportedTask
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.composition.speech import SpeechModel
from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.engine.engine_watch import EngineWatch
from vllm_omni.entrypoints.lifespan import run_while_serving
from vllm_omni.entrypoints.operations import OperatorFeatures
from vllm_omni.entrypoints.speech.routes import SpeechRoutes
from vllm_omni.model_executor.models.registry import detect_family


class SpeechEndpoints:
    """The speech routes of one API server process. This class implements vLLM's `EndpointPlugin`
    protocol.
    """

    name = "vllm_omni_speech"
    required_tasks: tuple[SupportedTask, ...] | None = ("generate",)
    """Tasks that the plugin serves. vLLM loads the plugin only if the served model supports at
    least one of the tasks.
    """

    def __init__(self) -> None:
        self._model: SpeechModel | None = None
        self._routes = SpeechRoutes()
        self._watch = EngineWatch()
        self._operations = OperatorFeatures()

    def attach_router(self, app: FastAPI) -> None:
        self._routes.attach_to_app(app)
        app.add_api_route("/health", self._health, methods=["GET"])
        run_while_serving(app, self._shut_engines_down)
        self._watch.attach_to_app(app)
        self._operations.attach_to_app(app)

    @contextlib.asynccontextmanager
    async def _shut_engines_down(self, app: FastAPI) -> AsyncIterator[None]:
        """Shut down the additional engines when the server stops."""
        try:
            yield
        finally:
            for engine in self._model.engines if self._model is not None else ():
                engine.shutdown()

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        if not isinstance(engine_client, AsyncLLM):
            raise ValueError("vllm_omni_speech needs vLLM's own AsyncLLM in the API server")
        if (args.api_server_count or 1) > 1:
            raise ValueError(
                "--api-server-count: each API server process would start its own engines; use 1"
            )
        path = Path(args.model)
        family = detect_family(path)
        if family.start_speech is None:
            raise ValueError(f"vllm_omni_speech: the family {family.name} of {path} has no speech")
        omni = OmniConfig.from_additional_config(engine_client.vllm_config.additional_config)
        await self._operations.start_serving(engine_client, omni)
        self._model = await family.start_speech(path, omni, engine_client)
        self._routes.start_serving(self._model, state)
        # Only the death of the language model's engine stops the server. `/health` names other dead
        # engines.
        served = OmniEngine(engine_client)
        self._watch.start_watching(
            lambda: served.is_dead, await served.process_ids(), omni.rank_timeout_s
        )

    async def _health(self, request: Request) -> Response:
        """Return 200 if every engine is alive, otherwise 503 with the names of the dead engines."""
        assert self._model is not None, "vLLM initialises state before it serves"
        dead = [engine.name for engine in self._model.engines if engine.is_dead]
        if dead:
            return JSONResponse({"status": "dead", "stages": dead}, status_code=503)
        return Response(status_code=200)


def create_plugin() -> SpeechEndpoints:
    """Create the plugin. `setup.py` registers this function as the entry point."""
    return SpeechEndpoints()
