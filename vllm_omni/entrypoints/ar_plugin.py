# SPDX-License-Identifier: Apache-2.0
"""The `vllm.endpoint_plugins` entry point `vllm_omni_ar`, which serves hidden states over HTTP.

        POST /v1/chat/completions, /v1/completions and the other routes in `_HANDLERS`
            stock vLLM's routes; `vllm_xargs: {"omni": "{...}"}` requests hidden states
        GET  /v1/hidden_states/{response id}
            hidden states of one choice as safetensors; each choice can be fetched only once

vLLM loads this plugin if `VLLM_PLUGINS` names it. The text routes keep vLLM's own handlers. The
plugin replaces only the engine client that these handlers call. The replacement,
`EngineClientWithHiddenStates`, stores hidden states for requests that ask for them and forwards all
other requests unchanged. Handlers whose responses have no id get a `RefusingEngineClient` instead,
because a client could not fetch the hidden states.
"""

import copy
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI, Query
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import State
from starlette.requests import HTTPConnection, Request
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.engine.protocol import EngineClient
from vllm.exceptions import VLLMValidationError
from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.tasks import SupportedTask

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.engine.client import OmniEngine
from vllm_omni.entrypoints.engine.engine_watch import EngineWatch
from vllm_omni.entrypoints.engine.environment import read_struct
from vllm_omni.entrypoints.hidden_states_store import EntryKey, HiddenStatesStore, StoreLimits
from vllm_omni.entrypoints.limits.access import configured_keys
from vllm_omni.entrypoints.operations import OperatorFeatures
from vllm_omni.entrypoints.realtime.connection.connection import ANONYMOUS, principal_of
from vllm_omni.hidden_states import (
    HiddenStates,
    HiddenStatesRequest,
    concat,
    hidden_states_of,
    to_safetensors,
)
from vllm_omni.outputs import RequestFailed
from vllm_omni.runtime.processes import end_with_parent

ROUTE = "/v1/hidden_states/{response_id}"
_STATUS = {"not_found": 404, "not_finished": 409}


@dataclass(frozen=True)
class _Handler:
    """One of vLLM's request handlers that pass a client's extra arguments to the engine."""

    attribute: str
    """Name of the handler in the server's state."""
    path: str
    """Route that the handler serves."""
    separator: str | None = None
    """Text between the response's id and the prompt's number in the engine's request ids. None: the
    handler has one prompt, and the engine's request id is the response's id."""
    has_id: bool = True
    """Whether the response contains its id, by which a client can fetch hidden states."""


_HANDLERS: Final = (
    _Handler("openai_serving_chat", "/v1/chat/completions"),
    _Handler("openai_serving_chat_batch", "/v1/chat/completions/batch", separator="_"),
    _Handler("openai_serving_completion", "/v1/completions", separator="-"),
    # The number is that of the model call, because built-in tools need several calls.
    _Handler("openai_serving_responses", "/v1/responses", separator="_"),
    _Handler("anthropic_serving_messages", "/v1/messages"),
    _Handler("serving_tokens", "/inference/v1/generate"),
    _Handler("openai_serving_transcription", "/v1/audio/transcriptions", has_id=False),
    _Handler("openai_serving_translation", "/v1/audio/translations", has_id=False),
)

logger = init_logger("vllm." + __name__)


_principal: ContextVar[str] = ContextVar("omni_principal", default=ANONYMOUS)
"""Principal of the client that sent the current HTTP request, derived from its API key. If the
server has no API keys, all clients share one principal.

The principal is a context variable because vLLM's handlers pass only the request id to the engine
client.
"""


