# SPDX-License-Identifier: Apache-2.0
"""Whose log line is this: the request's and the session's id, carried by context variables into every record.

`bound(...)` names them for a block of code and for every task begun in it. How they come into a line depends on the
handler: `ContextFilter` sets `request_id` and `session_id` on the record (JSON formatters write them as fields, a
logging configuration of the user's own may name them in its format), `ContextFormatter` appends them to the first line
of a text. Which handlers get which is `entrypoints/logs.py`'s. Imports nothing but the standard library, because a
user's logging configuration names `ContextFilter` before vLLM is up. Held by tests/test_log_context.py.
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
"""Those that are known, in the order of `NAMES`; never changed in place."""


@contextlib.contextmanager
def bound(*, request_id: str | None = None, session_id: str | None = None) -> Iterator[None]:
    """Name the request or the session that the log lines of this block are about; None leaves it as it is."""
    token = _ids.set(_merged(request_id, session_id))
    try:
        yield
    finally:
        _ids.reset(token)


def bind(*, request_id: str | None = None, session_id: str | None = None) -> None:
    """As `bound`, up to the end of the current task; for tasks that serve one request or one session all their life."""
    _ids.set(_merged(request_id, session_id))


def current() -> Mapping[str, str]:
    """The ids that are known here, by name."""
    return _ids.get()


def _merged(*given: str | None) -> Mapping[str, str]:
    known = _ids.get()
    ids = {name: known.get(name) if new is None else new for name, new in zip(NAMES, given, strict=True)}
    return {name: value for name, value in ids.items() if value is not None}


class ContextFilter(logging.Filter):
    """Sets `request_id` and `session_id` on every record; lets all records through.

    missing: the value of an id that is not known; None = the attribute is not set, so JSON lines leave it out.
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
    """Another formatter's text with ` request_id=... session_id=...` at the end of its first line.

    Control characters in a record's arguments are escaped, since arguments may be text of clients: paths, reasons of
    a close, names. A newline there would start a line that looks like one of the server's own.
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
    """The record without control characters in its arguments. Other packages may log several lines."""
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
        one if one.isprintable() or one in allowed else one.encode("unicode_escape").decode("ascii") for one in text
    )
