# SPDX-License-Identifier: Apache-2.0
"""Move a LingBot World 18.5B session between two servers on one host, each with its own GPU.

    # FP8, 480x832, four steps; needs 20 GiB in /dev/shm
    python benchmarks/large_moves.py --quantization fp8_per_channel --kv-cache-dtype fp8
    # try it without a GPU
    python benchmarks/large_moves.py --tiny --moves 2 --chunks 4

Random weights with the released shapes give the same times as trained weights. The servers share a
directory in an in-memory file system, so a session can be copied while it plays. Like the web page,
the client keeps two one-chunk requests in flight and reconnects when its session moves.

The pause is the time from the last frame before a move to the first frame after it, minus the
median time between two chunks without moves. The frames are compared bit for bit with those of a
session that did not move.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import re
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")  # the servers log their measurements

sys.path.insert(0, str(Path(__file__).parent))
import lingbot_world
from common import add_output_arguments, quantiles, save
from moves import KEY, Mover, Player, Servers

NAMES = ("a", "b")
_TIMED = re.compile(r"(session_copied|session_updated|session_moved) (.*)$")


class LargePair(Servers):
    """Two servers on one host that share a directory."""

    def __init__(self, folder: Path, shared: Path, args: argparse.Namespace) -> None:
        from vllm_omni.entrypoints.cli import demo
        from vllm_omni.model_executor.models.registry import get_family

        self._demo, self._folder, self._args = demo, folder, args
        self._model = folder / "world"
        if args.tiny:
            get_family("lingbot_world").make_tiny(self._model, 0, "original")
        else:
            lingbot_world.write_checkpoint(self._model, args.release, args.layers)
        self.ports = {name: demo.free_port(0) for name in NAMES}
        self._file = folder / "fleet.toml"
        self._file.write_text(
            "".join(
                f'[servers.{name}]\nurl = "{self.url(name)}"\npublic_url = "{self.url(name)}"\n'
                + ("" if args.sent else f'shared_dir = "{shared}"\n')
                for name in NAMES
            )
        )
        os.environ["VLLM_OMNI_OPERATOR_KEY"] = KEY
        self._stacks = {name: contextlib.ExitStack() for name in NAMES}
        self.processes = {}

    def start(self, *names: str) -> None:
        args = self._args
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1")
        for number, name in enumerate(names):
            omni = {"height": args.height, "width": args.width, "max_sessions": 2}
            omni |= {"server_name": name, "fleet": str(self._file)}
            omni |= {"model": json.loads(args.model_options), **json.loads(args.omni_options)}
            flags = ["--additional-config", json.dumps({"omni": omni})]
            for flag in ("quantization", "kv_cache_dtype"):
                if value := getattr(args, flag):
                    flags += [f"--{flag.replace('_', '-')}", value]
            if args.eager or args.tiny:
                flags.append("--enforce-eager")
            if not args.tiny:
                flags += ["--load-format", "dummy"]
                flags += ["--gpu-memory-utilization", str(args.gpu_memory_utilization)]
                os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number]
            self.processes[name] = self._stacks[name].enter_context(
                self._demo.server(
                    self._model,
                    self.ports[name],
                    args.height,
                    args.width,
                    self.log(name),
                    extra=flags,
                )
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
        for name in names:
            self._demo.wait_until_healthy(self.processes[name], args.start_s)

    def log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def timed(self) -> dict[str, list[str]]:
        """Return the log records in which the servers report copies, by measurement and server."""
        found: dict[str, list[str]] = {}
        for name in NAMES:
            for line in self.log(name).read_text(errors="replace").splitlines():
                if match := _TIMED.search(line):
                    found.setdefault(f"{match[1]} {name}", []).append(match[2][-160:])
        return found


class Walker(Player):
    """A client that keeps two one-chunk requests in flight and follows its session to the other
    server.
    """

    def __init__(self, pair: LargePair, session_id: str, args: argparse.Namespace) -> None:
        self._args = args
        super().__init__(pair, session_id)

    def ask(self) -> None:
        number = next(self._numbers)
        chance = random.Random(number)
        num_latents = -(-self._sizes[number > 0] // self._stride)
        message: dict[str, Any] = {
            "endpoint": "infer",
            "protocol_version": 1,
            "session_id": self.session_id,
            "request_id": uuid.uuid4().hex,
            "chunk_index": number,
            "actions": [["w", *chance.choice(([], ["j"], ["l"]))] for _ in range(num_latents)],
            "extra_body": {"video_format": "ndarray_u8", "seed": 7},
        }
        if number == 0:
            message |= {"image": self._image(), "prompt": "a coast road in the evening"}
        self._pending.append(message)
        self._send(message)

    def _image(self) -> bytes:
        import numpy as np
        from PIL import Image

        values = np.random.default_rng(0).integers(
            0, 256, (self._args.height, self._args.width, 3), dtype=np.uint8
        )
        file = io.BytesIO()
        Image.fromarray(values).save(file, "PNG")
        return file.getvalue()


def play(
    pair: LargePair, num_chunks: int, num_moves: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Play a session, and move it whenever its client has followed the last move.

    Without moves, the session ends after `num_chunks`. With moves, the session ends two chunks
    after the last move.
    """
    player = Walker(pair, f"walk-{uuid.uuid4().hex[:8]}", args)
    mover, ending = Mover(pair, player.session_id, player.server), 2
    digests, times_s, servers = [], [], []
    copying: list[bool] = []
    give_up_s = time.monotonic() + args.move_s
    player.ask()
    for number in itertools.count():
        player.ask()
        has_followed = not mover.is_moving and mover.where == player.server
        if num_moves and number >= args.chunks and has_followed:
            num_tried = len(mover.replies) + len(mover.errors)
            if num_tried >= num_moves or time.monotonic() > give_up_s:
                ending -= 1
            else:
                mover.start()
        index, digest, arrived_s = player.chunk()
        assert index == number, (index, number)
        digests.append(digest)
        times_s.append(arrived_s)
        servers.append(player.server)
        copying.append(mover.is_moving)
        if (num_moves and not ending) or (not num_moves and number + 1 == num_chunks):
            break
    player.chunk()
    player.end()
    return {
        "digests": digests,
        "gaps_ms": [1e3 * (b - a) for a, b in itertools.pairwise(times_s)],
        "servers": servers,
        "copying": copying,
        "replies": mover.replies,
        "failed": dict(Counter(f"{each['code']}: {each['message']}" for each in mover.errors)),
    }


