# SPDX-License-Identifier: Apache-2.0
"""The `vllm.endpoint_plugins` entry point `vllm_omni_ar`: hidden states over HTTP, beside vLLM's own text routes.

    POST /v1/chat/completions, /v1/completions    as in stock vLLM, with `vllm_xargs: {"omni": "{...}"}` to ask
    GET  /v1/hidden_states/{response id}          the rows of one choice, once, as a safetensors file

Loaded when `VLLM_PLUGINS` names it. vLLM's handlers for the two text routes stay as they are: they get an engine client
that keeps the rows of requests which asked (`EngineClientWithRows`); those that did not pass straight through.
Held by tests/entrypoints/test_hidden_states_served.py.
"""

import copy
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from typing import Any

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.tasks import SupportedTask

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.access import configured_keys
from vllm_omni.entrypoints.engine import OmniEngine
from vllm_omni.entrypoints.engine_watch import EngineWatch
from vllm_omni.entrypoints.hidden_states_store import HiddenStatesStore, StoreLimits
from vllm_omni.entrypoints.operations import Operations
from vllm_omni.entrypoints.realtime.connection import ANONYMOUS, principal_of
from vllm_omni.hidden_states import HiddenStates, HiddenStatesRequest, concat, hidden_states_of, to_safetensors
from vllm_omni.outputs import RequestFailed
from vllm_omni.processes import end_with_parent

ROUTE = "/v1/hidden_states/{response_id}"
_STATUS = {"not_found": 404, "not_finished": 409}

logger = init_logger("vllm." + __name__)


_principal: ContextVar[str] = ContextVar("omni_principal", default=ANONYMOUS)
"""Client of the HTTP request that is served, by its key; without keys all clients are one.

vLLM's handlers hand the engine client no more than the request's id.
"""


def _with_principal(app: ASGIApp) -> ASGIApp:
    """ASGI middleware that notes the client for `EngineClientWithRows`."""

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # the server runs each request in a task of its own
            _principal.set(principal_of(HTTPConnection(scope)))
        await app(scope, receive, send)

    return noted


class HiddenStatesEndpoint:
    """The route and the rows of one API server process. Satisfies `EndpointPlugin`."""

    name = "vllm_omni_ar"
    required_tasks: tuple[SupportedTask, ...] | None = ("generate",)

    def __init__(self) -> None:
        self._store: HiddenStatesStore | None = None
        self._watch = EngineWatch()
        self._operations = Operations()

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route(ROUTE, self._fetch, methods=["GET"], response_class=Response)
        if configured_keys(app.state.args):
            app.add_middleware(_with_principal)
        self._watch.attach(app)
        self._operations.attach(app)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        if engine_client is None:  # a render-only server; `required_tasks` keeps us away from it
            return
        end_with_parent()  # one of several API server processes
        omni = OmniConfig.from_additional_config(engine_client.vllm_config.additional_config)
        await self._operations.start(engine_client, omni)
        await self._watch_engine(engine_client, omni)
        self._store = HiddenStatesStore(StoreLimits.from_env())
        client = EngineClientWithRows(engine_client, self._store)
        for name in ("openai_serving_chat", "openai_serving_completion"):
            serving = getattr(state, name)
            if serving is not None:
                ours = copy.copy(serving)
                ours.engine_client = client
                setattr(state, name, ours)
        if (args.api_server_count or 1) > 1:
            logger.warning(
                "Hidden states are kept by the API server process that answered; with --api-server-count %d a fetch "
                "may reach another one",
                args.api_server_count,
            )

    async def _watch_engine(self, client: EngineClient, omni: OmniConfig) -> None:
        engine = OmniEngine(client)
        try:
            pids = await engine.process_ids()
        except RequestFailed:  # served by a worker of somebody else
            pids = []
        self._watch.start(lambda: engine.is_dead, pids, omni.rank_timeout_s)

    async def _fetch(self, response_id: str, index: int = Query(default=0, ge=0)) -> Response:
        assert self._store is not None, "vLLM initialises state before it serves"
        try:
            states = self._store.fetch(response_id, index, _principal.get())
        except RequestFailed as failed:
            status = _STATUS[failed.code]
            error = {"message": failed.message, "type": failed.code, "param": None, "code": status}
            return JSONResponse({"error": error}, status_code=status)
        return Response(to_safetensors(states), media_type="application/vnd.safetensors")


class EngineClientWithRows:
    """An engine client whose `generate` also keeps the rows of requests that asked.

    Everything else is the engine client's: vLLM's handlers read a dozen attributes of it, more with each version.
    """

    def __init__(self, client: EngineClient, store: HiddenStatesStore) -> None:
        self._client = client
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        outputs = self._client.generate(prompt, sampling_params, request_id, **kwargs)
        if not sampling_params.extra_args:
            return outputs
        try:
            asked = HiddenStatesRequest.from_extra_args(sampling_params.extra_args)
        except RequestFailed as failed:
            raise VLLMValidationError(failed.message, parameter="vllm_xargs") from failed
        return outputs if asked is None else self._keep(outputs, request_id, sampling_params.n)

    async def _keep(
        self, outputs: AsyncGenerator[RequestOutput, None], request_id: str, num_completions: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Pass outputs on. Rows end in the store before the client can know that the request has ended."""
        found: dict[int, list[HiddenStates | None]] = {}
        principal = _principal.get()
        self._store.begin(request_id, principal)
        kept: dict[int, HiddenStates] = {}
        open_ = True
        try:
            async for output in outputs:
                for completion in output.outputs:
                    try:
                        found.setdefault(completion.index, []).append(hidden_states_of(completion))
                    except RequestFailed as failed:
                        raise VLLMValidationError(
                            f"hidden states: {failed.message}", parameter=f"vllm_xargs.omni ({failed.code})"
                        ) from failed
                if output.finished:
                    kept = {i: rows for i, parts in found.items() if (rows := concat(parts)) is not None}
                    self._store.end(request_id, kept, num_completions, principal)
                    open_ = False
                yield output
        finally:
            if open_:
                self._store.end(request_id, {}, principal=principal)
            await outputs.aclose()


def create_plugin() -> HiddenStatesEndpoint:
    """Return the plugin; named in setup.py's entry points."""
    return HiddenStatesEndpoint()
