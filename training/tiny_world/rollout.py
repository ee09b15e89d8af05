# SPDX-License-Identifier: Apache-2.0
"""Second training phase: the network's own rollouts are the context, and the truth is the target.

    torchrun --nproc-per-node N -m training.tiny_world.rollout --data DIR --prompts prompts.pt --out
        DIR --resume DIR_OF_TEACHER --minutes M [--total-minutes T] [--decay]

Clips are generated chunk by chunk with the current weights, as when served: with few steps, a K/V
window and no gradients. The rollout provides the result of each chunk and the input of the network
at each denoise step of the chunk. For every chunk, one step is drawn at random. A single packed
forward pass then predicts the true frames from the network's own input at that step, after its own
earlier chunks. Gradients flow through this step and through the clean frames that provide keys and
values, but not through earlier steps, which are trained by other draws. Longer clips in the shards
give longer rollouts without any other change.

A rollout is used for several updates, each with different steps, because generating a rollout takes
longer than an update.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from training.tiny_world.clip_window import roll_out
from training.tiny_world.train_world import Losses, Trainer, add_common_options, chunk_lengths
from training.tiny_world.world_data import Batch, Sampler, noised

_SOON = 9
"""Number of latent frames after the gap of a crop that have a smaller weight."""


@dataclass
class OwnClips:
    """Clips that the network has generated. `made`, [B, F, 16, h, w], contains their latents, and
    `inputs`, [steps, B, F, 16, h, w], the input of each step. `age`, int64 [B, F], is the number of
    frames that the network has generated up to each frame, and at most 0 for given frames.
    """

    batch: Batch
    made: torch.Tensor
    inputs: torch.Tensor
    age: torch.Tensor


class RollOuts:
    """Generates clips of whole walks for training. Each rollout is used for `reuse` updates, each
    with different crops of the rollout.

    A clip starts with at most `given` true groups of three frames. `batch` is the number of walks
    per rollout and GPU.
    """

    def __init__(self, trainer: Trainer, reuse: int, given: int, batch: int) -> None:
        self.trainer, self.reuse, self.given = trainer, reuse, given
        self.left = 0
        self.clips: OwnClips | None = None
        single = float((trainer.chunk_B == 1).float().mean())
        sampler = trainer.sampler
        self.sampler = Sampler(
            sampler.shard,
            sampler.prompts,
            sampler.sizes,
            sampler.mix,
            chunk_lengths(batch, single),
            whole=True,
        )

    def next(self) -> OwnClips:
        if self.left == 0 or self.clips is None:
            self.clips = self._make()
            self.left = self.reuse
        self.left -= 1
        return self._cropped(self.clips)

    @torch.no_grad()
    def _make(self) -> OwnClips:
        sampler, sigmas = self.sampler, self.trainer.mix.sigmas
        batch = sampler.draw()
        threes = torch.randint(self.given + 1, (len(batch.latents),), device=sampler.device)
        # A clip with sink frames of another walk and without a pose can only be continued if some
        # of its frames are given.
        threes = torch.where(batch.weights[:, sampler.sizes.sink] == 0, 3, threes)
        made, inputs = [], []
        for chunk, rows in same_lengths(sampler.chunk_B1[:, 0]):
            known = threes[rows] * (3 // chunk)
            own = roll_out(
                self.trainer.model,
                batch.clips.rows(rows),
                batch.latents[rows],
                known,
                chunk,
                sigmas,
            )
            made.append(own[0])
            inputs.append(own[1])
        age = torch.arange(
            1, batch.latents.shape[1] + 1, device=sampler.device
        ) - 3 * threes.unsqueeze(1)
        return OwnClips(batch, torch.cat(made), torch.cat(inputs, dim=1), age)

    def _cropped(self, own: OwnClips) -> OwnClips:
        """Return a batch of the trainer's size with crops of the rollout. The sink frames of each
        crop are the first frames of the rollout.
        """
        sampler = self.trainer.sampler
        wanted = sampler.chunk_B1[:, 0]
        rows = [
            torch.where(self.sampler.chunk_B1[:, 0] == chunk)[0][
                torch.randint(
                    int((self.sampler.chunk_B1 == chunk).sum()), (int((wanted == chunk).sum()),)
                )
            ]
            for chunk, _ in same_lengths(wanted)
        ]
        row_B = torch.cat(rows)
        crop_B = sampler.crops(len(row_B))
        frame_BF = sampler.frame_F + torch.where(
            sampler.frame_F < sampler.sizes.sink, 0, crop_B.unsqueeze(1)
        )
        at = row_B.unsqueeze(1), frame_BF
        # The first frames after the gap lack most of the context from which they were generated.
        soon = (sampler.frame_F >= sampler.sizes.sink) & (
            sampler.frame_F < sampler.sizes.sink + _SOON
        )
        weights = torch.where((crop_B > 0).unsqueeze(1) & soon, 0.3, 1.0) * own.batch.weights[at]
        batch = Batch(own.batch.latents[at], own.batch.clips.picked(row_B, frame_BF), weights)
        inputs = own.inputs[:, row_B.unsqueeze(1), frame_BF]
        return OwnClips(batch, own.made[at], inputs, own.age[at])


def same_lengths(chunk_B: torch.Tensor) -> list[tuple[int, slice]]:
    """Return the clips of a batch by chunk length. Clips with the same chunk length are
    contiguous.
    """
    threes = int((chunk_B == 3).sum())
    parts = [(3, slice(0, threes)), (1, slice(threes, len(chunk_B)))]
    return [(chunk, rows) for chunk, rows in parts if rows.start < rows.stop]


def drawn_steps(trainer: Trainer) -> torch.Tensor:
    """Draw a step for each frame, int64 [B, F]. All frames of a chunk have the same step."""
    sampler = trainer.sampler
    steps = torch.randint(len(trainer.mix.sigmas), sampler.first_BF.shape, device=sampler.device)
    return steps.gather(1, sampler.first_BF)


def at_steps(inputs: torch.Tensor, steps_BF: torch.Tensor) -> torch.Tensor:
    """Select the step of each frame from [steps, B, F, ...]."""
    index = steps_BF.view(1, *steps_BF.shape, 1, 1, 1).expand(1, *inputs.shape[1:])
    return inputs.gather(0, index)[0]


def predicted(
    trainer: Trainer, own: OwnClips, steps_BF: torch.Tensor, true_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (x0 that the network predicts from its own inputs, after its own chunks; sigmas [B,
    F]).

    Clips in `true_B` are teacher-forced instead: their context and their inputs are true frames.
    """
    sampler, batch = trainer.sampler, own.batch
    sigma = sampler.few[steps_BF]
    true = true_B.view(-1, 1, 1, 1, 1)
    noise = torch.randn_like(batch.latents)
    x = torch.where(true, noised(batch.latents, sigma, noise), at_steps(own.inputs, steps_BF))
    context = torch.where(true, sampler.context(batch.latents), own.made)
    flow = trainer.model.packed(context, x, 1000 * sigma, batch.clips, trainer.mask)
    return x - sigma[:, :, None, None, None] * flow, sigma


