# SPDX-License-Identifier: Apache-2.0
"""Third training phase: an adversary that distinguishes the network's own rollouts from true clips,
in addition to the regression that preserves the response to controls.

    torchrun --nproc-per-node N -m training.tiny_world.sharpen --data DIR --prompts prompts.pt --out
        DIR --resume DIR_OF_ROLLOUT --minutes M [--decoder FILE] [--adversarial R]

Regression produces the mean of all possible continuations. This mean is blurred, and the last step
of the few-step sampler cannot undo the blur. The adversary (a patch network over space and time)
sees a few latent frames of the last step's result. The frozen decoder (`--decoder`) decodes them;
without a decoder, the adversary sees latents. Distribution matching is not used, because it needs a
second network that follows the generator's distribution and a teacher that is good at every sigma.
The teacher available here is trained for only a handful of steps, and the time is better spent on
one small adversary.

- Pairs: the adversary compares a clip with the ground truth of the same walk, so style, position
  and motion do not distinguish the two (relativistic loss: softplus of fake minus real). The
  adversary's slope at real and generated clips is penalised, using finite differences rather than
  second derivatives.
- Balance: the norm of the adversary's gradient at x0 is scaled to R times that of the regression's
  gradient, using running means of both norms, so R has the same meaning for every decoder and
  adversary. With `--sharpness`, R follows the sharpness of generated frames.
- The adversary is used on every second clip, with all frames at the last step. The other clips are
  trained as in the second phase.
- After dozens of generated frames, the true position cannot be known, and regression would cause
  blur. Regression therefore fades (`Late`): what remains of it controls only the level of such
  a frame, and the adversary determines its content.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from training.tiny_world.rollout import (
    RollOuts,
    add_rollout_options,
    drawn_steps,
    predicted,
    squares,
)
from training.tiny_world.train_world import Decode, Losses, Ranks, Trainer, add_common_options


class Adversary(nn.Module):
    """Network that returns logits for patches of a clip [B, c, T, H, W]. `strides` holds the
    spatial strides of all layers except the last.
    """

    def __init__(self, channels: int, widths: Sequence[int], strides: Sequence[int]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = channels
        for number, (width, stride) in enumerate(zip(widths, strides, strict=True)):
            # The first layer sees single images, and later layers also see motion.
            time = 1 if number == 0 else 3
            size = 4 if stride == 2 else 3
            padding = (time // 2, 1, 1)
            layers += [
                nn.Conv3d(before, width, (time, size, size), (1, stride, stride), padding),
                nn.LeakyReLU(0.2),
            ]
            before = width
        layers.append(nn.Conv3d(before, 1, (1, 3, 3), padding=(0, 1, 1)))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits [B, 1, T, h, w], one for each patch."""
        logits: torch.Tensor = self.layers(x)
        return logits

    @classmethod
    def of_frames(cls) -> "Adversary":
        return cls(3, (24, 48, 96, 96), (2, 2, 2, 2))

    @classmethod
    def of_latents(cls) -> "Adversary":
        return cls(16, (64, 96, 96), (1, 2, 1))


