# SPDX-License-Identifier: Apache-2.0
"""Sharpening: the adversary tells soft clips from true ones, its gradient is balanced, it trains
in pieces.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from training.tiny_world import sharpen, train_world
from training.tiny_world.sharpen import AdversaryWeight, Contest, Late
from training.tiny_world.train_world import Ranks, read_parts, write_synthetic_data
from training.tiny_world.transformer import Sizes

SIZES = Sizes(dim=48, layers=2, heads=2, ffn=64, grid=(4, 6), window=9)
SMALL = [
    *(
        "--dim",
        "48",
        "--layers",
        "2",
        "--heads",
        "2",
        "--ffn",
        "64",
        "--grid",
        "4",
        "6",
        "--window",
        "9",
    ),
    *("--batch", "4", "--log-steps", "1", "--seed", "3"),
]


def _decode(latents: torch.Tensor) -> torch.Tensor:
    """A stand-in for the decoder: the right shapes, differentiable."""
    frames = 4 * latents.shape[1] - 3
    video = functional.interpolate(
        latents.transpose(1, 2)[:, :3], size=(frames, 32, 48), mode="nearest"
    )
    return video.tanh()


@pytest.fixture
def taught(tmp_path: Path) -> list[str]:
    write_synthetic_data(tmp_path / "data", SIZES, ranks=1, clips=6, frames=12)
    (tmp_path / "data" / "clips-held.pt").unlink()
    given = [
        "--data",
        str(tmp_path / "data"),
        "--prompts",
        str(tmp_path / "data" / "prompts.pt"),
        *SMALL,
    ]
    train_world.main([*given, "--max-steps", "1", "--out", str(tmp_path / "teacher")])
    return [*given, "--resume", str(tmp_path / "teacher")]


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


def test_the_adversarys_weight_follows_the_sharpness_of_made_frames() -> None:
    """It grows while frames are softer than wanted, falls while they are sharper, and stays
    within its bounds.
    """
    weight = AdversaryWeight(1.0, 0.95, largest=4.0)
    weight.follow(torch.tensor(0.7))
    grown = float(weight.value)
    weight.follow(torch.tensor(1.2))
    assert grown == pytest.approx(math.exp(0.05 * 0.25)) and float(weight.value) == pytest.approx(
        1.0
    )
    for _ in range(200):
        weight.follow(torch.tensor(0.0))
    assert float(weight.value) == 4.0
    fixed = AdversaryWeight(1.5, None)
    fixed.follow(torch.tensor(0.0))
    assert fixed.value == 1.5


def test_the_adversarys_gradient_is_scaled_to_the_regressions() -> None:
    contest = Contest(Ranks(0, 1, torch.device("cpu")), None, lr=1e-3, slope=1.0, noise=0.1, seed=0)
    for contest.rounds in range(1, 60):
        scale = contest.scale(torch.full((4,), 0.01), torch.full((4,), 5.0))
    assert float(scale) == pytest.approx(0.002, rel=1e-3)


def test_late_frames_response_for_their_level_and_hardly_for_their_place() -> None:
    """Weights fall from 1 at 15 own frames to 0.2 at 24; detail that is moved leaves the level's
    term at nothing.
    """
    late = Late(weight=0.2, level=3.0)
    assert late.weights(torch.tensor([-8, 0, 15, 24, 90])).tolist() == pytest.approx(
        [1, 1, 1, 0.2, 0.2]
    )
    truth, sigma = torch.randn(1, 2, 16, 4, 6), torch.full((1, 2), 0.5)
    torch.testing.assert_close(
        late.levels(truth.roll(3, -1), truth, sigma), torch.zeros(1, 2), atol=1e-6, rtol=0
    )
    brighter = late.levels(truth + torch.tensor([0.0, 1.0]).view(1, 2, 1, 1, 1), truth, sigma)
    torch.testing.assert_close(brighter, torch.tensor([[0.0, 12.0]]), atol=1e-4, rtol=0)


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
    lines = [json.loads(line) for line in (tmp_path / "b" / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "adversarial" in line] == [1, 2, 3]
    before, after = (read_parts(tmp_path / name)["extra"] for name in ("a", "b"))
    assert (before["rounds"], after["rounds"]) == (2, 3)
    assert after["network"]["layers.0.weight"].shape[1] == (3 if decoded else 16)
    away = max(
        float((before["network"][n] - after["network"][n]).abs().max()) for n in before["network"]
    )
    assert 0 < away < 0.01