def squares(x0: torch.Tensor, truth: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error of v for each frame, [B, F], which equals the mean squared
    error of x0 divided by sigma squared.
    """
    return (x0 - truth).square().mean((2, 3, 4)) / sigma.square()


class OwnContext:
    """Objective of the second phase. A fraction `true` of the clips is teacher-forced, so that the
    network does not unlearn the first phase.
    """

    def __init__(self, trainer: Trainer, rollouts: RollOuts, true: float) -> None:
        self.trainer, self.rollouts, self.true = trainer, rollouts, true

    def losses(self) -> Losses:
        own = self.rollouts.next()
        weights = own.batch.weights
        true_B = torch.rand(len(weights), device=weights.device) < self.true
        x0, sigma = predicted(self.trainer, own, drawn_steps(self.trainer), true_B)
        by_frame = squares(x0, own.batch.latents, sigma)
        drift = (own.made - own.batch.latents).square().mean()
        return Losses(
            (by_frame * weights).mean(), by_frame.detach(), sigma, weights, {"drift": drift}
        )

    def extra_state(self) -> Any:
        return None

    def load_extra_state(self, state: Any) -> None:
        pass


def add_rollout_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reuse", type=int, default=16, help="updates for each roll-out")
    parser.add_argument("--rolled", type=int, default=128, help="walks of a roll-out, a GPU")
    parser.add_argument(
        "--given", type=int, default=1, help="most true threes of frames before a roll-out"
    )
    parser.add_argument(
        "--true", type=float, default=0.2, help="fraction of clips that are teacher-forced"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Train the tiny world's transformer behind its own roll-outs."
    )
    add_common_options(parser)
    add_rollout_options(parser)
    parser.set_defaults(muon_lr=1e-3, adam_lr=5e-4, decay_from=0.2)
    options = parser.parse_args(arguments)
    for name in ("data", "prompts", "out", "resume"):
        if getattr(options, name) is None:
            parser.error(f"--{name} is needed")
    trainer = Trainer(options, "rollout")
    trainer.run_objective(
        OwnContext(
            trainer, RollOuts(trainer, options.reuse, options.given, options.rolled), options.true
        )
    )
    trainer.ranks.destroy_group()


if __name__ == "__main__":
    main()
