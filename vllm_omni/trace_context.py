# SPDX-License-Identifier: Apache-2.0
"""Which trace does this work belong to: W3C headers carried by a context variable, and spans of stages below it.

`entrypoints/tracing.py` makes the spans and switches them on for its process (`use`); until then every span here is
none. Knows no OpenTelemetry and no vLLM. Held by tests/entrypoints/test_tracing.py.
"""

import contextvars
from collections.abc import Callable, Mapping
from typing import Final

_headers: contextvars.ContextVar[Mapping[str, str] | None] = contextvars.ContextVar("omni_trace_headers", default=None)


class Span:
    """An open span, begun below this task's trace. This class is none.

    headers: trace headers that name it as the parent of other spans; None = those spans keep their parent.
    """

    headers: Mapping[str, str] | None = None

    def end(self, failed: bool = False) -> None:
        """The work is over; idempotent."""


NO_SPAN: Final = Span()
_begin: list[Callable[[str], Span]] = [lambda name: NO_SPAN]


def set_parent(headers: Mapping[str, str] | None) -> contextvars.Token[Mapping[str, str] | None]:
    """Name the trace that this task's work belongs to; None = none."""
    return _headers.set(headers)


def reset_parent(token: contextvars.Token[Mapping[str, str] | None]) -> None:
    _headers.reset(token)


def headers() -> Mapping[str, str] | None:
    """The trace of this task's work."""
    return _headers.get()


def begin(name: str) -> Span:
    """Begin a span below this task's trace; whoever begins it ends it."""
    return _begin[0](name)


def use(begin: Callable[[str], Span]) -> None:
    """Have `begin` make the spans of this process from now on."""
    _begin[0] = begin
