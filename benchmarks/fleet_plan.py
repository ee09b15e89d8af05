# SPDX-License-Identifier: Apache-2.0
"""Compute how many GPUs and moves, and how much traffic, 100,000 live sessions require.

The computation uses measured constants. docs/architecture/scale.md shows the result. The chunk time
and the session size were measured on one H200 (benchmarks/results). A session alternates between
playing and idle periods, whose lengths follow log-normal distributions. `scheduler_simulator.py`
replays these periods on eight GPUs with the deadline policy, in virtual time. For each of two
strategies, the script searches for the largest number of sessions per GPU at which 99 % of the
chunks are on time:

- `pinned`: a session stays on its GPU;
- `moved`: after an idle period, a session continues on another GPU of its group if its own GPU is
  full. A move transfers the session's snapshot.

Prices, the bit rate of a stream and the period lengths are assumptions that can be changed with
options.

    python benchmarks/fleet_plan.py
"""

import argparse
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, save
from scheduler_simulator import Load, Viewer, simulate

from vllm_omni.core.sched.policy import StepCosts

GPUS_OF_A_GROUP = 8
SPAN_S = 300.0
ON_TIME = 0.99
SESSIONS_IN_ALL = 100_000


@dataclass(frozen=True)
class Model:
    """Measurements of one served model on one H200."""

    name: str
    chunk_s: float
    """Time that the whole engine takes for a chunk, in seconds."""
    steps: int
    """Number of denoise steps per chunk."""
    session_bytes: int
    """Size of a session with a full window, in bytes."""
    source: str
    """File in benchmarks/results that contains the measurements."""
    frames: int = 12
    """Number of video frames per chunk."""

    def capacity(self, fps: float) -> int:
        """Return the number of streams that one GPU can play if it serves their chunks one after
        another.
        """
        return int(self.frames / fps / self.chunk_s)


MODELS = (
    Model(
        "causal Wan 1.3B, preset `realtime`",
        0.126,
        2,
        1_886_702_400,
        "2026-12-01_streaming_wan_realtime.json",
    ),
    Model(
        "LingBot World 18.5B, preset `realtime`",
        0.491,
        2,
        11_192_977_920,
        "2026-12-01_lingbot_world_realtime.json",
    ),
)


@dataclass(frozen=True)
class Spell:
    """Period during which one session plays, from `start_s` to `end_s`, or longer if the session
    has to wait.
    """

    session: int
    start_s: float
    end_s: float


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fps", type=float, default=16.0)
    parser.add_argument("--play-s", type=float, default=60.0, help="mean spell of playing")
    parser.add_argument("--idle-s", type=float, default=60.0, help="mean idle spell")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log-normal spells")
    parser.add_argument("--gpu-hour", type=float, default=3.0, help="price of a GPU in USD")
    parser.add_argument(
        "--megabits", type=float, default=3.0, help="of a playing stream, per second"
    )
    parser.add_argument("--gigabyte", type=float, default=0.02, help="price of egress in USD")
    parser.add_argument("--seeds", type=int, default=3)
    add_output_arguments(parser)
    return parser


def spells(sessions: int, args: argparse.Namespace, rng: random.Random) -> list[Spell]:
    """Return the playing periods of all sessions within `SPAN_S` seconds, in chronological order.
    At time 0, each session is at a random point of a random period.
    """

    def length_s(mean_s: float) -> float:
        return rng.lognormvariate(math.log(mean_s) - args.sigma**2 / 2, args.sigma)

    found = []
    for session in range(sessions):
        plays = rng.random() < args.play_s / (args.play_s + args.idle_s)
        now_s = -rng.random() * length_s(args.play_s if plays else args.idle_s)
        while now_s < SPAN_S:
            end_s = now_s + length_s(args.play_s if plays else args.idle_s)
            if plays and end_s > 0:
                found.append(Spell(session, max(0.0, now_s), min(end_s, SPAN_S)))
            now_s, plays = end_s, not plays
    return sorted(found, key=lambda spell: spell.start_s)


def place(
    found: list[Spell], capacity: int, moves: bool, num_gpus: int = GPUS_OF_A_GROUP
) -> tuple[list[list[Spell]], int]:
    """Assign the playing periods to GPUs. Return the periods of each GPU and the number of
    moves.
    """
    homes: dict[int, int] = {}
    gpus: list[list[Spell]] = [[] for _ in range(num_gpus)]
    num_moves = 0
    for spell in found:
        playing = [sum(other.end_s > spell.start_s for other in gpu) for gpu in gpus]
        home = homes.setdefault(spell.session, spell.session % num_gpus)
        if moves and playing[home] >= capacity and min(playing) < playing[home]:
            homes[spell.session] = home = playing.index(min(playing))
            num_moves += 1
        gpus[home].append(spell)
    return gpus, num_moves


