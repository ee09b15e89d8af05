# SPDX-License-Identifier: Apache-2.0
"""Changes to the handlers and loggers that vLLM and uvicorn have set up: ids in, known noise out.

`add_ids` gives the handlers of an API server process the request's and session's id. A logging configuration of the
user's own (`--log-config-file`, VLLM_LOGGING_CONFIG_PATH) is left as it is: it may name `vllm_omni.log_context`'s
filter itself.

`quiet_start` drops log records that say nothing true or nothing useful about a server of ours; each filter names its
logger and its reason, and lets everything else through. Nothing of vLLM is replaced: these are filters of the standard
library's loggers. Held by tests/test_log_context.py and
tests/entrypoints/realtime/test_operators_served.py.
"""

import contextvars
import functools
import logging
from typing import Any, Final

from vllm_omni.log_context import ContextFilter, ContextFormatter

_LOGGERS: Final = ("vllm", "uvicorn", "uvicorn.error", "uvicorn.access")

answered_by_denial: Final = contextvars.ContextVar("omni_answered_by_denial", default=False)
"""Whether this connection's WebSocket handshake was answered with an HTTP status, as ASGI's denial response does."""


def add_ids(custom_config: bool) -> None:
    """Have every handler of this process write ids; idempotent. custom_config: the user brought the configuration."""
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
    """Whether a server's parsed arguments name a logging configuration of the user's own."""
    config = getattr(args, "logging_config", None)
    return bool(config.pylogging_config_file if config is not None else getattr(args, "log_config_file", None))


def _writes_attributes(formatter: logging.Formatter) -> bool:
    """JSON formatters write all attributes of a record by themselves."""
    try:
        from pythonjsonlogger.core import BaseJsonFormatter
    except ImportError:  # vLLM's JSON lines need it, so there are none
        return False
    return isinstance(formatter, BaseJsonFormatter)


@functools.cache
def known_variables() -> frozenset[str]:
    """The environment variables that this package reads and that vLLM does not know."""
    import msgspec

    from vllm_omni.entrypoints.body_pace import BodyLimits
    from vllm_omni.entrypoints.environment import PREFIX
    from vllm_omni.entrypoints.hidden_states_store import StoreLimits
    from vllm_omni.entrypoints.openai.limits import MediaLimits
    from vllm_omni.entrypoints.realtime.limits import DoorLimits
    from vllm_omni.entrypoints.tickets import SECRET_VARIABLE

    structs = (BodyLimits, DoorLimits, MediaLimits, StoreLimits)
    fields = (field for struct in structs for field in msgspec.structs.fields(struct))
    return frozenset({SECRET_VARIABLE, *(PREFIX + field.name.upper() for field in fields)})


class _Drop(logging.Filter):
    logger: str

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.is_noise(record)

    def is_noise(self, record: logging.LogRecord) -> bool:
        raise NotImplementedError


class KnownVariables(_Drop):
    """vLLM warns of every variable that begins with VLLM_ and is not its own; those that this package reads are not
    unknown. A mistyped one still is."""

    logger = "vllm.platforms.interface"

    def is_noise(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("Unknown vLLM environment variable") or not isinstance(record.args, tuple):
            return False
        return not known_variables().isdisjoint(record.args)


class MissingTokenizer(_Drop):
    """vLLM renders a chat to warm its template up, whatever is served; a model without a tokenizer has no chat."""

    logger = "vllm.renderers.base"

    def is_noise(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return record.msg == "Chat template warmup failed" and str(error).startswith("Tokenizer not available")


class RouteLines(_Drop):
    """One line for each route and each file of the page, over a hundred; `/docs` lists them. Kept at level DEBUG."""

    logger = "vllm.entrypoints.launchers.launcher"

    def is_noise(self, record: logging.LogRecord) -> bool:
        is_route = str(record.msg).startswith(("Available routes are", "Route: "))
        return is_route and not logging.getLogger(self.logger).isEnabledFor(logging.DEBUG)


class DeniedHandshakes(_Drop):
    """uvicorn calls a WebSocket that was answered with 401, 403 or 503 an unfinished handshake; it was finished."""

    logger = "uvicorn.error"

    def is_noise(self, record: logging.LogRecord) -> bool:
        return str(record.msg).startswith("ASGI callable returned without") and answered_by_denial.get()


def quiet_start() -> None:
    """Add the filters to this process's loggers; idempotent."""
    for kind in (KnownVariables, MissingTokenizer, RouteLines, DeniedHandshakes):
        logger = logging.getLogger(kind.logger)
        if not any(type(known) is kind for known in logger.filters):
            logger.addFilter(kind())
