# SPDX-License-Identifier: Apache-2.0
"""Which nightly shards a submission runs, from its own history alone."""

import os
import random
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script

REPO = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def turns() -> ModuleType:
    return load_script(REPO / "scripts" / "nightly_turn.py")


@pytest.fixture
def repo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose turn was raised by its first commit."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "tests")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "tests@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # set in a hook
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "turn").write_text("0\n")
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    return tmp_path


def git(repo: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=repo, check=True, capture_output=True)


def work(repo: Path, commits: int) -> None:
    for _ in range(commits):
        git(repo, "commit", "--quiet", "--allow-empty", "-m", "work")


def test_any_eight_submissions_run_every_shard(turns: ModuleType, repo: Path) -> None:
    """However many commits each brings, and whichever of them raises the turn."""
    numbers = random.Random(0)
    ran = []
    for _ in range(20):
        work(repo, numbers.choice([0, 1, 3, 8]))
        turns.advance(repo)
        work(repo, numbers.choice([0, 0, 8]))
        ran.append(set(turns.shards(repo)[0]))
    for first in range(len(ran) - turns.SHARDS + 1):
        assert set.union(*ran[first : first + turns.SHARDS]) == set(range(1, turns.SHARDS + 1))


def test_one_shard_right_after_the_turn_and_a_second_one_if_it_may_have_been_forgotten(
    turns: ModuleType, repo: Path
) -> None:
    assert turns.shards(repo) == ([1], 0)
    turns.advance(repo)
    assert turns.shards(repo) == ([2], 0)
    work(repo, 3)
    assert turns.shards(repo) == ([2, 5], 3)
    work(repo, 7)
    assert turns.shards(repo) == ([2, 5], 10)
    work(repo, 1)
    assert turns.shards(repo) == ([2, 6], 11)


def test_a_fresh_clone_runs_the_same(turns: ModuleType, repo: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A clone without history runs the turn's shard."""
    turns.advance(repo)
    work(repo, 2)
    clone, shallow = (tmp_path_factory.mktemp("clones") / name for name in ("whole", "shallow"))
    git(repo, "clone", "--quiet", f"file://{repo}", str(clone))
    git(repo, "clone", "--quiet", "--depth", "1", f"file://{repo}", str(shallow))
    assert turns.shards(clone) == turns.shards(repo) == ([2, 4], 2)
    assert turns.shards(shallow) == ([2], 0)


def test_raising_the_turn_commits_nothing_else(turns: ModuleType, repo: Path) -> None:
    (repo / "begun").write_text("half a sentence")
    git(repo, "add", "begun")
    assert turns.advance(repo) == "2/8"
    changed = subprocess.run(
        ["git", "show", "--name-only", "--format=%s"], cwd=repo, check=True, capture_output=True, text=True
    ).stdout.split("\n\n")
    assert changed == ["CI: nightly shard 2/8 is next", ".ci/turn\n"]


def test_this_repository_has_a_turn(turns: ModuleType) -> None:
    """And the shards it runs are among eight, as the test of the shards takes them."""
    assert set(turns.shards(REPO)[0]) <= set(range(1, turns.SHARDS + 1))
    assert turns.SHARDS == 8