def on_time(model: Model, gpu: list[Spell], fps: float, seed: int) -> tuple[int, int]:
    """Replay the playing periods of one GPU, and return `(chunks on time, chunks)`."""
    period_s = model.frames / fps
    viewers = [
        Viewer(
            spell.start_s,
            max(1, round((spell.end_s - spell.start_s) / period_s)),
            period_s,
            model.steps,
        )
        for spell in gpu
    ]
    costs = StepCosts(size_s=model.chunk_s / model.steps)
    outcomes = simulate(Load(viewers, costs, seed=seed), "deadline")
    delivered = sum(outcome.delivered for outcome in outcomes)
    return delivered - sum(outcome.misses for outcome in outcomes), delivered


def measure(model: Model, per_gpu: int, moves: bool, args: argparse.Namespace) -> dict[str, float]:
    """Return the share of chunks that are on time, and the number of moves per session per hour."""
    good = total = num_moves = 0
    for seed in range(args.seeds):
        rng = random.Random(seed)
        found = spells(per_gpu * GPUS_OF_A_GROUP, args, rng)
        gpus, moved = place(found, model.capacity(args.fps), moves)
        num_moves += moved
        for gpu in gpus:
            on, all_ = on_time(model, gpu, args.fps, seed)
            good, total = good + on, total + all_
    session_hours = args.seeds * per_gpu * GPUS_OF_A_GROUP * SPAN_S / 3600
    return {"on_time": good / max(1, total), "moves_per_hour": num_moves / session_hours}


def largest(model: Model, moves: bool, args: argparse.Namespace) -> dict[str, Any]:
    """Return the largest number of sessions per GPU at which enough chunks are on time."""
    best: dict[str, Any] = {"sessions_per_gpu": 0, "on_time": 1.0, "moves_per_hour": 0.0}
    per_gpu = 1
    while (found := measure(model, per_gpu, moves, args))["on_time"] >= ON_TIME:
        best = {"sessions_per_gpu": per_gpu, **found}
        per_gpu += 1
    return best


def plan(model: Model, moves: bool, args: argparse.Namespace) -> dict[str, Any]:
    held = largest(model, moves, args)
    gpus = math.ceil(SESSIONS_IN_ALL / max(1, held["sessions_per_gpu"]))
    playing = SESSIONS_IN_ALL * args.play_s / (args.play_s + args.idle_s)
    moves_per_s = SESSIONS_IN_ALL * held["moves_per_hour"] / 3600
    egress_gbits = playing * args.megabits / 1e3
    egress_usd = egress_gbits / 8 * 3600 * args.gigabyte
    return {
        "model": model.name,
        "source": model.source,
        "way": "moved" if moves else "pinned",
        "playing_per_gpu": model.capacity(args.fps),
        **{key: round(value, 4) for key, value in held.items()},
        "gpus": gpus,
        "moves_per_s": round(moves_per_s, 1),
        "snapshot_gbytes_per_s": round(moves_per_s * model.session_bytes / 1e9, 1),
        "snapshot_mbytes_per_s_of_a_gpu": round(moves_per_s * model.session_bytes / gpus / 1e6, 1),
        "egress_gbits_per_s": round(egress_gbits, 1),
        "usd_per_hour": {"gpus": round(gpus * args.gpu_hour), "egress": round(egress_usd)},
        "usd_per_session_hour": round((gpus * args.gpu_hour + egress_usd) / SESSIONS_IN_ALL, 2),
    }


def main() -> None:
    args = make_parser().parse_args()
    rows = [plan(model, moves, args) for model in MODELS for moves in (False, True)]
    assumptions = {
        name: getattr(args, name)
        for name in ("fps", "play_s", "idle_s", "sigma", "gpu_hour", "megabits", "gigabyte")
    }
    save(
        "fleet_plan",
        {
            "sessions": SESSIONS_IN_ALL,
            "gpus_of_a_group": GPUS_OF_A_GROUP,
            "on_time_target": ON_TIME,
            "assumptions": assumptions,
            "rows": rows,
        },
        args,
    )


if __name__ == "__main__":
    main()
