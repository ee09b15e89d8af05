# SPDX-License-Identifier: Apache-2.0
"""Trace context of the current task: W3C trace headers in a context variable, and child spans.

`entrypoints/telemetry/tracing.py` implements spans and enables them for its process with `use`.
Until `use` is called, all spans are no-ops. This module imports neither OpenTelemetry nor vLLM.
"""

import contextvars
from collections.abc import Callable, Mapping
from typing import Final

_headers: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar(
    "omni_trace_headers", default=None
)


class Span:
    """A started span, which is a child of the current trace. This base class does nothing."""

    headers: Mapping[str, str] | None = None
    """Trace headers that make this span the parent of other spans, or None if this span cannot be a
    parent. If None, other spans keep their current parent.
    """

    def end(self, failed: bool = False) -> None:
        """End the span. Idempotent."""


NO_SPAN: Final = Span()
_start_span: list[Callable[[str], Span]] = [lambda name: NO_SPAN]


def set_parent(headers: Mapping[str, str] | None) -> contextvars.Token[Mapping[str, str] | None]:
    """Set the trace headers of the current task, or None for no trace."""
    return _headers.set(headers)


def reset_parent(token: contextvars.Token[Mapping[str, str] | None]) -> None:
    _headers.reset(token)


def headers() -> Mapping[str, str] | None:
    """Return the trace headers of the current task."""
    return _headers.get()


def start_span(name: str) -> Span:
    """Start a child span of the current trace. The caller must end the span."""
    return _start_span[0](name)


def use(start_span: Callable[[str], Span]) -> None:
    """Create all subsequent spans in this process with the `start_span` function."""
    _start_span[0] = start_span