def measure(pair: LargePair, args: argparse.Namespace) -> dict[str, Any]:
    """Play with moves, then play as many chunks without moves, and compare the frames."""
    moved = play(pair, 0, args.moves, args)
    print(json.dumps(pair.timed(), indent=1), flush=True)
    num_chunks = min(len(moved["digests"]), args.chunks + args.compared)
    still = play(pair, num_chunks, 0, args)
    chunk_ms = statistics.median(still["gaps_ms"][args.chunks // 2 :])
    pairs = zip(
        moved["gaps_ms"], itertools.pairwise(moved["servers"]), moved["copying"][1:], strict=True
    )
    pauses_ms, copied_ms = [], []
    for gap_ms, (before, after), is_copying in pairs:
        if before != after:
            pauses_ms.append(gap_ms - chunk_ms)
        elif is_copying:
            copied_ms.append(gap_ms)
    wrong = sum(a != b for a, b in zip(still["digests"], moved["digests"], strict=False))
    replies = moved["replies"]
    return {
        "chunk_ms": quantiles(still["gaps_ms"][args.chunks // 2 :]),
        "chunk_ms_while_copied": quantiles(copied_ms) if copied_ms else None,
        "moves": len(replies),
        "failed_moves": moved["failed"],
        "compared_chunks": num_chunks,
        "wrong_chunks": wrong,
        "moves_in_compared_chunks": sum(
            a != b for a, b in itertools.pairwise(moved["servers"][:num_chunks])
        ),
        "snapshot_bytes": [reply["bytes"] for reply in replies],
        "pause_bytes": [reply["pause_bytes"] for reply in replies],
        "pause_beyond_a_chunk_ms": quantiles(pauses_ms) if pauses_ms else None,
        "hand_over_ms": quantiles([reply["pause_ms"] for reply in replies]) if replies else None,
        "all_pauses_ms": pauses_ms,
        "all_hand_over_ms": [reply["pause_ms"] for reply in replies],
        "servers_records": pair.timed(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moves", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=8, help="chunks before the first move")
    parser.add_argument("--compared", type=int, default=20, help="chunks after them to compare")
    parser.add_argument("--move-s", type=float, default=90.0, help="begin no move after this time")
    parser.add_argument("--start-s", type=float, default=300.0, help="time for both to start")
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--release", choices=tuple(lingbot_world.RELEASES), default="fast")
    parser.add_argument("--layers", type=int, help="fewer layers than the release has")
    parser.add_argument("--tiny", action="store_true", help="the tests' tiny model, 64x96")
    parser.add_argument("--sent", action="store_true", help="send snapshots over HTTP instead")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--quantization", help="vLLM's flag")
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), help="vLLM's flag")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument("--model-options", default="{}", help="JSON: omni.model")
    parser.add_argument("--omni-options", default="{}", help="JSON: other options of omni")
    parser.add_argument("--name", default="large_moves", help="name of the result file")
    add_output_arguments(parser)
    args = parser.parse_args()
    if args.tiny:
        args.height, args.width = 64, 96
    shm = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as shared,
    ):
        pair = LargePair(Path(folder), Path(shared), args)
        started_s = time.monotonic()
        try:
            pair.start(*NAMES)
            start_s = round(time.monotonic() - started_s, 1)
            result = {"both_started_s": start_s, **measure(pair, args)}
        finally:
            pair.stop()
            for name in NAMES:
                if not args.no_save and pair.log(name).exists():
                    args.out.mkdir(parents=True, exist_ok=True)
                    (args.out / f"{args.name}_{name}.log").write_bytes(pair.log(name).read_bytes())
    save(args.name, {"result": {"size": [args.height, args.width], **result}}, args)


if __name__ == "__main__":
    main()
