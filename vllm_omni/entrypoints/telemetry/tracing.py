# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry spans for sessions, as children of the client's trace.

        session
            from the first request to the end; parent: `traceparent` of the handshake
          chunk                       from submission until it is encoded for the client
            llm_request
                stock vLLM's span; directly below `session`, the request that frees the session
            queue encode denoise decode   the engine's time, as measured by the worker
            render                    encoding of the replies
            transport                 sending, including pacing
        speech                        one spoken reply; parent: `traceparent` of the request
          thinker talker token2wav    its engines (`composition/composed_engine.py`)

Tracing is enabled by vLLM's `--otlp-traces-endpoint`. vLLM then sets up an exporter in this
process, which these spans also use. If tracing is disabled, the objects of this module have no
effect. The engine reports the duration of each stage but not its start time. The stage spans are
therefore placed back to back so that the last one ends with the result. The remaining time becomes
the `queue` span.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.telemetry.metrics import STAGES
from vllm_omni.runtime import log_context, trace_context

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

SPANS_OF: Final = "vllm_omni"


class ChunkTrace:
    """One chunk's spans. This base class records no spans."""

    def failed(self, error: BaseException) -> None:
        """End the chunk's span because the engine failed or the chunk was cancelled."""

    def finished(self, meta: Mapping[str, Any]) -> None:
        """Record the engine's result.

        Args:
            meta: Metadata of the result, which may contain `timings_ms`.
        """

    def rendered(self, started_ns: int) -> None:
        """Record that the chunk has been encoded.

        Args:
            started_ns: Time when encoding started (`time.time_ns`).
        """

    def sent(self, started_ns: int) -> None:
        """Record that the chunk's last message has been sent.

        Args:
            started_ns: When sending began, i.e. the start of the first message (`time.time_ns`).
        """


class SessionTrace:
    """One session's spans. This base class records no spans."""

    def chunk(self, chunk_index: int) -> ChunkTrace:
        """Start a chunk's span. This task's next engine request becomes a child of the span."""
        return NO_CHUNK

    def current(self) -> AbstractContextManager[None]:
        """Return a context manager within which engine requests other than chunks become children
        of the session's span.
        """
        return nullcontext()

    def close(self, reason: str) -> None:
        """End the session's span. Idempotent."""


class Tracing:
    """One API server process's spans. This base class records no spans."""

    def session(self, session_id: str, endpoint: str) -> SessionTrace:
        return NO_SESSION

    def engine_headers(self) -> Mapping[str, str] | None:
        """Return the trace headers for the span that stock vLLM creates for an engine request.
        None: no span is created.
        """
        return None


NO_CHUNK: Final = ChunkTrace()
NO_SESSION: Final = SessionTrace()
_process: list[Tracing] = [Tracing()]


def tracing() -> Tracing:
    """Return this process's `Tracing` instance."""
    return _process[0]


def start_tracing() -> None:
    """Start recording spans through the provider that vLLM has set up in this process."""
    from opentelemetry import trace

    made = OpenTelemetryTracing(trace.get_tracer(SPANS_OF))
    _process[0] = made
    trace_context.use(made.start_span)


class OpenTelemetryTracing(Tracing):
    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer

    def session(self, session_id: str, endpoint: str) -> SessionTrace:
        from vllm.tracing import extract_trace_context

        attributes = {"omni.session_id": session_id, "omni.endpoint": endpoint, **_request_id()}
        parent = extract_trace_context(trace_context.headers())
        return _SessionSpan(
            self._tracer, self._tracer.start_span("session", parent, attributes=attributes)
        )

    def engine_headers(self) -> Mapping[str, str] | None:
        return trace_context.headers()

    def start_span(self, name: str) -> trace_context.Span:
        """Start a span as a child of this task's current span."""
        from vllm.tracing import extract_trace_context

        parent = extract_trace_context(trace_context.headers())
        return _OpenSpan(self._tracer.start_span(name, parent, attributes=_request_id()))


class _OpenSpan(trace_context.Span):
    def __init__(self, span: "Span") -> None:
        self._span = span
        self.headers = _as_headers(span)

    def end(self, failed: bool = False) -> None:
        if not self._span.is_recording():
            return
        if failed:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class _SessionSpan(SessionTrace):
    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer, self._span = tracer, span

    def chunk(self, chunk_index: int) -> ChunkTrace:
        attributes: dict[str, int | str] = {"omni.chunk_index": chunk_index, **_request_id()}
        span = self._tracer.start_span("chunk", _below(self._span), attributes=attributes)
        trace_context.set_parent(_as_headers(span))
        return _ChunkSpan(self._tracer, span)

    @contextmanager
    def current(self) -> Iterator[None]:
        token = trace_context.set_parent(_as_headers(self._span))
        try:
            yield
        finally:
            trace_context.reset_parent(token)

    def close(self, reason: str) -> None:
        if self._span.is_recording():
            self._span.set_attribute("omni.reason", reason)
            self._span.end()


class _ChunkSpan(ChunkTrace):
    def __init__(self, tracer: "Tracer", span: "Span") -> None:
        self._tracer, self._span = tracer, span
        self._submitted_ns = time.time_ns()

    def finished(self, meta: Mapping[str, Any]) -> None:
        timings_ms: Mapping[str, Sequence[float]] = meta.get("timings_ms", {})
        finished_ns = time.time_ns()
        spent_ns = {
            label: int(sum(timings_ms.get(name, ())) * 1e6) for name, label in STAGES.items()
        }
        busy_ns = min(sum(spent_ns.values()), finished_ns - self._submitted_ns)
        self._child("queue", self._submitted_ns, finished_ns - busy_ns)
        start_ns = finished_ns - busy_ns
        for label, stage_ns in spent_ns.items():
            end_ns = min(start_ns + stage_ns, finished_ns)
            self._child(label, start_ns, end_ns)
            start_ns = end_ns
        if "num_frames" in meta:
            self._span.set_attribute("omni.frames", int(meta["num_frames"]))

    def failed(self, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        cancelled = isinstance(error, asyncio.CancelledError)
        outcome = (
            "cancelled"
            if cancelled
            else error.code
            if isinstance(error, EndpointError)
            else "engine_error"
        )
        self._span.set_attribute("omni.outcome", outcome)
        if not cancelled:
            self._span.set_status(Status(StatusCode.ERROR, outcome))
        self._span.end()

    def rendered(self, started_ns: int) -> None:
        now_ns = time.time_ns()
        self._child("render", started_ns, now_ns)
        self._span.end(now_ns)

    def sent(self, started_ns: int) -> None:
        self._child("transport", started_ns, time.time_ns())

    def _child(self, name: str, start_ns: int, end_ns: int) -> None:
        self._tracer.start_span(name, _below(self._span), start_time=start_ns).end(end_ns)


def _request_id() -> dict[str, str]:
    return {
        f"omni.{name}": value
        for name, value in log_context.current().items()
        if name == "request_id"
    }


def _below(span: "Span") -> "Context":
    from opentelemetry import trace

    return trace.set_span_in_context(span)


def _as_headers(span: "Span") -> dict[str, str]:
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, _below(span))
    return carrier
