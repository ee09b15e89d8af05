# SPDX-License-Identifier: Apache-2.0
"""Add request and session ids to the log lines of vLLM and uvicorn, and remove known noise.

`add_ids` adds request and session ids to the log handlers of an API server process. It does not
change a logging configuration that the user provides (`--log-config-file`,
VLLM_LOGGING_CONFIG_PATH). Such a configuration can add the ids through the filter in
`vllm_omni.runtime.log_context`.

`quiet_start` drops log records that are misleading or irrelevant for a server of this package. Each
filter names its logger and its reason. The filters are attached through the standard library, so no
vLLM code is replaced.
"""

import contextvars
import functools
import logging
from collections.abc import Callable
from typing import Any, Final

from vllm_omni.runtime.log_context import ContextFilter, ContextFormatter

_LOGGERS: Final = ("vllm", "uvicorn", "uvicorn.error", "uvicorn.access")

answered_by_denial: Final = contextvars.ContextVar("omni_answered_by_denial", default=False)
"""Whether the current connection's WebSocket handshake was refused with an HTTP response (ASGI's
WebSocket denial response).
"""


def add_ids(custom_config: bool) -> None:
    """Add request and session ids to the log handlers of vLLM and uvicorn in this process, unless
    the user provided a logging configuration. Idempotent.

    Args:
        custom_config: Whether the user provided a logging configuration.
    """
    if custom_config:
        return
    for handler in {handler for name in _LOGGERS for handler in logging.getLogger(name).handlers}:
        formatter = handler.formatter
        if formatter is None or isinstance(formatter, ContextFormatter):
            continue
        if _writes_attributes(formatter):
            if not any(isinstance(known, ContextFilter) for known in handler.filters):
                handler.addFilter(ContextFilter(missing=None))
        else:
            handler.setFormatter(ContextFormatter(formatter))


def has_custom_config(args: Any) -> bool:
    """Return whether the user has provided a logging configuration for the server."""
    config = getattr(args, "logging_config", None)
    return bool(
        config.pylogging_config_file
        if config is not None
        else getattr(args, "log_config_file", None)
    )


def _writes_attributes(formatter: logging.Formatter) -> bool:
    """Return whether a log formatter writes all attributes of a record, as JSON formatters do."""
    try:
        from pythonjsonlogger.core import BaseJsonFormatter
    except ImportError:  # without this package, vLLM's JSON formatter cannot be in use
        return False
    return isinstance(formatter, BaseJsonFormatter)


@functools.cache
def known_variables() -> frozenset[str]:
    """Return the environment variables that this package reads."""
    import msgspec

    from vllm_omni.entrypoints.engine.environment import PREFIX
    from vllm_omni.entrypoints.hidden_states_store import StoreLimits
    from vllm_omni.entrypoints.limits.body_timeout import BodyLimits
    from vllm_omni.entrypoints.limits.tickets import SECRET_VARIABLE
    from vllm_omni.entrypoints.openai.limits import MediaLimits
    from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits

    structs = (BodyLimits, EndpointLimits, MediaLimits, StoreLimits)
    fields = (field for struct in structs for field in msgspec.structs.fields(struct))
    return frozenset({SECRET_VARIABLE, *(PREFIX + field.name.upper() for field in fields)})


def _names_known_variable(record: logging.LogRecord) -> bool:
    """Match vLLM's warnings that this package's environment variables are unknown.

    Warnings about misspelled variables do not match, so they are still logged.
    """
    return (
        str(record.msg).startswith("Unknown vLLM environment variable")
        and isinstance(record.args, tuple)
        and not known_variables().isdisjoint(record.args)
    )


def _misses_tokenizer(record: logging.LogRecord) -> bool:
    """Match the error that vLLM logs when its chat warm-up fails, which is expected for models
    without a tokenizer.
    """
    error = record.exc_info[1] if record.exc_info else None
    return record.msg == "Chat template warmup failed" and str(error).startswith(
        "Tokenizer not available"
    )


def _lists_route(record: logging.LogRecord) -> bool:
    """Match the more than one hundred log lines that vLLM writes for the routes and for the web
    page's files.

    At level DEBUG, the lines are still shown.
    """
    is_route = str(record.msg).startswith(("Available routes are", "Route: "))
    return is_route and not logging.getLogger(record.name).isEnabledFor(logging.DEBUG)


def _reports_denied_handshake(record: logging.LogRecord) -> bool:
    """Match uvicorn's reports of incomplete handshakes if the handshake was in fact refused with
    401, 403 or 503.
    """
    is_unfinished = str(record.msg).startswith("ASGI callable returned without")
    return is_unfinished and answered_by_denial.get()


class DropNoise(logging.Filter):
    """Log filter that drops the records for which `is_noise` returns True."""

    def __init__(self, is_noise: Callable[[logging.LogRecord], bool]) -> None:
        super().__init__()
        self.is_noise = is_noise

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.is_noise(record)


NOISE: Final = {
    "vllm.platforms.interface": DropNoise(_names_known_variable),
    "vllm.renderers.base": DropNoise(_misses_tokenizer),
    "vllm.entrypoints.launchers.launcher": DropNoise(_lists_route),
    "uvicorn.error": DropNoise(_reports_denied_handshake),
}
"""Filters by logger name."""


def quiet_start() -> None:
    """Add the filters to the loggers of this process. Idempotent."""
    for name, noise in NOISE.items():
        logging.getLogger(name).addFilter(noise)
