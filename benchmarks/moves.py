# SPDX-License-Identifier: Apache-2.0
"""Move a session of the trained world repeatedly between two servers, and kill servers.

    # 1,000 moves and 50 kills, on two quiet CPU cores
    python benchmarks/moves.py --moves 1000 --kills 50

The client plays in the same way as the web page: while one request for a chunk is running, the next
request is queued. The session moves after every second chunk. The pause is the time from the last
frame before a move to the first frame after it, minus the median time between two chunks without
moves. The frames are compared bit for bit with those of a session that did not move.

A kill terminates all processes of one server with SIGKILL at a random moment during a move. The
server is then started again, and the live copies of the session are counted. A live session must
continue correctly, so its next chunk is compared with the same chunk of a session that did not
move. Kills after the end of a move are reported but not counted. On SIGTERM or Ctrl-C, the script
stops killing servers and saves the result.
"""

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, quantiles, save

KEY = "operator-key-of-a-benchmark"
HEIGHT, WIDTH = 96, 160
NAMES = ("a", "b")
MAX_SESSIONS = 16
SETTLED_S = 17.0
"""Number of seconds after a kill within which both servers settle a move that was in progress."""


class Servers:
    """Several servers that serve the same model and move sessions between each other.

    Args:
        folder: Directory for the logs and for the file that lists the servers.
        model: Checkpoint directory.
        names: Names of the servers.
        period_s: Seconds between periodic snapshots. None: no periodic snapshots are written.
        is_proxied: Whether clients reach the servers through a proxy.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        names: Sequence[str] = NAMES,
        period_s: float | None = None,
        is_proxied: bool = False,
    ) -> None:
        from vllm_omni.entrypoints.cli import demo

        self._demo, self._model, self._folder = demo, model, folder
        self._period_s = period_s
        self.ports = {name: demo.free_port(0) for name in names}
        self._file = folder / "fleet.toml"
        rows = [(name, f'url = "{self.url(name)}"') for name in names]
        if not is_proxied:
            rows = [(name, f"{row}\npublic_{row}") for name, row in rows]
        self._file.write_text("".join(f"[servers.{name}]\n{row}\n" for name, row in rows))
        os.environ["VLLM_OMNI_OPERATOR_KEY"] = KEY
        self._stacks = {name: contextlib.ExitStack() for name in names}
        self.processes: dict[str, Any] = {}

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.ports[name]}"

    def kept(self, name: str) -> Path:
        """Return the directory for a server's snapshots, which remain after the server stops."""
        return self._folder / f"kept-{name}"

    def start(self, *names: str) -> None:
        for name in names:
            omni: dict[str, Any] = {"height": HEIGHT, "width": WIDTH, "server_name": name}
            omni |= {"fleet": str(self._file), "max_sessions": MAX_SESSIONS}
            if self._period_s is not None:
                omni["drain_snapshot_dir"] = str(self.kept(name))
                omni["snapshot_period_s"] = self._period_s
            flags = ("--additional-config", json.dumps({"omni": omni}))
            log = self._folder / f"{name}.log"
            self.processes[name] = self._stacks[name].enter_context(
                self._demo.server(self._model, self.ports[name], HEIGHT, WIDTH, log, extra=flags)
            )
        for name in names:
            self._demo.wait_until_healthy(self.processes[name], 600)

    def kill(self, name: str) -> None:
        popen = self.processes[name].popen
        os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
        self._stacks[name].close()

    def drain(self, name: str) -> float:
        """Stop a server with SIGTERM, and return the number of seconds that it takes to exit."""
        popen, started_s = self.processes[name].popen, time.monotonic()
        popen.terminate()
        assert popen.wait(120) == 0
        took_s = time.monotonic() - started_s
        self._stacks[name].close()
        return took_s

    def stop(self) -> None:
        for stack in self._stacks.values():
            stack.close()

    def call(self, name: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        sent = urllib.request.Request(self.url(name) + path, data, headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(sent, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as refused:
            return refused.code, json.load(refused)

    def live(self, session_id: str) -> list[str]:
        """Return the names of the servers where a session is live."""
        found = []
        for name in self.ports:
            _, reply = self.call(name, "GET", "/omni/sessions")
            found += [name for session in reply["sessions"] if session["name"] == session_id]
        return found

    def snapshots(self, session_id: str) -> list[Path]:
        """Return the files of a session's last snapshot."""
        from vllm_omni.entrypoints.realtime.connection.connection import ANONYMOUS
        from vllm_omni.entrypoints.realtime.sessions.persisted_sessions import PersistedSessions

        key = (ANONYMOUS, session_id)
        found: list[Path] = []
        for name in self.ports:
            digest = PersistedSessions(self.kept(name), "").final_path(key).name.partition(".")[0]
            files = self.kept(name).glob(f"{digest}.*")
            found += [file for file in files if file.suffix in (".withheld", ".safetensors")]
        return found

    def migrate(self, source: str, session_id: str) -> tuple[int, Any]:
        (other,) = set(NAMES) - {source}
        return self.call(source, "POST", f"/omni/sessions/{session_id}/migrate", {"to": other})


class Player:
    """A client that keeps two one-chunk requests in flight and follows its session to the other
    server.
    """

    def __init__(self, pair: Servers, session_id: str) -> None:
        self._pair, self.session_id = pair, session_id
        self.server = "a"
        self._pending: deque[dict[str, Any]] = deque()
        self._numbers = itertools.count()
        self._connect()

    def _connect(self) -> None:
        from websockets.sync.client import connect

        from vllm_omni.entrypoints.realtime.connection.codec import decode

        url = self._pair.url(self.server).replace("http", "ws") + "/v1/realtime/world/camera"
        self._stack = contextlib.ExitStack()
        self._socket = self._stack.enter_context(
            connect(url, max_size=None, compression=None, proxy=None, close_timeout=0.05)
        )
        self._decode = decode
        hello = decode(bytes(self._socket.recv())).value
        self._sizes = hello["first_chunk_frames"], hello["chunk_frames"]
        self._stride = hello["vae_stride"][0]

    def _send(self, message: dict[str, Any]) -> None:
        from vllm_omni.entrypoints.realtime.connection.codec import encode

        self._socket.send(encode(message))

    def ask(self) -> None:
        """Request the next chunk."""
        number = next(self._numbers)
        chance = random.Random(number)
        num_latents = -(-self._sizes[number > 0] // self._stride)
        actions = [["w", *chance.choice(([], ["j"], ["l"]))] for _ in range(num_latents)]
        message: dict[str, Any] = {
            "endpoint": "infer",
            "protocol_version": 1,
            "session_id": self.session_id,
            "request_id": uuid.uuid4().hex,
            "chunk_index": number,
            "actions": actions,
            "extra_body": {"video_format": "ndarray_u8", "seed": 7},
        }
        if number == 0:
            from vllm_omni.entrypoints.cli import demo
            from vllm_omni.worlds import village_checkpoint
            from vllm_omni.worlds.description import read_description

            walk = demo.plan_walk(village_checkpoint(), read_description(village_checkpoint()))
            message |= {"image": walk.image, "prompt": walk.prompt(range(1))}
        self._pending.append(message)
        self._send(message)

    def chunk(self) -> tuple[int, str, float]:
        """Receive one chunk. Return its index, the digest of its frames, and the arrival time of
        its first frame.
        """
        digest, first_s = hashlib.sha256(), None
        while True:
            message = self._decode(bytes(self._socket.recv(timeout=600))).value
            if message["type"] == "frame":
                first_s = first_s or time.monotonic()
                digest.update(message["video"].tobytes())
                if message["final"]:
                    self._pending.popleft()
                    return message["chunk_index"], digest.hexdigest(), first_s
            elif message["type"] == "moved":
                self._follow(message["server"])
            elif message["type"] == "error":
                raise RuntimeError(f"{message['code']}: {message['message']}")

    def _follow(self, server: str) -> None:
        self._stack.close()
        self.server = server
        self._connect()
        for message in self._pending:
            self._send(message)

    def continue_on(self, server: str) -> None:
        """Connect to a server and request the next chunk there."""
        self._follow(server)
        self.ask()

    def end(self) -> None:
        """Close the session, even if it is moving at this moment."""
        closing = {"endpoint": "close", "session_id": self.session_id}
        self._send(closing)
        while (message := self._decode(bytes(self._socket.recv(timeout=600))).value)[
            "type"
        ] != "closed":
            if message["type"] == "moved":
                self._follow(message["server"])
                self._send(closing)
        self._stack.close()


class Mover:
    """Moves a session back and forth between two servers, in a thread.

    Args:
        pair: The two servers.
        session_id: Id of the session.
        where: Name of the server where the session is live.
    """

    def __init__(self, pair: Servers, session_id: str, where: str) -> None:
        self._pair, self._session_id, self.where = pair, session_id, where
        self.replies: list[dict[str, Any]] = []
        """Responses to the moves that succeeded."""
        self.errors: list[dict[str, Any]] = []
        """Error responses to the moves that failed."""
        self._thread = threading.Thread()

    @property
    def is_moving(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread = threading.Thread(target=self._move)
        self._thread.start()

    def join(self) -> None:
        """Wait until the most recently started move ends."""
        if self._thread.ident is not None:
            self._thread.join()

    def _move(self) -> None:
        status, reply = self._pair.migrate(self.where, self._session_id)
        if status == 200:
            self.replies.append(reply)
            self.where = reply["server"]
        else:
            self.errors.append(reply["error"])


def play(pair: Servers, num_chunks: int, *, moves: bool) -> dict[str, Any]:
    """Play a session. If `moves` is set, start the next move as soon as the client has followed the
    last one.
    """
    player = Player(pair, f"walk-{uuid.uuid4().hex}")
    mover = Mover(pair, player.session_id, player.server)
    digests, times_s, servers = [], [], []
    player.ask()
    for number in range(num_chunks):
        if number + 1 < num_chunks:
            player.ask()
        if moves and number and mover.where == player.server:  # the client has reconnected
            mover.start()
        index, digest, arrived_s = player.chunk()
        assert index == number, (index, number)
        digests.append(digest)
        times_s.append(arrived_s)
        servers.append(player.server)
        mover.join()
    player.end()
    return {
        "digests": digests,
        "gaps_ms": [1e3 * (b - a) for a, b in itertools.pairwise(times_s)],
        "servers": servers,
        "hand_over_ms": [reply["pause_ms"] for reply in mover.replies],
        "failed": Counter(error["code"] for error in mover.errors),
    }


def measure_moves(pair: Servers, num_moves: int) -> dict[str, Any]:
    """Play once without moves and once with moves, and compare the frames."""
    num_chunks = 2 * num_moves + 2  # the client follows a move during every second chunk
    still = play(pair, num_chunks, moves=False)
    chunk_ms = statistics.median(still["gaps_ms"])
    moved = play(pair, num_chunks, moves=True)
    pauses_ms = [
        gap_ms - chunk_ms
        for gap_ms, (before, after) in zip(
            moved["gaps_ms"], itertools.pairwise(moved["servers"]), strict=True
        )
        if before != after
    ]
    wrong = sum(a != b for a, b in zip(still["digests"], moved["digests"], strict=True))
    return {
        "chunk_ms": quantiles(still["gaps_ms"]),
        "moves": len(moved["hand_over_ms"]),
        "failed_moves": dict(moved["failed"]),
        "chunks": len(moved["digests"]),
        "lost_chunks": num_chunks - len(moved["digests"]),
        "wrong_chunks": wrong,
        "pause_beyond_a_chunk_ms": quantiles(pauses_ms),
        "hand_over_ms": quantiles(moved["hand_over_ms"]),
    }


def measure_kills(pair: Servers, num_kills: int) -> dict[str, Any]:
    """Kill the two servers alternately, at random moments during moves, and count the live copies
    of each session.
    """
    chance, results, late = random.Random(1), Counter[str](), Counter[str]()
    for stop in (signal.SIGTERM, signal.SIGINT):  # shells make background programs ignore SIGINT
        signal.signal(stop, signal.default_int_handler)
    still = play(pair, 2, moves=False)["digests"]
    trial = play(pair, 12, moves=True)["hand_over_ms"]
    median_ms = statistics.median(trial)
    move_s = median_ms / 1e3
    with contextlib.suppress(KeyboardInterrupt):
        for number, victim in enumerate(itertools.cycle(NAMES)):
            if sum(results.values()) == num_kills:
                break
            where, is_late = _kill(pair, f"kill-{number}", victim, still, chance, move_s)
            (late if is_late else results)[f"killed {victim}: {where}"] += 1
            print(number, victim, where, "late" * is_late, flush=True)
            move_s *= 0.8 if is_late else 1.1  # adapts to the machine's changing load
    return {
        "kills": sum(results.values()),
        "median_move_ms": median_ms,
        "results": dict(sorted(results.items())),
        "after_the_move": dict(sorted(late.items())),
    }


def _kill(
    pair: Servers,
    session_id: str,
    victim: str,
    still: list[str],
    chance: random.Random,
    move_s: float,
) -> tuple[str, bool]:
    """Kill a server while a session moves from `a` to `b`.

    Args:
        pair: The two servers.
        session_id: Id of a new session.
        victim: Name of the server to kill.
        still: Digests of the first chunks of a session that does not move.
        chance: Random generator that chooses the moment of the kill.
        move_s: Usual duration of a move in seconds.

    Returns:
        Where the session is live afterwards, and whether the move had ended before the kill.
    """
    player = Player(pair, session_id)
    player.ask()
    assert player.chunk()[1] == still[0]
    while not pair.snapshots(session_id):
        time.sleep(0.02)
    mover = threading.Thread(target=_move_quietly, args=(pair, session_id))
    mover.start()
    time.sleep(chance.uniform(0.0, move_s))
    is_late = not mover.is_alive()
    settles_s = time.monotonic() + SETTLED_S
    pair.kill(victim)
    mover.join()
    pair.start(victim)
    time.sleep(max(0.0, settles_s - time.monotonic()))
    live = pair.live(session_id)
    where = f"live on {live[0]}" if len(live) == 1 else f"live on {len(live)}"
    if live:
        player.continue_on(live[0])
        is_right = player.chunk()[1] == still[1]
        where += ", next chunk " + ("right" if is_right else "wrong")
        player.end()
    elif pair.snapshots(session_id):
        where += ", snapshot kept"
    for path in pair.snapshots(session_id):
        path.unlink(missing_ok=True)
    return where, is_late


def _move_quietly(pair: Servers, session_id: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        pair.migrate("a", session_id)


@contextlib.contextmanager
def running_pair(period_s: float | None) -> Iterator[Servers]:
    from vllm_omni.worlds import village_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        pair = Servers(Path(folder), village_checkpoint(), period_s=period_s)
        try:
            pair.start(*NAMES)
            yield pair
        finally:
            pair.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=1000, help="moves (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=50, help="kills (default: %(default)s)")
    parser.add_argument("--note", help="a remark about the machine, for the result")
    add_output_arguments(parser)
    args = parser.parse_args()
    result: dict[str, Any] = {} if args.note is None else {"note": args.note}
    if args.moves:
        with running_pair(None) as pair:
            result["moved"] = measure_moves(pair, args.moves)
            print(json.dumps(result["moved"], indent=2), flush=True)
    if args.kills:
        with running_pair(0.2) as pair:
            result["killed"] = measure_kills(pair, args.kills)
    save("moves", result, args)


if __name__ == "__main__":
    main()
