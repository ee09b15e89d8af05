# SPDX-License-Identifier: Apache-2.0
"""Tests of request ids and session ids in log lines, without a server."""

import asyncio
import json
import logging
import logging.config
from collections.abc import Iterator
from pathlib import Path

import pytest
from pythonjsonlogger.json import JsonFormatter

from vllm_omni.entrypoints.telemetry import logs
from vllm_omni.runtime import log_context
from vllm_omni.runtime.log_context import ContextFilter, ContextFormatter


def record(message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord("vllm.test", logging.INFO, __file__, 1, message, args, None)


def test_a_task_keeps_the_ids_it_started_with() -> None:
    """A task inherits the request id and session id of the request that starts it. A task started
    outside a request has neither.
    """

    async def main() -> list[dict[str, str]]:
        async def look() -> dict[str, str]:
            await asyncio.sleep(0)
            return log_context.current()

        with log_context.bound(request_id="r"):
            inside = asyncio.create_task(look())
            with log_context.bound(session_id="s"):
                both = asyncio.create_task(look())
        outside = asyncio.create_task(look())
        return [await inside, await both, await outside]

    assert asyncio.run(main()) == [{"request_id": "r"}, {"request_id": "r", "session_id": "s"}, {}]


def test_ids_are_appended_to_the_first_line_of_a_text_record() -> None:
    formatter = ContextFormatter(logging.Formatter("INFO %(message)s"))
    assert formatter.format(record("before")) == "INFO before"
    with log_context.bound(request_id="r", session_id="s"):
        assert (
            formatter.format(record("one\ntwo %d", 2))
            == "INFO one request_id=r session_id=s\ntwo 2"
        )


@pytest.mark.parametrize(
    "text",
    [
        "/a\nINFO server: all is well",
        "a\r\x1b[2Kb",
        "\x9b31m",
        "\u2028line",
        "lone \ud800",
        ValueError("bad\nname"),
    ],
)
def test_text_of_clients_starts_no_line_and_moves_no_cursor(text: object) -> None:
    """Control characters in log arguments, for example in a path or a close reason, are escaped.

    The escaping applies to all of this package's log lines.
    """
    formatter = ContextFormatter(logging.Formatter("INFO %(message)s"))
    made = logging.LogRecord(
        "vllm.vllm_omni.x", logging.INFO, __file__, 1, "path=%s of %d", (text, 3), None
    )
    line = formatter.format(made)
    assert line.isprintable() and line.endswith(" of 3") and made.args == (text, 3)


def test_log_records_of_other_packages_may_have_several_lines() -> None:
    """A multi-line table that vLLM logs keeps its line breaks, but characters that move the cursor
    are escaped.
    """
    formatter = ContextFormatter(logging.Formatter("INFO %(message)s"))
    assert formatter.format(record("%s", "a\tb\nc\x1b[2K")) == "INFO a\tb\nc\\x1b[2K"


def test_json_lines_have_ids_as_fields_and_leave_unknown_ones_out() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter("%(message)s"))
    handler.addFilter(ContextFilter(missing=None))

    def line() -> dict[str, str]:
        made = record("hello")
        assert handler.filter(made)
        return json.loads(handler.format(made))

    assert line() == {"message": "hello"}
    with log_context.bound(session_id="s"):
        assert line() == {"message": "hello", "session_id": "s"}


def test_a_format_of_the_users_own_may_name_the_ids(tmp_path: Path) -> None:
    """A user's own `dictConfig` can use the package's log filter, as the page for operators shows.

    A log line without a session shows a dash instead of the id.
    """
    target = tmp_path / "log"
    name = "omni-own-format"
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"ids": {"()": "vllm_omni.runtime.log_context.ContextFilter"}},
            "formatters": {"own": {"format": "%(request_id)s|%(session_id)s|%(message)s"}},
            "handlers": {
                "file": {
                    "class": "logging.FileHandler",
                    "filename": target,
                    "formatter": "own",
                    "filters": ["ids"],
                }
            },
            "loggers": {name: {"handlers": ["file"], "level": "INFO", "propagate": False}},
        }
    )
    with log_context.bound(request_id="r"):
        logging.getLogger(name).info("hello")
    assert target.read_text() == "r|-|hello\n"


@pytest.fixture
def handler() -> Iterator[logging.Handler]:
    made = logging.StreamHandler()
    made.setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("uvicorn.access").addHandler(made)
    yield made
    logging.getLogger("uvicorn.access").removeHandler(made)


def test_handlers_get_ids_once_and_a_users_configuration_is_left_alone(
    handler: logging.Handler,
) -> None:
    logs.add_ids(custom_config=True)
    assert type(handler.formatter) is logging.Formatter
    logs.add_ids(custom_config=False)
    logs.add_ids(custom_config=False)
    assert (
        isinstance(handler.formatter, ContextFormatter)
        and type(handler.formatter.inner) is logging.Formatter
    )


def test_only_what_is_known_to_be_noise_is_dropped() -> None:
    """vLLM's warning about one of this package's environment variables is dropped.

    vLLM's warnings about a misspelled variable and about a failed warm-up are still logged.
    """
    unknown = "Unknown vLLM environment variable detected: %s"
    variables = logs.NOISE["vllm.platforms.interface"]
    assert not variables.filter(record(unknown, "VLLM_OMNI_IDLE_TIMEOUT_S"))
    assert variables.filter(record(unknown, "VLLM_OMNI_IDEL_TIMEOUT_S"))

    def failed(error: Exception) -> logging.LogRecord:
        made = record("Chat template warmup failed")
        made.exc_info = (type(error), error, None)
        return made

    tokenizer = logs.NOISE["vllm.renderers.base"]
    assert not tokenizer.filter(failed(ValueError("Tokenizer not available when ...")))
    assert tokenizer.filter(failed(ValueError("a broken template")))

    handshake = "ASGI callable returned without completing handshake."
    denied = logs.NOISE["uvicorn.error"]
    assert denied.filter(record(handshake))
    token = logs.answered_by_denial.set(True)
    assert not denied.filter(record(handshake))
    logs.answered_by_denial.reset(token)


def test_route_lines_come_back_with_debug_logging() -> None:
    (name,) = (name for name in logs.NOISE if name.endswith("launcher"))
    launcher, noise = logging.getLogger(name), logs.NOISE[name]
    line = record("Route: %s, Methods: %s", "/health", "GET")
    line.name = name
    before = launcher.level
    try:
        launcher.setLevel(logging.INFO)
        assert not noise.filter(line)
        launcher.setLevel(logging.DEBUG)
        assert noise.filter(line)
    finally:
        launcher.setLevel(before)