def _with_principal(app: ASGIApp) -> ASGIApp:
    """Wrap an ASGI application so that each request's principal is recorded in `_principal`."""

    async def noted(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # the server runs each request in a separate task
            _principal.set(principal_of(HTTPConnection(scope)))
        await app(scope, receive, send)

    return noted


class HiddenStatesEndpoint:
    """Endpoint plugin (`EndpointPlugin`) that serves stored hidden states in one API server
    process.
    """

    name = "vllm_omni_ar"
    required_tasks: tuple[SupportedTask, ...] | None = ("generate",)
    """Tasks that the plugin serves. vLLM loads the plugin only if the served model supports at
    least one of them.
    """

    def __init__(self) -> None:
        self._store: HiddenStatesStore | None = None
        self._watch = EngineWatch()
        self._operations = OperatorFeatures()

    def attach_router(self, app: FastAPI) -> None:
        app.add_api_route(ROUTE, self._fetch, methods=["GET"], response_class=Response)
        if configured_keys(app.state.args):
            app.add_middleware(_with_principal)
        self._watch.attach_to_app(app)
        self._operations.attach_to_app(app)

    async def init_state(
        self, engine_client: EngineClient | None, state: State, args: Namespace
    ) -> None:
        # A render-only server has no engine. `required_tasks` keeps this plugin off such servers.
        if engine_client is None:
            return
        end_with_parent()  # this may be one of several API server processes
        omni = OmniConfig.from_additional_config(engine_client.vllm_config.additional_config)
        await self._operations.start_serving(engine_client, omni)
        await self._watch_engine(engine_client, omni)
        self._store = HiddenStatesStore(read_struct(StoreLimits))
        for handler in _HANDLERS:
            serving = getattr(state, handler.attribute, None)
            if serving is not None:
                ours = copy.copy(serving)
                ours.engine_client = (
                    EngineClientWithHiddenStates(engine_client, self._store, handler.separator)
                    if handler.has_id
                    else RefusingEngineClient(engine_client)
                )
                setattr(state, handler.attribute, ours)
        if getattr(state, "openai_serving_responses", None) is not None:
            state.openai_serving_responses = ResponsesHandler(state.openai_serving_responses)
        if (args.api_server_count or 1) > 1:
            logger.warning(
                "Hidden states are stored by the API server process that responded; with "
                "--api-server-count %d a fetch may reach another one",
                args.api_server_count,
            )

    async def _watch_engine(self, client: EngineClient, omni: OmniConfig) -> None:
        engine = OmniEngine(client)
        try:
            pids = await engine.process_ids()
        except RequestFailed:  # the worker is not one of this package's workers
            pids = []
        self._watch.start_watching(lambda: engine.is_dead, pids, omni.rank_timeout_s)

    async def _fetch(self, response_id: str, index: int = Query(default=0, ge=0)) -> Response:
        assert self._store is not None, "vLLM initialises state before it serves"
        try:
            states = self._store.fetch(response_id, index, _principal.get())
        except RequestFailed as failed:
            status = _STATUS[failed.code]
            error = {"message": failed.message, "type": failed.code, "param": None, "code": status}
            return JSONResponse({"error": error}, status_code=status)
        return Response(to_safetensors(states), media_type="application/vnd.safetensors")


class _ForwardsAttributes:
    """Base class of objects that stand in for one of vLLM's objects.

    All attributes that a subclass does not define are forwarded to the wrapped object, because
    vLLM's code reads many of them and each vLLM version adds more.
    """

    def __init__(self, wrapped: Any) -> None:
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


class EngineClientWithHiddenStates(_ForwardsAttributes):
    """Engine client that stores hidden states for requests that ask for them."""

    def __init__(
        self, client: EngineClient, store: HiddenStatesStore, separator: str | None = None
    ) -> None:
        super().__init__(client)
        self._store = store
        self._separator = separator

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        outputs = self._wrapped.generate(prompt, sampling_params, request_id, **kwargs)
        if _requested_by(sampling_params.extra_args) is None:
            return outputs
        return self._store_states(outputs, self._key(request_id), sampling_params.n)

    def _key(self, request_id: str) -> EntryKey:
        if self._separator is None:
            return EntryKey(request_id, principal=_principal.get())
        response_id, _, number = request_id.rpartition(self._separator)
        return EntryKey(response_id, int(number), _principal.get())

    async def _store_states(
        self, outputs: AsyncGenerator[RequestOutput, None], key: EntryKey, num_completions: int
    ) -> AsyncGenerator[RequestOutput, None]:
        """Forward the engine's outputs without their hidden states, and store the hidden states
        before the client receives the end of the response.
        """
        found: dict[int, list[HiddenStates | None]] = {}
        self._store.open_request(key)
        retained: dict[int, HiddenStates] = {}
        is_running = True
        try:
            async for output in outputs:
                for completion in output.outputs:
                    try:
                        found.setdefault(completion.index, []).append(hidden_states_of(completion))
                    except RequestFailed as failed:
                        raise VLLMValidationError(
                            f"hidden states: {failed.message}",
                            parameter=f"vllm_xargs.omni ({failed.code})",
                        ) from failed
                    # /inference/v1/generate would write the packed hidden states into its response.
                    completion.sampling_mask = None
                if output.finished:
                    retained = {
                        i: states
                        for i, parts in found.items()
                        if (states := concat(parts)) is not None
                    }
                    self._store.end(key, retained, num_completions)
                    is_running = False
                yield output
        finally:
            if is_running:
                self._store.end(key, {})
            await outputs.aclose()


class RefusingEngineClient(_ForwardsAttributes):
    """Engine client of a route whose response has no id. It refuses requests for hidden states."""

    def generate(self, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any) -> Any:
        if _requested_by(sampling_params.extra_args) is not None:
            allowed = ", ".join(handler.path for handler in _HANDLERS if handler.has_id)
            raise VLLMValidationError(
                f"this route returns no hidden states; allowed: {allowed}", parameter="vllm_xargs"
            )
        return self._wrapped.generate(prompt, sampling_params, request_id, **kwargs)


class ResponsesHandler(_ForwardsAttributes):
    """Handler of `/v1/responses` that refuses some requests for hidden states before they start.

    vLLM cannot report a request's error after it has sent the status of a streamed response, and a
    background response whose request fails stays queued.
    """

    async def create_responses(self, request: Any, raw_request: Request | None = None) -> Any:
        if _requested_by(request.vllm_xargs) is not None:
            for field in ("stream", "background"):
                if getattr(request, field):
                    raise VLLMValidationError(
                        f"/v1/responses returns hidden states only if `{field}` is false",
                        parameter=field,
                    )
        return await self._wrapped.create_responses(request, raw_request)


def _requested_by(extra_args: dict[str, Any] | None) -> HiddenStatesRequest | None:
    """Return the request for hidden states in a client's extra arguments, or None.

    Raises:
        VLLMValidationError: The request for hidden states is malformed.
    """
    try:
        return HiddenStatesRequest.from_extra_args(extra_args)
    except RequestFailed as failed:
        raise VLLMValidationError(failed.message, parameter="vllm_xargs") from failed


def create_plugin() -> HiddenStatesEndpoint:
    """Create the plugin. `setup.py` registers this function as the entry point."""
    return HiddenStatesEndpoint()
