# SPDX-License-Identifier: Apache-2.0
"""Which nightly shards this submission runs; `--advance` gives the next one its turn and commits that.

    python3 scripts/nightly_turn.py             prints the shards, such as `3/8`, one a line
    python3 scripts/nightly_turn.py --advance   `make turn`: once for each submission, at its end

`.ci/turn` holds a number that each submission raises by one, and shard `turn % 8 + 1` runs: eight successive
submissions run all eight. Nothing else that a fresh clone knows gives that: a submission brings any number of commits,
so their count may go up by eight each time, and a digest repeats itself by chance (one shard in three would be missed).

Whether the turn was raised is seen from the history: its commit is the newest. If others came after it, the turn may
have been raised earlier in this submission, or forgotten. Then a second shard runs beside the turn's, which moves with
the number of commits since; this is said on stderr. So a submission that raised the turn keeps the promise wherever the
commit stands, and those that forgot it do not all run the same tests.

Only the standard library and git are used. Held by tests/test_nightly_turn.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SHARDS = 8
TURN = ".ci/turn"


def shards(repo: Path) -> tuple[list[int], int]:
    """Shards to run, the turn's first, and how many commits came after the one that raised the turn."""
    turn = read_turn(repo)
    later = commits_since_the_turn(repo)
    return [number % SHARDS + 1 for number in dict.fromkeys([turn, turn + second_step(later)])], later


def second_step(later: int) -> int:
    """How far the second shard is from the turn's: nothing right after it, else never a full round."""
    return 0 if later == 0 else 1 + (later - 1) % (SHARDS - 1)


def read_turn(repo: Path) -> int:
    return int((repo / TURN).read_text())


def commits_since_the_turn(repo: Path) -> int:
    """0 too where there is no history: an archive, or a clone of the newest commit alone."""
    newest = git(repo, "log", "-1", "--format=%H", "--", TURN)
    return int(git(repo, "rev-list", "--count", f"{newest}..HEAD")) if newest else 0


def advance(repo: Path) -> str:
    """Raise the turn by one in a commit of its own; other changes stay as they are."""
    turn = read_turn(repo) + 1
    (repo / TURN).write_text(f"{turn}\n")
    shard = f"{turn % SHARDS + 1}/{SHARDS}"
    subprocess.run(
        ["git", "commit", "--quiet", "-m", f"CI: nightly shard {shard} is next", "--", TURN], cwd=repo, check=True
    )
    return shard


def git(repo: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=repo, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main(arguments: list[str]) -> int:
    repo = Path(__file__).resolve().parent.parent
    if arguments == ["--advance"]:
        print(f"the next submission runs nightly shard {advance(repo)}")
        return 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    numbers, later = shards(repo)
    if later:
        print(
            f"{later} commits came after {TURN} was last raised. If none of them raised it for this submission, its "
            f"shard {numbers[0]} has run before: run `make turn` before the next one. A second shard runs as well",
            file=sys.stderr,
        )
    print(*(f"{number}/{SHARDS}" for number in numbers), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
