# SPDX-License-Identifier: Apache-2.0
"""Sharpening: the adversary tells soft clips from true ones, its gradient is balanced, it trains
in pieces.
"""

from pathlib import Path

import pytest
import torch
import training_runs
from torch.nn import functional

from training.tiny_world import sharpen, train_world
from training.tiny_world.sharpen import Contest
from training.tiny_world.state_files import read_parts
from training.tiny_world.train_world import Ranks


def _decode(latents: torch.Tensor) -> torch.Tensor:
    """A stand-in for the decoder: the right shapes, differentiable."""
    frames = 4 * latents.shape[1] - 3
    video = functional.interpolate(
        latents.transpose(1, 2)[:, :3], size=(frames, 32, 48), mode="nearest"
    )
    return video.tanh()


@pytest.fixture
def taught(tmp_path: Path) -> list[str]:
    return training_runs.taught(tmp_path)


def test_the_adversary_learns_to_report_soft_clips_and_pushes_towards_sharp_ones() -> None:
    """After 40 rounds it prefers the truth, and a step along its gradient raises a soft clip's
    edges.
    """
    torch.manual_seed(0)
    ranks = Ranks(0, 1, torch.device("cpu"))
    contest = Contest(ranks, None, lr=1e-3, slope=1.0, noise=0.1, seed=0)
    gaps = []
    for _ in range(40):
        truth = torch.randn(4, 3, 16, 6, 8)
        soft = functional.avg_pool3d(truth, (1, 3, 3), 1, (0, 1, 1))
        gradient, parts = contest.gradient(soft, truth)
        gaps.append(float(parts["gap"]))
    assert gaps[-1] > 1 > abs(gaps[0])
    pushed = soft - 0.5 * gradient / gradient.square().mean().sqrt()
    assert pushed.diff(dim=-1).abs().mean() > 1.1 * soft.diff(dim=-1).abs().mean()


@pytest.mark.parametrize("decoded", [False, True])
def test_the_phase_trains_resumes_and_keeps_its_adversary(
    taught: list[str], tmp_path: Path, decoded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps, then one more with the same adversary, in latents and in frames; the network is
    pushed.
    """
    if decoded:
        monkeypatch.setattr(train_world, "load_decoder", lambda path, device: _decode)
        taught = ["--decoder", "some.pt", *taught]
    short = ["--alone", "1", "--seen-frames", "3", "--late", "0.2", "--level", "2"]
    sharpen.main([*taught, *short, "--max-steps", "2", "--out", str(tmp_path / "a")])
    sharpen.main(
        [
            *taught[:-1],
            str(tmp_path / "a"),
            *short,
            "--max-steps",
            "1",
            "--out",
            str(tmp_path / "b"),
        ]
    )
    lines = training_runs.curve(tmp_path / "b")
    assert [line["step"] for line in lines if "adversarial" in line] == [1, 2, 3]
    before, after = (read_parts(tmp_path / name)["extra"] for name in ("a", "b"))
    assert (before["rounds"], after["rounds"]) == (2, 3)
    assert after["network"]["layers.0.weight"].shape[1] == (3 if decoded else 16)
    away = max(
        float((before["network"][n] - after["network"][n]).abs().max()) for n in before["network"]
    )
    assert 0 < away < 0.01
