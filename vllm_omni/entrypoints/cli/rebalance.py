# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni rebalance`: move sessions between the servers of a fleet.

The command repeatedly calls `GET /omni/ready`, `GET /omni/sessions` and
`POST /omni/sessions/{name}/migrate`. It is stateless, so it can be stopped and restarted at any
time.
"""

import argparse
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.parsers import add_command

if TYPE_CHECKING:
    from vllm_omni.entrypoints.fleet.balance import PlannedMove, ServerLoad

_PROBE_S: Final = 5.0
_MOVE_S: Final = 120.0


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = add_command(
        subparsers,
        "rebalance",
        "move sessions between servers, to even out the load or to empty a server",
        "Even out the sessions of several servers. With --fill, a server is filled before the next "
        "one is used, so that some servers are empty and can be stopped. The operator's key is "
        "read from VLLM_OMNI_OPERATOR_KEY.",
        [
            "vllm-omni rebalance fleet.toml",
            "vllm-omni rebalance fleet.toml --fill 0.8 --every 30",
            "vllm-omni rebalance fleet.toml --empty a --once",
        ],
    )
    parser.add_argument("fleet", type=Path, help="the file that the servers have as omni.fleet")
    parser.add_argument(
        "--empty",
        action="append",
        default=[],
        metavar="NAME",
        help="a server that shall have no sessions; may be repeated",
    )
    parser.add_argument(
        "--fill",
        type=float,
        default=0.0,
        help="fraction of max_sessions that a server holds before the next one is used (default: "
        "all servers are used)",
    )
    parser.add_argument("--moves", type=int, default=4, help="most moves of a round (default: 4)")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between rounds")
    parser.add_argument(
        "--once",
        action="store_true",
        help="stop when nothing is left to move; the status is 1 if a move failed",
    )
    parser.set_defaults(run=run)


def run(args: Any) -> int:
    """Move sessions until interrupted. With `--once`, return 0 as soon as no moves are left, or 1
    as soon as a move fails.

    Raises:
        CommandError: The file or an option is invalid.
    """
    from vllm_omni.entrypoints.fleet.balance import plan_moves
    from vllm_omni.entrypoints.fleet.servers import KEY_VARIABLE, FleetFile

    try:
        servers = FleetFile.read_file(args.fleet).servers
    except ValueError as error:
        raise CommandError(str(error)) from error
    if unknown := set(args.empty) - set(servers):
        raise CommandError(f"--empty {min(unknown)}: {args.fleet} lists {sorted(servers)}")
    if not 0 <= args.fill <= 1:
        raise CommandError(f"--fill {args.fill:g}: must be from 0 to 1")
    if args.moves < 1 or args.every <= 0:
        raise CommandError("--moves must be at least 1 and --every above 0")
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise CommandError(f"set {KEY_VARIABLE} to the operator's key of the servers")
    fleet = {name: _Server(name, server.url, key) for name, server in servers.items()}
    while True:
        loads = [load for server in fleet.values() if (load := server.load()) is not None]
        moves = plan_moves(loads, args.empty, args.fill, args.moves)
        results = [_move(fleet, move) for move in moves]
        if args.once and not all(results):
            return 1
        if args.once and not moves:
            return 0
        if not args.once:
            time.sleep(args.every)


def _move(fleet: "Mapping[str, _Server]", move: "PlannedMove") -> bool:
    reply = fleet[move.source].migrate(move)
    outcome = "moved" if reply is None else reply
    print(f"{move.session.name}: {move.source} -> {move.target}: {outcome}", flush=True)
    return reply is None


class _Server:
    """Client for one server's operator routes."""

    def __init__(self, name: str, url: str, key: str) -> None:
        self._name, self._url = name, url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}

    def load(self) -> "ServerLoad | None":
        """Return the server's sessions, or None if the server is down, is stopping or refuses the
        key.
        """
        from vllm_omni.entrypoints.fleet.balance import MovableSession, ServerLoad

        _, ready = self._call("GET", "/omni/ready", _PROBE_S)
        if ready.get("status") not in ("ready", "capacity") or not ready.get("max_sessions"):
            return None
        status, reply = self._call("GET", "/omni/sessions", _PROBE_S)
        if status != 200:
            print(f"{self._name}: /omni/sessions: {_text(reply, status)}", flush=True)
            return None
        sessions = [
            MovableSession(session["name"], session["principal"], session["idle_s"])
            for session in reply["sessions"]
        ]
        return ServerLoad(self._name, int(ready["max_sessions"]), tuple(sessions))

    def migrate(self, move: "PlannedMove") -> str | None:
        """Request that the server move a session. Return None, or the reason why the session was
        not moved.
        """
        body = {"to": move.target, "principal": move.session.principal}
        path = f"/omni/sessions/{quote(move.session.name, safe='')}/migrate"
        status, reply = self._call("POST", path, _MOVE_S, body)
        return None if status == 200 else _text(reply, status)

    def _call(
        self, method: str, path: str, timeout_s: float, body: Any = None
    ) -> tuple[int, dict[str, Any]]:
        data = None if body is None else json.dumps(body).encode()
        sent = urllib.request.Request(self._url + path, data, self._headers, method=method)
        # Ignore proxies from the environment, because the URLs address the servers directly.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(sent, timeout=timeout_s) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as refused:
            try:
                return refused.code, json.load(refused)
            except ValueError:
                return refused.code, {}
        except (OSError, ValueError) as error:
            return 0, {"error": {"message": str(error)}}


def _text(reply: dict[str, Any], status: int) -> str:
    error = reply.get("error")
    text = error.get("message") if isinstance(error, dict) else None
    return str(text or f"HTTP {status}")
