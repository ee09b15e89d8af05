# SPDX-License-Identifier: Apache-2.0
"""Request id and session id of log records, carried by context variables.

`bound(...)` sets the ids for a block of code and for every task started in the block. The log
handler determines how the ids appear in a log line. `ContextFilter` sets `request_id` and
`session_id` on the record, so JSON formatters write them as fields, and a user's logging
configuration can use them in its format. `ContextFormatter` appends the ids to the first line of
the text. `entrypoints/telemetry/logs.py` installs the filter and the formatter. This module imports
only the standard library, because a user's logging configuration refers to `ContextFilter` before
vLLM is imported.
"""

import contextlib
import contextvars
import copy
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Final

NAMES: Final = ("request_id", "session_id")
_OWN_LOGGERS: Final = "vllm.vllm_omni"
_ids: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar("omni_log_ids", default={})  # noqa: B039
"""The current request id and session id, in the order of `NAMES`. The mapping is never modified in
place."""


@contextlib.contextmanager
def bound(*, request_id: str | None = None, session_id: str | None = None) -> Iterator[None]:
    """Set the ids for the log records that a block of code emits.

    Args:
        request_id: Request id for the block, or None to keep the current request id.
        session_id: Session id for the block, or None to keep the current session id.
    """
    token = _ids.set(_merged(request_id, session_id))
    try:
        yield
    finally:
        _ids.reset(token)


def bind(*, request_id: str | None = None, session_id: str | None = None) -> None:
    """Set the ids until the end of the current task. The task must serve only one request or
    session.

    Args:
        request_id: Request id for the task, or None to keep the current request id.
        session_id: Session id for the task, or None to keep the current session id.
    """
    _ids.set(_merged(request_id, session_id))


def current() -> Mapping[str, str]:
    """Return the current request id and session id, keyed by name."""
    return _ids.get()


def _merged(*given: str | None) -> Mapping[str, str]:
    known = _ids.get()
    ids = {
        name: known.get(name) if new is None else new
        for name, new in zip(NAMES, given, strict=True)
    }
    return {name: value for name, value in ids.items() if value is not None}


class ContextFilter(logging.Filter):
    """Logging filter that sets `request_id` and `session_id` on every record and drops no records.

    Args:
        missing: Value of the attribute for an id that is not set. With None, the attribute is not
            set, so JSON formatters omit the id.
    """

    def __init__(self, missing: str | None = "-") -> None:
        super().__init__()
        self._missing = missing

    def filter(self, record: logging.LogRecord) -> bool:
        known = current()
        for name in NAMES:
            if (value := known.get(name, self._missing)) is not None and not hasattr(record, name):
                setattr(record, name, value)
        return True


class ContextFormatter(logging.Formatter):
    """Appends ` request_id=... session_id=...` to the first line of another formatter's text.

    Control characters in the arguments of a record are escaped, because arguments may contain text
    from clients, such as paths, close reasons and names. Without escaping, text after a newline
    would look like a separate line of the server's log.

    Args:
        inner: The wrapped formatter.
    """

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self.inner = inner

    def format(self, record: logging.LogRecord) -> str:
        text = self.inner.format(_escaped(record))
        ids = "".join(f" {name}={value}" for name, value in current().items())
        first, newline, rest = text.partition("\n")
        return f"{first}{ids}{newline}{rest}"


def _escaped(record: logging.LogRecord) -> logging.LogRecord:
    """Return a record whose arguments have been escaped. In records from other packages, newlines
    and tabs are not escaped.
    """
    allowed = "" if record.name.startswith(_OWN_LOGGERS) else "\n\t"
    if isinstance(record.args, tuple):
        args: Any = tuple(_printable(value, allowed) for value in record.args)
    elif isinstance(record.args, Mapping):
        args = {name: _printable(value, allowed) for name, value in record.args.items()}
    else:
        return record
    escaped = copy.copy(record)
    escaped.args = args
    return escaped


def _printable(value: object, allowed: str) -> object:
    if not isinstance(value, str | BaseException) or (text := str(value)).isprintable():
        return value
    return "".join(
        one if one.isprintable() or one in allowed else one.encode("unicode_escape").decode("ascii")
        for one in text
    )
