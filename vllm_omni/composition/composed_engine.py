# SPDX-License-Identifier: Apache-2.0
"""`ComposedEngine`: one vLLM engine of a composition. Errors raised by this class include the
engine's name.

Every request ends in exactly one way: with its last output, with `RequestFailed`, with
`ComposedEngineDied`, or with RuntimeError if the engine fails on this request. If the task that
reads the outputs is cancelled or closes the generator early, the request is aborted in the engine.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import torch
from vllm.engine.protocol import EngineClient
from vllm.exceptions import GenerationError, GracefulHTTPError, RetryableRequestError
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.outputs import RequestFailed, unpack
from vllm_omni.runtime import trace_context

logger = logging.getLogger("vllm." + __name__)


class ComposedEngineDied(Exception):
    """Raised when an engine of a composition is dead.

    Requests that need the dead engine fail until the server is restarted.
    """

    def __init__(self, name: str) -> None:
        super().__init__(f"the engine {name!r} has died; restart the server")
        self.name = name


class ComposedEngine:
    """One vLLM engine of a composition, for example the talker of a speech model.

    Args:
        name: Engine name for errors and traces.
        engine: Any vLLM `EngineClient`, for example `AsyncLLM`.
        owned: Whether `shutdown` stops the engine.
    """

    def __init__(self, name: str, engine: EngineClient, *, owned: bool = True) -> None:
        self.name = name
        self.engine = engine
        self._owned = owned

    @property
    def is_dead(self) -> bool:
        return bool(self.engine.errored)

    def check_alive(self) -> None:
        if self.is_dead:
            raise ComposedEngineDied(self.name)

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run an autoregressive request and yield vLLM's outputs.

        Args:
            prompt: Prompt in any form that vLLM accepts.
            params: Sampling parameters.
            request_id: Id of the request.

        Raises:
            ComposedEngineDied: The engine has died.
            RequestFailed: `capacity` if the engine is not currently accepting requests.
            RuntimeError: The engine failed on this request.
        """
        finished = False
        span = trace_context.start_span(self.name)
        trace = await self._below(span)
        try:
            async for output in self.engine.generate(prompt, params, request_id, **trace):
                finished = output.finished
                yield output
        except EngineDeadError as error:
            finished = True
            raise ComposedEngineDied(self.name) from error
        except (RetryableRequestError, GracefulHTTPError) as error:
            finished = True
            raise self._no_room() from error
        except (EngineGenerateError, GenerationError) as error:
            finished = True
            self.check_alive()
            raise RuntimeError(f"engine {self.name!r} failed on a request") from error
        finally:
            span.end()
            if not finished:
                await self._abort(request_id)

    async def encode(
        self, params: DiffusionParams, tensors: Mapping[str, torch.Tensor], request_id: str
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Run a diffusion request.

        Args:
            params: Parameters of the request.
            tensors: Input tensors by name.
            request_id: Id of the request.

        Returns:
            Metadata and tensors of the result.

        Raises:
            ComposedEngineDied: The engine has died.
            RequestFailed: The request failed, or the engine is not currently accepting requests
                (code `capacity`).
            RuntimeError: The engine failed on this request.
        """
        last: PoolingRequestOutput[Any] | None = None
        span = trace_context.start_span(self.name)
        trace = await self._below(span)
        pooling = params.to_pooling_params(tensors)
        try:
            async for output in self.engine.encode(engine_prompt(), pooling, request_id, **trace):
                last = output
        except EngineDeadError as error:
            raise ComposedEngineDied(self.name) from error
        except (RetryableRequestError, GracefulHTTPError) as error:
            raise self._no_room() from error
        except (EngineGenerateError, GenerationError) as error:
            self.check_alive()
            raise RuntimeError(f"engine {self.name!r} failed on a request") from error
        finally:
            span.end(failed=last is None)
            if last is None and not self.is_dead:
                await self._abort(request_id)
        if last is None:
            raise ComposedEngineDied(self.name)
        return unpack(last.outputs.data)

    async def _below(self, span: trace_context.Span) -> dict[str, Any]:
        """Return engine arguments that make the engine's trace span a child of `span`.

        The result is empty if tracing is off.
        """
        if span.headers is None or not await self.engine.is_tracing_enabled():
            return {}
        return {"trace_headers": span.headers}

    def _no_room(self) -> RequestFailed:
        """Return the error for an engine that is paused or whose queue is full."""
        return RequestFailed(
            "capacity", f"engine {self.name!r} takes no requests now; try again later"
        )

    async def _abort(self, request_id: str) -> None:
        """Abort a request in the engine, even while this task is being cancelled."""
        if self.is_dead:
            return
        try:
            await asyncio.shield(self.engine.abort(request_id))
        except EngineDeadError:
            logger.warning(
                "engine %r died before request %s could be aborted", self.name, request_id
            )

    def shutdown(self) -> None:
        """Stop the engine and its processes if this object owns the engine. Idempotent."""
        if self._owned:
            self._owned = False
            self.engine.shutdown()