class Contest:
    """The adversary, its optimiser, and the running norms that scale its gradient."""

    def __init__(
        self,
        ranks: Ranks,
        decode: Decode | None,
        *,
        lr: float,
        slope: float,
        noise: float,
        seed: int,
    ) -> None:
        self.ranks, self.decode, self.slope, self.noise = ranks, decode, slope, noise
        with torch.random.fork_rng(devices=[ranks.device] if ranks.device.type == "cuda" else []):
            torch.manual_seed(seed)
            network = Adversary.of_latents() if decode is None else Adversary.of_frames()
        self.network = network.to(ranks.device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=lr, betas=(0.0, 0.99))
        self.norms = torch.zeros(2, device=ranks.device)
        """Running means of the gradient norms at x0, for the regression and for the adversary."""
        self.rounds = 0

    def look(self, latents: torch.Tensor) -> torch.Tensor:
        """Convert latents [b, w, 16, h, w] to the adversary's input, [b, c, T, H, W]."""
        if self.decode is None:
            return latents.transpose(1, 2)
        with torch.autocast(latents.device.type, torch.bfloat16, enabled=latents.is_cuda):
            return self.decode(latents).float()

    def gradient(
        self, x0: torch.Tensor, truth: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Train the adversary on these clips, and return the gradient of the generator's
        adversarial loss at x0.
        """
        leaf = x0.detach().requires_grad_()
        fake = self.look(leaf)
        with torch.no_grad():
            real = self.look(truth)
        parts = self._train(real, fake.detach()) | {"sharpness": sharpness(fake.detach(), real)}
        with torch.no_grad():
            real_logits = self.network(real)
        adversarial = functional.softplus(real_logits - self.network(fake)).mean()
        (gradient,) = torch.autograd.grad(adversarial, leaf)
        return gradient, parts | {"adversarial": adversarial.detach()}

    def _train(self, real: torch.Tensor, fake: torch.Tensor) -> dict[str, torch.Tensor]:
        network = self.network
        both = torch.cat((real, fake))
        logits = network(both)
        nudged = network(both + self.noise * torch.randn_like(both))
        real_logits, fake_logits = logits.chunk(2)
        reported = functional.softplus(fake_logits - real_logits).mean()
        steep = (logits - nudged).square().mean()
        self.optimizer.zero_grad()
        (reported + self.slope * steep).backward()
        self.ranks.average_gradients(list(network.parameters()))
        self.optimizer.step()
        self.rounds += 1
        return {
            "told": reported.detach(),
            "steep": steep.detach(),
            "gap": (real_logits - fake_logits).mean().detach(),
        }

    def scale(self, regression: torch.Tensor, adversary: torch.Tensor) -> torch.Tensor:
        """Return the factor that scales the adversary's gradient to the norm of the regression's
        gradient, using the running means of both norms.
        """
        now = torch.stack((regression.norm(), adversary.norm()))
        keep = min(0.98, self.rounds / (self.rounds + 10))
        self.norms = keep * self.norms + (1 - keep) * now
        return self.norms[0] / self.norms[1].clamp_min(1e-12)

    def state(self) -> dict[str, Any]:
        half = {
            name: value.detach().to("cpu", torch.float16)
            for name, value in self.network.state_dict().items()
        }
        return {"network": half, "norms": self.norms.cpu(), "rounds": self.rounds}

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of an earlier run. The adversary's momenta start from zero."""
        self.network.load_state_dict(
            {name: value.float() for name, value in state["network"].items()}
        )
        self.norms, self.rounds = state["norms"].to(self.norms.device), int(state["rounds"])


def sharpness(made: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the mean horizontal difference between neighbouring pixels (or latent values) divided
    by that of the ground truth, as a scalar.
    """
    return made.diff(dim=-1).abs().mean() / truth.diff(dim=-1).abs().mean().clamp_min(1e-6)


class AdversaryWeight:
    """Ratio of the adversary's gradient norm to the regression's, adjusted until generated frames
    have the target sharpness.

    Args:
        ratio: Initial ratio. If `target` is None, the ratio does not change.
        target: Target value of `sharpness`, for example 0.95.
        largest: Upper limit on the ratio.
        rate: Relative change of the ratio per update and per unit of missing sharpness.
    """

    def __init__(
        self, ratio: float, target: float | None, *, largest: float = 6.0, rate: float = 0.05
    ) -> None:
        self.value: float | torch.Tensor = ratio
        self.target, self.largest, self.rate, self.smallest = target, largest, rate, 0.05

    def follow(self, measured: torch.Tensor) -> None:
        """Adjust the ratio after an update in which the frames' sharpness was `measured`. The ratio
        remains on its device.
        """
        if self.target is not None:
            change = torch.exp(self.rate * (self.target - measured))
            self.value = (self.value * change).clamp(self.smallest, self.largest)


@dataclass
class Late:
    """How the regression fades with the number of frames that the network has generated. The weight
    falls from 1 at frame `start` to `weight` at frame `end`. The faded part is replaced by the
    squared error of a frame's channel means, with the weight `level`.
    """

    weight: float
    level: float
    start: int = 15
    end: int = 24

    def weights(self, age: torch.Tensor) -> torch.Tensor:
        faded = ((age - self.start) / (self.end - self.start)).clamp(0, 1)
        return 1 - (1 - self.weight) * faded

    def levels(self, x0: torch.Tensor, truth: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        """Return each frame's weighted squared error of v in its channel means, [B, F].

        The error is the result of `squares` for means over all positions in a frame.
        """
        means = (x0 - truth).mean((3, 4), keepdim=True)
        return self.level * squares(means, torch.zeros_like(means), sigma)


class Sharpening:
    """Objective of the third phase.

    `late` defines how the regression fades, and `weight` is the weight of the adversary's gradient.
    The adversary is trained for `alone` rounds before its gradient is used, and it sees `window`
    latent frames. `keep` is the weight of the regression on the clips that the adversary sees.
    """

    def __init__(
        self, trainer: Trainer, rollouts: RollOuts, contest: Contest, *,
        weight: AdversaryWeight, alone: int, window: int, keep: float, true: float, late: Late,
    ) -> None:  # fmt: skip
        self.trainer, self.rollouts, self.contest, self.late = trainer, rollouts, contest, late
        self.weight, self.alone, self.window, self.keep, self.true = (
            weight,
            alone,
            window,
            keep,
            true,
        )
        self.rows = torch.arange(0, len(trainer.chunk_B), 2, device=trainer.ranks.device)

    def losses(self) -> Losses:
        own, trainer = self.rollouts.next(), self.trainer
        truth, weights = own.batch.latents, own.batch.weights.clone()
        steps = drawn_steps(trainer)
        steps[self.rows] = len(trainer.mix.sigmas) - 1
        true_B = torch.rand(len(weights), device=weights.device) < self.true
        true_B[self.rows] = False
        x0, sigma = predicted(trainer, own, steps, true_B)
        by_frame = squares(x0, truth, sigma)
        retained = weights.clone()
        retained[self.rows] *= self.keep
        here = torch.where(true_B.unsqueeze(1), 1.0, self.late.weights(own.age))
        total = (
            by_frame * retained * here + self.late.levels(x0, truth, sigma) * weights * (1 - here)
        ).mean()

        rows, frames = self.rows.unsqueeze(1), self._frames(weights)
        seen = x0[rows, frames]
        gradient, parts = self.contest.gradient(seen, truth[rows, frames])
        leaf = seen.detach().requires_grad_()
        (regression,) = torch.autograd.grad(
            squares(leaf, truth[rows, frames], sigma[rows, frames]).sum(), leaf
        )
        scale = self.contest.scale(regression / by_frame.numel(), gradient)
        if self.contest.rounds > self.alone:
            total = total + (seen * (gradient * scale * self.weight.value)).sum()
            self.weight.follow(parts["sharpness"])
        ratio = torch.as_tensor(self.weight.value, device=scale.device)
        return Losses(
            total, by_frame.detach(), sigma, weights, parts | {"scale": scale, "ratio": ratio}
        )

    def _frames(self, weights: torch.Tensor) -> torch.Tensor:
        """Sample the frames of each row that the adversary sees, [rows, window]. Frames whose
        content nothing determines are excluded.
        """
        num, frames = len(self.rows), weights.shape[1]
        first = (weights[self.rows] == 0).any(1) * 6
        start = (
            first
            + (torch.rand(num, device=weights.device) * (frames - self.window + 1 - first)).long()
        )
        return start.unsqueeze(1) + torch.arange(self.window, device=weights.device)

    def extra_state(self) -> Any:
        return self.contest.state()

    def load_extra_state(self, state: Any) -> None:
        self.contest.load(state)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Sharpen the tiny world's transformer by an adversary."
    )
    add_common_options(parser)
    add_rollout_options(parser)
    parser.add_argument(
        "--adversarial",
        type=float,
        default=1.0,
        help="the adversary's gradient over the regression's",
    )
    parser.add_argument(
        "--sharpness", type=float, help="move that ratio until made frames are so sharp, e.g. 0.95"
    )
    parser.add_argument(
        "--keep", type=float, default=1.0, help="weight of the regression on the adversary's clips"
    )
    parser.add_argument(
        "--seen-frames", type=int, default=5, help="latent frames that the adversary sees"
    )
    parser.add_argument(
        "--late", type=float, default=1.0, help="weight of the regression behind 24 own frames"
    )
    parser.add_argument("--level", type=float, default=0.0, help="weight of frames' means there")
    parser.add_argument(
        "--alone", type=int, default=200, help="updates of the adversary before it is heeded"
    )
    parser.add_argument("--adversary-lr", type=float, default=3e-4)
    parser.add_argument("--slope", type=float, default=20.0, help="weight of the adversary's slope")
    parser.add_argument(
        "--slope-noise",
        type=float,
        default=0.1,
        help="deviation of the nudge that measures the slope",
    )
    parser.set_defaults(muon_lr=5e-4, adam_lr=2e-4, decay_from=0.5, ema=0.998)
    options = parser.parse_args(arguments)
    for name in ("data", "prompts", "out", "resume"):
        if getattr(options, name) is None:
            parser.error(f"--{name} is needed")
    trainer = Trainer(options, "sharpen")
    contest = Contest(
        trainer.ranks,
        trainer.decode,
        lr=options.adversary_lr,
        slope=options.slope,
        noise=options.slope_noise,
        seed=options.seed,
    )
    objective = Sharpening(
        trainer,
        RollOuts(trainer, options.reuse, options.given, options.rolled),
        contest,
        weight=AdversaryWeight(options.adversarial, options.sharpness),
        alone=options.alone,
        window=options.seen_frames,
        keep=options.keep,
        true=options.true,
        late=Late(options.late, options.level),
    )
    trainer.run_objective(objective)
    trainer.ranks.destroy_group()


if __name__ == "__main__":
    main()
