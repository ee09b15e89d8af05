# SPDX-License-Identifier: Apache-2.0
"""The phase of own roll-outs: what is predicted is what was served, and it trains in pieces."""

import argparse
from pathlib import Path

import pytest
import torch
import training_runs

from training.tiny_world import rollout
from training.tiny_world.rollout import RollOuts, predicted
from training.tiny_world.state_files import read_parts
from training.tiny_world.train_world import Trainer, add_common_options


@pytest.fixture
def taught(tmp_path: Path) -> list[str]:
    return training_runs.taught(tmp_path)


def _trainer(taught: list[str]) -> Trainer:
    parser = argparse.ArgumentParser()
    add_common_options(parser)
    trainer = Trainer(parser.parse_args(taught), "rollout")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return trainer


def test_a_step_of_a_roll_out_is_predicted_again_with_gradients(taught: list[str]) -> None:
    """Packed, behind its own chunks: the last step's x0 is what the roll-out kept (1e-4, fp32),
    for both lengths.
    """
    trainer = _trainer([*taught, "--start", "1", "--far", "0"])
    own = RollOuts(trainer, reuse=1, given=0, batch=4).next()
    last = torch.full((4, 12), len(trainer.mix.sigmas) - 1)
    x0, sigma = predicted(trainer, own, last, torch.zeros(4, dtype=torch.bool))
    assert sigma.eq(0.625).all() and x0.requires_grad
    torch.testing.assert_close(x0, own.made, atol=1e-4, rtol=0)


def test_the_phase_continues_from_the_means_and_then_from_itself(
    taught: list[str], tmp_path: Path
) -> None:
    """Two steps from the first phase's averaged weights, then one more."""
    rollout.main([*taught, "--max-steps", "2", "--out", str(tmp_path / "a")])
    rollout.main(
        [*taught[:-1], str(tmp_path / "a"), "--max-steps", "1", "--out", str(tmp_path / "b")]
    )
    lines = training_runs.curve(tmp_path / "b")
    assert [line["step"] for line in lines if "drift" in line] == [1, 2, 3]
    assert (read_parts(tmp_path / "b")["phase"], read_parts(tmp_path / "b")["step"]) == (
        "rollout",
        3,
    )
