# SPDX-License-Identifier: Apache-2.0
"""`training/tiny_world/optimizers.py`: who optimises which parameter, how far a step goes, and
that it resumes.
"""

import copy

import pytest
import torch
from torch import nn

from training.tiny_world.optimizers import (
    Ema,
    build_optimizer,
    learning_rate,
    parameter_groups,
)


class Network(nn.Module):
    """One parameter of each kind that the tiny world's networks have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 8)
        self.patch_embedding = nn.Linear(8, 8)
        self.middle = nn.Linear(8, 24)
        self.back = nn.Linear(24, 8)
        self.conv = nn.Conv3d(8, 6, 3, padding=1)
        self.gamma = nn.Parameter(torch.ones(6, 1, 1, 1))
        self.modulation = nn.Parameter(torch.zeros(1, 2, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = (
            self.patch_embedding(self.table(index)) * (1 + self.modulation[0, 0])
            + self.modulation[0, 1]
        )
        x = self.head(x + self.back(torch.tanh(self.middle(x))))
        return (self.conv(x.view(1, 8, 1, 1, -1)) * self.gamma).square().mean() + (
            x - 1
        ).square().mean()


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    return Network()


def _train(network: Network, optimiser, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = network(torch.arange(5))
        loss.backward()
        optimiser.step(0.5)
        losses.append(float(loss.detach()))
    return losses


def test_matrices_between_the_first_and_the_last_layer_are_muons(network: Network) -> None:
    """Convolutions are matrices; vectors stored with more axes, tables, modulations, first and
    last layers are not.
    """
    matrices, others = parameter_groups(network)
    assert set(matrices) == {"middle.weight", "back.weight", "conv.weight"}
    assert set(matrices) | set(others) == {name for name, _ in network.named_parameters()}


def test_a_step_has_the_same_size_whatever_the_gradients(network: Network) -> None:
    """The root mean square of a matrix's change is near 0.2 of the learning rate for every
    shape.
    """
    for factor in (1e-3, 1e3):
        module = copy.deepcopy(network)
        before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        optimiser = build_optimizer(module, muon_lr=0.1, adam_lr=0.1)
        (module(torch.arange(5)) * factor).backward()
        for name in ("middle.weight", "back.weight", "conv.weight"):
            parameter = module.get_parameter(name)
            parameter.grad = torch.randn(parameter.shape) * factor
        optimiser.step()
        for name in ("middle.weight", "back.weight", "conv.weight"):
            change = module.get_parameter(name).detach() - before[name]
            assert 0.012 < change.square().mean().sqrt() < 0.024, name


@pytest.mark.parametrize(("dtype", "largest"), [(None, 0.0), (torch.bfloat16, 0.1)])
def test_training_continues_from_a_saved_state_as_if_it_had_not_stopped(
    network: Network, dtype, largest
) -> None:
    """Bit for bit in fp32; with bf16 momenta three steps differ by less than a tenth of their
    way.
    """
    optimiser = build_optimizer(network, muon_lr=0.02, adam_lr=0.02, weight_decay=0.1)
    _train(network, optimiser, 5)
    before = nn.utils.parameters_to_vector(network.parameters()).detach()
    ends = []
    for retained in (None, dtype):
        module = copy.deepcopy(network)
        resumed = build_optimizer(module, muon_lr=0.02, adam_lr=0.02, weight_decay=0.1)
        resumed.load_state_dict(optimiser.state_dict(retained))
        _train(module, resumed, 3)
        ends.append(nn.utils.parameters_to_vector(module.parameters()).detach())
    _train(network, optimiser, 3)
    straight = nn.utils.parameters_to_vector(network.parameters()).detach()
    torch.testing.assert_close(ends[0], straight, rtol=0, atol=0)
    assert (ends[1] - straight).norm() <= largest * (straight - before).norm()


def test_the_mean_follows_the_weights_and_can_be_put_in_their_place(network: Network) -> None:
    mean = Ema(network, 0.5)
    first = network.head.weight.detach().clone()
    with torch.no_grad():
        network.head.weight.add_(1.0)
    mean.update()
    expected = first + (1 - 2 / 11)
    torch.testing.assert_close(mean.averaged_state_dict()["head.weight"], expected)
    with mean.applied():
        torch.testing.assert_close(network.head.weight.detach(), expected)
    torch.testing.assert_close(network.head.weight.detach(), first + 1)
    again = Ema(network, 0.5)
    again.load_state_dict(mean.state_dict())
    assert again.num_updates == 1
    torch.testing.assert_close(again.means["head.weight"], expected)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_the_learning_rate_rises_stays_and_falls(shape) -> None:
    rates = [
        learning_rate(x, warmup=0.1, decay_from=0.5, shape=shape)
        for x in (0, 0.05, 0.1, 0.5, 0.75, 1.0)
    ]
    assert rates == pytest.approx([1e-3, 0.5, 1, 1, 0.5, 0])
