# SPDX-License-Identifier: Apache-2.0
"""WebSocket limits for which stock `vllm serve` has no flags.

`vllm serve --omni` adds flags for these limits. The endpoint plugin calls `apply_at_startup(app)`,
so the limits apply in every API server process. With plain `vllm serve`, the default values apply.
"""

import argparse
import math
from typing import Any

import msgspec
from fastapi import FastAPI

from vllm_omni.entrypoints.lifespan import run_before_serving
from vllm_omni.entrypoints.limits.frame_budget import FrameBudget

MIB = 1 << 20
_LIBRARIES = ("auto", "websockets", "websockets-sansio")
"""Names that uvicorn uses for the `websockets` library. This package requires `websockets`, and
uvicorn uses it by default.
"""


class WebSocketOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that apply to every WebSocket of a server."""

    max_bytes: int = 64 * MIB
    """Maximum size of a client's message in bytes. If a message is larger, the connection is closed
    with 1009. Default: 64 MiB.
    """
    ping_interval_s: float | None = 10.0
    """Time in seconds between keepalive pings. None: no pings are sent. Default: 10."""
    ping_timeout_s: float | None = 10.0
    """Maximum time in seconds to wait for the reply to a ping before the connection is closed.
    None: the connection is not closed. Default: 10.
    """

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Add the flags to the `vllm serve` parser."""
        defaults = WebSocketOptions()
        group = parser.add_argument_group(
            "WebSocket", "Limits of the realtime WebSockets (added by vllm_omni)."
        )
        group.add_argument(
            "--ws",
            choices=_LIBRARIES,
            default=_LIBRARIES[0],
            help="Accepted for compatibility with uvicorn and other servers; all values select the "
            "package `websockets`.",
        )
        group.add_argument(
            "--ws-max-size",
            type=_message_bytes,
            default=defaults.max_bytes,
            help="Maximum size of a client's message in bytes.",
        )
        group.add_argument(
            "--ws-ping-interval",
            type=_seconds,
            default=defaults.ping_interval_s,
            help="Seconds between keepalive pings; 0 = no pings.",
        )
        group.add_argument(
            "--ws-ping-timeout",
            type=_seconds,
            default=defaults.ping_timeout_s,
            help="Seconds after which an unanswered ping closes the connection; 0 = never.",
        )

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> "WebSocketOptions":
        """Create the options from parsed flags.

        The namespace of plain `vllm serve` contains none of these flags, so the defaults apply.
        """
        if "ws_max_size" not in args:
            return cls()
        return cls(
            max_bytes=args.ws_max_size,
            ping_interval_s=args.ws_ping_interval,
            ping_timeout_s=args.ws_ping_timeout,
        )

    def apply(self, uvicorn_config: Any) -> None:
        """Set the limits in a `uvicorn.Config`.

        Compression is disabled because it takes 300 ms per raw chunk and saves little.
        """
        uvicorn_config.ws_max_size = self.max_bytes
        uvicorn_config.ws_ping_interval = self.ping_interval_s
        uvicorn_config.ws_ping_timeout = self.ping_timeout_s
        uvicorn_config.ws_per_message_deflate = False


def apply_at_startup(app: FastAPI, frames: FrameBudget | None = None) -> None:
    """Apply the flags and the frame budget before vLLM's server starts to listen.

    Args:
        app: The application.
        frames: Small-frame budget for each connection. Default: `FrameBudget()`.
    """

    def apply(starting: FastAPI) -> None:
        config = starting.state.server.config
        WebSocketOptions.from_args(starting.state.args).apply(config)
        (frames or FrameBudget()).apply(config)

    run_before_serving(app, apply)


def _message_bytes(text: str) -> int:
    if not text.isdecimal() or not 1024 <= int(text) <= 1 << 30:
        raise argparse.ArgumentTypeError(
            f"must be a whole number of bytes from 1024 to {1 << 30}, got {text!r}"
        )
    return int(text)


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 (off) to 86400, got {text!r}")
    return value or None
