# SPDX-License-Identifier: Apache-2.0
"""Tests of spans of failed chunks and of servers without OpenTelemetry. Other span tests are in
realtime/test_operators_served.py.
"""

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.telemetry.tracing import OpenTelemetryTracing, Tracing, tracing


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traced(exporter: InMemorySpanExporter) -> Tracing:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return OpenTelemetryTracing(provider.get_tracer("test"))


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (EndpointError("oom", "no memory"), "oom", StatusCode.ERROR),
        (ValueError("a bug"), "engine_error", StatusCode.ERROR),
        (asyncio.CancelledError(), "cancelled", StatusCode.UNSET),
    ],
)
def test_a_failed_chunk_has_a_span_with_the_reason(
    traced: Tracing,
    exporter: InMemorySpanExporter,
    error: BaseException,
    outcome: str,
    status: StatusCode,
) -> None:
    session = traced.session("s", "realtime/video")
    session.chunk(3).failed(error)
    session.close("closed")
    session.close("again")
    chunk, ended = exporter.get_finished_spans()
    assert (chunk.name, chunk.attributes["omni.outcome"], chunk.status.status_code) == (
        "chunk",
        outcome,
        status,
    )
    assert ended.attributes["omni.reason"] == "closed"


def test_stage_times_longer_than_the_chunk_are_cut_to_it(
    traced: Tracing, exporter: InMemorySpanExporter
) -> None:
    """Stage times may add up to more than the chunk's duration, because decoding overlaps and the
    worker has its own clock. They are truncated, so no stage span starts before its chunk.
    """
    chunk = traced.session("s", "realtime/video").chunk(0)
    chunk.finished({"timings_ms": {"encode": [5.0], "steps": [1e6], "decode": [5.0]}})
    chunk.rendered(0)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["queue"].start_time == spans["queue"].end_time
    for name in ("encode", "denoise", "decode"):
        assert (
            spans["queue"].end_time
            <= spans[name].start_time
            <= spans[name].end_time
            <= spans["chunk"].end_time
        )


def test_without_tracing_no_spans_or_headers_are_made() -> None:
    assert type(tracing()) is Tracing
    assert tracing().engine_headers() is None


def test_an_endpoint_without_opentelemetry_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If `--otlp-traces-endpoint` is set but OpenTelemetry is not installed, the command fails with
    a one-line error rather than vLLM's import traceback.
    """
    flags = serve.ServeFlags.scan(["model", "--otlp-traces-endpoint", "http://localhost:4317"])
    serve.check_tracing(flags)
    monkeypatch.setattr(serve.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"pip install '\.\[otel\]' in the checkout"):
        serve.check_tracing(flags)
