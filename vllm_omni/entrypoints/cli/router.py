# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni router`: one address for several `vllm serve` processes, each with separate sessions.

With `--data-parallel-size`, stock vLLM stops every rank when one dies. With separate servers, only
the sessions of the dead one are lost.
"""

import argparse
from typing import Any
from urllib.parse import urlsplit

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.parsers import add_command


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = add_command(
        subparsers,
        "router",
        "one address for several servers; a session stays on its server",
        "Proxy for several `vllm serve --omni` processes that keeps each session on its server.",
        [
            "vllm-omni router --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002",
        ],
    )
    parser.add_argument(
        "--backend",
        action="append",
        required=True,
        metavar="URL",
        help="a server, http://HOST:PORT; once for each",
    )
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (default: 8000)")
    parser.add_argument(
        "--check-interval-s",
        type=float,
        default=1.0,
        help="seconds between health checks of a server (default: 1)",
    )
    parser.add_argument(
        "--max-message-bytes",
        type=int,
        default=64 << 20,
        help="largest message of a client (default: 64 MiB); as --ws-max-size of the servers",
    )
    parser.add_argument(
        "--max-small-frames-per-s",
        type=int,
        default=400,
        help="WebSocket frames under 1 KiB that a client may send on average, five seconds' worth "
        "at once (default: "
        "400); as VLLM_OMNI_MAX_SMALL_FRAMES_PER_S of the servers",
    )
    parser.set_defaults(run=run)


def run(args: Any) -> int:
    """Serve until interrupted.

    Raises:
        CommandError: A URL or an option is invalid.
    """
    import logging

    from aiohttp import web

    from vllm_omni.entrypoints.limits.frame_budget import FrameBudget
    from vllm_omni.entrypoints.router.app import Router
    from vllm_omni.entrypoints.router.backends import Backends

    for url in args.backend:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/"):
            raise CommandError(
                f"--backend {url}: give the address of a server, such as http://127.0.0.1:8001"
            )
    if args.check_interval_s <= 0:
        raise CommandError(f"--check-interval-s {args.check_interval_s:g}: must be above 0")
    if args.max_small_frames_per_s <= 0:
        raise CommandError(
            f"--max-small-frames-per-s {args.max_small_frames_per_s}: must be above 0"
        )
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(message)s")
    backends, frames = (
        Backends(args.backend, args.check_interval_s),
        FrameBudget(args.max_small_frames_per_s),
    )
    router = Router(backends, args.max_message_bytes, frames=frames)
    try:
        # a disconnect must end the request on the server
        web.run_app(
            router.application(),
            host=args.host,
            port=args.port,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=2.0,
        )
    except OSError as error:
        raise CommandError(f"port {args.port} of {args.host}: {error.strerror or error}") from error
    return 0
