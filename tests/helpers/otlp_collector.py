# SPDX-License-Identifier: Apache-2.0
"""Receives the spans that a server exports."""

import threading
from concurrent import futures
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER_SPAN = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER_SPAN}-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP/gRPC collector that stores the spans it receives."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def __enter__(self) -> "Collector":
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop(None)

    def Export(self, message: Any, context: Any) -> Any:  # noqa: N802  (the service's name)
        with self._lock:
            for resource in message.resource_spans:
                for scope in resource.scope_spans:
                    self._spans.extend(scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self, trace_id: str) -> list[Span]:
        with self._lock:
            return [span for span in self._spans if span.trace_id.hex() == trace_id]
