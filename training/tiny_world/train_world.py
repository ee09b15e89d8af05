# SPDX-License-Identifier: Apache-2.0
"""Train the tiny world's transformer: the loop that all phases share, and the first phase,
`teacher`.

    torchrun --nproc-per-node N -m training.tiny_world.train_world --phase teacher --data DIR
        --prompts prompts.pt --out DIR --minutes M [--total-minutes T] [--resume DIR] [--decay]

A run stops after M minutes of wall time, including compilation, and writes `state-*.bin` (from
which training can be resumed) and `curve.jsonl` to `--out`. The learning rate depends on the total
minutes of all runs so far as a fraction of T. `--export` writes the averaged weights as the
transformer folder of a checkpoint. Run `selftest.py` first to check a machine.

The `teacher` phase is packed teacher forcing. The network predicts v = eps - x0 from x = (1 -
sigma) x0 + sigma eps and t = 1000 sigma, because the package's sampler subtracts sigma v to get x0.
The loss is the mean squared error of v. A loss on x0 would be sigma^2 times this loss. With the
sigmas of the served steps, a loss on x0 would give the last step (.625 in v2) only 0.39 of the
first step's weight. However, the last step determines the visible details, while the first step
mostly determines positions. A loss on v weights all steps equally.

Tested by tests/training/tiny_world/test_train_world.py.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from training.tiny_world.clip_window import roll_out
from training.tiny_world.masks import block_mask, dense_mask, visibility
from training.tiny_world.optimizers import Ema, build_optimizer, learning_rate
from training.tiny_world.ranks import Clock, Ranks
from training.tiny_world.state_files import read_parts, write_parts
from training.tiny_world.transformer import (
    Clips,
    Sizes,
    WorldTransformer,
)
from training.tiny_world.world_data import (
    Batch,
    Mix,
    Prompts,
    Sampler,
    Shard,
    few_step_sigmas,
    find_shards,
    noised,
)

_SYNC_STEPS = 20
"""Number of steps between two checks of the clock. At each check, the ranks also agree on the
learning rate.
"""

_WARMUP_STEPS = 200

Decode = Callable[[torch.Tensor], torch.Tensor]
"""Function that decodes latents [B, F, 16, h, w] to video [B, 3, 4 F - 3, H, W] in [-1, 1]."""


# -- settings --------------------------------------------------------------------------------------


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options that every phase has."""
    parser.add_argument("--data", type=Path, help="folder of clips-N.pt and clips-held.pt")
    parser.add_argument("--prompts", type=Path, help="what world_data --embed-prompts wrote")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, help="folder of a state to go on from")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="of wall time for this piece, compiling included"
    )
    parser.add_argument(
        "--total-minutes", type=float, help="of the phase, all pieces together; default: --minutes"
    )
    parser.add_argument(
        "--decay", action="store_true", help="let the learning rate fall to zero over this piece"
    )
    parser.add_argument("--decay-from", type=float, default=0.4, help="fraction of the total time")
    parser.add_argument(
        "--reserve-seconds",
        type=float,
        default=15.0,
        help="kept for the last evaluation and the state",
    )
    parser.add_argument("--evaluate-minutes", type=float, default=2.0)
    parser.add_argument(
        "--held-rollouts", type=int, default=32, help="held-out walks that are rolled out whole"
    )
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--max-steps", type=int, help="stop after so many steps of this piece")
    parser.add_argument("--log-steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=32, help="clips a GPU")
    parser.add_argument(
        "--single",
        type=float,
        default=0.5,
        help="fraction of clips with chunks of one latent frame",
    )
    parser.add_argument("--muon-lr", type=float, default=2e-3)
    parser.add_argument("--adam-lr", type=float, default=1e-3)
    parser.add_argument(
        "--clip", type=float, default=1.0, help="largest norm of all gradients together"
    )
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument(
        "--dense", action="store_true", help="no FlexAttention: slower, should it not compile"
    )
    parser.add_argument("--decoder", type=Path, help="vae.pt: adds PSNR and sharpness to roll-outs")
    for name in ("dim", "layers", "heads", "ffn", "window", "sink", "chunk-frames"):
        parser.add_argument(f"--{name}", type=int, help="of a new network; see `Sizes`")
    parser.add_argument(
        "--grid", type=int, nargs=2, help="latent rows and columns of a new network"
    )
    for name in (
        "switch",
        "far",
        "few",
        "shift",
        "noisy-context",
        "context-sigma",
        "second-chunk",
        "other-sink",
        "unknown",
        "start",
        "other-context",
    ):
        parser.add_argument(f"--{name}", type=float, help="see `Mix`")
    for name in ("far-frames", "crop"):
        parser.add_argument(f"--{name}", type=int, help="see `Mix`")
    parser.add_argument(
        "--indices",
        type=int,
        nargs="+",
        help="denoise steps that are trained for most, as `denoise_indices`; v2's",
    )


def read_sizes(options: argparse.Namespace) -> Sizes:
    names = ("dim", "layers", "heads", "ffn", "window", "sink", "chunk_frames", "grid")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return Sizes.read_values(Sizes().to_dict() | given)


def read_mix(options: argparse.Namespace) -> Mix:
    names = (
        *("switch", "far", "far_frames", "few", "shift", "noisy_context", "context_sigma"),
        *("second_chunk", "other_sink", "unknown", "crop", "start", "other_context"),
    )
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    sigmas = (
        few_step_sigmas() if options.indices is None else few_step_sigmas(indices=options.indices)
    )
    return replace(Mix(sigmas), **given)


def chunk_lengths(batch: int, single: float) -> torch.Tensor:
    """Return the chunk length of each clip in a batch. Clips with one-frame chunks come last."""
    ones = round(batch * single)
    return torch.tensor([3] * (batch - ones) + [1] * ones)


# -- the curve -------------------------------------------------------------------------------------


@dataclass
class Losses:
    """Result of an objective. `total` is the scalar to differentiate. `by_frame`, [B, F], holds the
    detached losses. `sigma` and `weights` are the sigmas and weights used to compute these losses.
    `parts` holds additional detached scalars for the curve.
    """

    total: torch.Tensor
    by_frame: torch.Tensor
    sigma: torch.Tensor
    weights: torch.Tensor
    parts: dict[str, torch.Tensor]


class Sums:
    """Sums of losses by sigma and by frame position, accumulated on the device so that training
    steps do not wait for them.
    """

    def __init__(self, mix: Mix, chunk_B: torch.Tensor, device: torch.device) -> None:
        self.sigmas = torch.tensor(mix.sigmas, device=device)
        self.singles = (chunk_B == 1).to(device)
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.sums: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def add_losses(self, losses: Losses, norm: torch.Tensor) -> None:
        self.steps += 1
        self._add("loss", losses.total.detach())
        self._add("norm", norm)
        for name, value in losses.parts.items():
            self._add(name, value)
        counted = (losses.weights > 0).float()
        values = losses.by_frame * counted
        few = (losses.sigma.unsqueeze(-1) == self.sigmas).float() * counted.unsqueeze(-1)
        self._add(
            "by_sigma", torch.stack(((values.unsqueeze(-1) * few).sum((0, 1)), few.sum((0, 1))))
        )
        rest = counted - few.sum(-1)
        self._add("continuous", torch.stack(((values * rest).sum(), rest.sum())))
        for name, rows in (("by_frame_3", ~self.singles), ("by_frame_1", self.singles)):
            own = rows.float().unsqueeze(1)
            self._add(name, torch.stack(((values * own).sum(0), (counted * own).sum(0))))

    def _add(self, name: str, value: torch.Tensor) -> None:
        self.sums[name] = value if name not in self.sums else self.sums[name] + value

    def read_means(self) -> dict[str, Any]:
        """Wait for the device, and return the means since the last `reset`."""

        def mean(name: str) -> Any:
            total, count = self.sums[name].double().cpu()
            return (total / count.clamp_min(1)).tolist()

        pairs = ("by_sigma", "continuous", "by_frame_3", "by_frame_1")
        out: dict[str, Any] = {
            name: float(value) / self.steps
            for name, value in self.sums.items()
            if name not in pairs
        }
        out["by_sigma"] = {
            f"{s:.4g}": round(v, 4)
            for s, v in zip(self.sigmas.tolist(), mean("by_sigma"), strict=True)
        }
        if float(self.sums["continuous"][1]):
            out["by_sigma"]["other"] = round(mean("continuous"), 4)
        threes, ones = mean("by_frame_3"), mean("by_frame_1")
        if not bool(self.singles.all()):
            out["by_chunk"] = [
                round(sum(threes[i : i + 3]) / 3, 4) for i in range(0, len(threes), 3)
            ]
        if bool(self.singles.any()):
            out["by_frame"] = [round(value, 4) for value in ones]
        return out


# -- the loop --------------------------------------------------------------------------------------


class Objective(Protocol):
    """Objective that a phase minimises. `extra_state` returns any state that the phase needs for
    resuming in addition to the weights and momenta, or None.
    """

    def losses(self) -> Losses: ...
    def extra_state(self) -> Any: ...
    def load_extra_state(self, state: Any) -> None: ...


class Trainer:
    """One process's network, data and optimiser, and the loop that trains until the time limit."""

    def __init__(self, options: argparse.Namespace, phase: str, ranks: Ranks | None = None) -> None:
        self.options, self.phase, self.clock = options, phase, Clock(options.minutes)
        self.ranks = ranks or Ranks.join()
        device = self.ranks.device
        resumed = None if options.resume is None else read_parts(options.resume)
        self.sizes = Sizes.read_values(resumed["sizes"]) if resumed else read_sizes(options)
        if resumed and options.chunk_frames:
            self.sizes = replace(self.sizes, chunk_frames=options.chunk_frames)
        self.mix = read_mix(options)
        torch.manual_seed(options.seed)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")
        compute = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = WorldTransformer(self.sizes, compute).to(device)
        self.step, self.minutes_before = 0, 0.0
        if resumed:  # another phase starts from the averages
            self._load_weights(resumed["weights" if resumed["phase"] == phase else "ema"])
        self.ema = Ema(self.model, options.ema)
        self.optimizer = build_optimizer(
            self.model, options.muon_lr, options.adam_lr, weight_decay=options.weight_decay
        )
        self.extra: Any = None
        if resumed:
            self.ema.load_state_dict(
                {"means": resumed["ema"], "num_updates": resumed["ema_updates"]}
            )
            if resumed["phase"] == phase:
                self.optimizer.load_state_dict(resumed["optimizer"])
                self.step, self.minutes_before = resumed["step"], resumed["minutes"]
                self.extra = resumed["extra"]
        if device.type == "cuda" and not options.eager:
            self.model.compile_blocks()
        # From here on, each rank draws different random numbers, and so does each resumed run.
        torch.manual_seed(1_000_003 * (options.seed + 1) + 1009 * self.step + self.ranks.rank)

        prompts = Prompts.load(options.prompts, device)
        shard = Shard.load(
            find_shards(options.data, self.ranks.rank, self.ranks.world), device, self.sizes
        )
        self.chunk_B = chunk_lengths(options.batch, options.single)
        self.sampler = Sampler(shard, prompts, self.sizes, self.mix, self.chunk_B)
        self.mask = make_mask(
            self.sizes, self.sampler.frames, self.chunk_B, device, dense=options.dense
        )
        held = options.data / "clips-held.pt"
        self.held: Sampler | None = None
        if held.exists() and self.ranks.leads:
            plain = replace(self.mix, switch=0.0, far=0.0, second_chunk=1.0)
            self.held = Sampler(
                Shard.load([held], device, self.sizes), prompts, self.sizes, plain, self.chunk_B
            )
        self.sums = Sums(self.mix, self.chunk_B, device)
        self.decode: Decode | None = None
        if options.decoder is not None:
            self.decode = load_decoder(options.decoder, device)
        self.curve: list[str] = []
        if resumed and (options.resume / "curve.jsonl").exists():
            self.curve = (options.resume / "curve.jsonl").read_text().splitlines()

    def _load_weights(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict({name: value.float() for name, value in weights.items()})

    # -- time --------------------------------------------------------------------------------------

    def minutes(self) -> float:
        """Return the wall time of this run in minutes."""
        return self.clock.elapsed() / 60

    def _rate(self) -> float:
        """Return the current learning-rate factor."""
        options, now = self.options, self.minutes()
        if options.decay:
            return max(0.0, 1 - now / options.minutes)
        fraction = (self.minutes_before + now) / (options.total_minutes or options.minutes)
        return learning_rate(fraction, warmup=0.0, decay_from=options.decay_from, last=0.01)

    def run_objective(self, objective: Objective) -> None:
        """Train until this run's time limit, and write the state and the curve to `--out`."""
        options, leads = self.options, self.ranks.leads
        if self.extra is not None:
            objective.load_extra_state(self.extra)
        if leads:
            options.out.mkdir(parents=True, exist_ok=True)
            clips = options.batch * self.ranks.world
            self._note(
                {
                    "phase": self.phase,
                    "begins": self.step,
                    "sizes": self.sizes.to_dict(),
                    "batch": clips,
                }
            )
        reserve = options.reserve_seconds / 60
        first, last_log = self.step, (self.step, time.monotonic())
        evaluated = saved = self.minutes()
        while True:
            done = self.step - first
            if done % _SYNC_STEPS == 0:
                now = self.minutes()
                stop = now >= options.minutes - reserve
                look = now - evaluated >= options.evaluate_minutes and not stop
                keep = now - saved >= options.save_minutes and not stop
                rate, stop, look, keep = self.ranks.agree([self._rate(), stop, look, keep])
                if stop:
                    break
                # A phase's warm-up is counted in steps, because compilation may take longer than
                # the warm-up's share of the time.
                rate *= min(1.0, (self.step + _SYNC_STEPS) / _WARMUP_STEPS)
                self.optimizer.set_scale(rate)
                if look:
                    evaluated = now
                    self.evaluate()
                if keep:
                    saved = now
                    self.save(objective)
            if options.max_steps is not None and done >= options.max_steps:
                break
            self.train_step(objective)
            if (self.step - first) % options.log_steps == 0:
                seconds = time.monotonic() - last_log[1]
                self._log(rate, (self.step - last_log[0]) / seconds)
                last_log = (self.step, time.monotonic())
        if self.sums.steps:
            self._log(rate, 0.0)
        self.evaluate()
        self.save(objective)

    def train_step(self, objective: Objective) -> None:
        self.optimizer.zero_grad()
        losses = objective.losses()
        losses.total.backward()
        self.ranks.average_gradients(self.optimizer.parameters)
        norm = self.optimizer.clip(self.options.clip)
        self.optimizer.apply()
        self.ema.update()
        self.sums.add_losses(losses, norm)
        self.step += 1

    # -- what is written ---------------------------------------------------------------------------

    def _log(self, rate: float, steps_per_second: float) -> None:
        means = self.sums.read_means()
        self.sums.reset()
        if not torch.isfinite(torch.tensor(means["loss"])):
            raise RuntimeError(
                f"the loss is {means['loss']} at step {self.step}; the last saved state is kept"
            )
        if self.ranks.leads:
            rounded = {
                name: round(v, 5) if isinstance(v, float) else v for name, v in means.items()
            }
            self._note(
                {
                    "step": self.step,
                    "minutes": round(self.minutes_before + self.minutes(), 3),
                    "rate": round(rate, 4),
                    "steps_per_s": round(steps_per_second, 2),
                    **rounded,
                }
            )

    def _note(self, line: dict[str, Any]) -> None:
        self.curve.append(json.dumps(line))
        print(self.curve[-1], flush=True)
        (self.options.out / "curve.jsonl").write_text("\n".join(self.curve) + "\n")

    def evaluate(self) -> None:
        """Record the losses and rollouts of the averaged weights on the held-out clips."""
        if self.held is None:
            return
        started = time.monotonic()
        with fixed_draws(self.held.device), self.ema.applied():
            line = {"step": self.step, "held": self._held_losses(self.held)}
            singles = sorted(set(self.chunk_B.tolist()), reverse=True)
            line |= {f"rollout_{chunk}": self._held_rollouts(self.held, chunk) for chunk in singles}
        self._note({**line, "seconds": round(time.monotonic() - started, 1)})

    def _held_losses(self, held: Sampler) -> dict[str, Any]:
        """Return the teacher-forced losses at each sigma of the few-step schedule.

        Gradients remain enabled, so no separate graph is compiled.
        """
        sums = Sums(self.mix, self.chunk_B, held.device)
        batch = len(self.chunk_B)
        never = torch.zeros(batch, dtype=torch.bool, device=held.device)
        for start in range(0, min(len(held.shard), 2 * batch), batch):
            index = (start + torch.arange(batch, device=held.device)) % len(held.shard)
            given = held.batch(index, never, never)
            for sigma in self.mix.sigmas:
                levels = torch.full_like(given.weights, sigma)
                losses = packed_losses(self.model, given, levels, given.latents, self.mask)
                sums.add_losses(losses, losses.total.detach())
                del losses
        means = sums.read_means()
        return {
            name: means[name]
            for name in ("loss", "by_sigma", "by_chunk", "by_frame")
            if name in means
        }

    def _held_rollouts(self, held: Sampler, chunk: int) -> dict[str, Any]:
        """Return scores of rollouts of whole held-out walks that start from only the image, with
        one, two and four denoise steps. `still` holds the scores for cameras that never move, whose
        frames are compared with the start image.
        """
        batch = min(len(held.shard), self.options.held_rollouts)
        index = torch.arange(batch, device=held.device)
        drawn = Sampler(
            held.shard, held.prompts, self.sizes, held.mix, torch.full((batch,), chunk), whole=True
        )
        never = torch.zeros(batch, dtype=torch.bool, device=held.device)
        given = drawn.batch(index, never, never)
        clips, truth = given.clips, given.latents
        out: dict[str, Any] = {}
        with uncompiled():
            for sigmas in rollout_sigmas(self.mix.sigmas):
                out[str(len(sigmas))] = self._scored(self._made(clips, truth, chunk, sigmas), truth)
            still = self._made(clips.standing(), truth, chunk, self.mix.sigmas)
            out["still"] = self._scored(still, truth[:, :1].expand_as(truth), still=True)
        return out

    def _made(
        self, clips: Clips, given: torch.Tensor, chunk: int, sigmas: tuple[float, ...]
    ) -> torch.Tensor:
        none = torch.zeros(len(given), device=given.device)
        return roll_out(self.model, clips, given, none, chunk, sigmas)[0]

    def _scored(
        self, made: torch.Tensor, truth: torch.Tensor, *, still: bool = False
    ) -> dict[str, Any]:
        """Return the mean squared error of a few groups of three latent frames. With a decoder,
        also return the scores of the decoded frames.
        """
        error = (made - truth).square().mean((0, 2, 3, 4)).unfold(0, 3, 3).mean(1)
        positions = [position for position in (0, 4, 19, 43) if position < len(error)]
        out: dict[str, Any] = {"mse": [round(float(error[position]), 4) for position in positions]}
        if self.decode is not None:
            scores = frame_scores(self.decode, made[:8], truth[:8], standing=still)
            out |= {
                name: [values[position] for position in positions]
                for name, values in scores.items()
            }
        return out

    def save(self, objective: Objective) -> None:
        """Write a state from which training can be resumed.

        The state is not exact: weights and averages are rounded to fp16, and momenta to bf16.
        """
        if not self.ranks.leads:
            return
        half = {
            name: value.detach().to("cpu", torch.float16)
            for name, value in self.model.state_dict().items()
        }
        state = {
            "phase": self.phase,
            "sizes": {
                n: list(v) if isinstance(v, tuple) else v for n, v in self.sizes.to_dict().items()
            },
            "weights": half,
            "ema": {name: mean.to("cpu", torch.float16) for name, mean in self.ema.means.items()},
            "ema_updates": self.ema.num_updates,
            "optimizer": self.optimizer.state_dict(torch.bfloat16),
            "step": self.step,
            "minutes": self.minutes_before + self.minutes(),
            "extra": objective.extra_state(),
        }
        write_parts(state, self.options.out)


def rollout_sigmas(trained: tuple[float, ...]) -> list[tuple[float, ...]]:
    """Return the schedules used to score rollouts: the trained schedule, and schedules with one,
    two and four steps.
    """
    others = [few_step_sigmas(indices=indices) for indices in ((0,), (0, 750), (0, 250, 500, 750))]
    return [trained, *(sigmas for sigmas in others if len(sigmas) != len(trained))]


@contextmanager
def fixed_draws(device: torch.device) -> Iterator[None]:
    """Return a context manager in which the same random numbers are drawn each time. Later draws
    are not affected.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(20)
        yield


def uncompiled() -> Any:
    """Return a context manager in which compiled functions run eagerly, so nothing is compiled for
    shapes that occur only once.
    """
    return torch.compiler.set_stance("force_eager")


def make_mask(
    sizes: Sizes, frames: int, chunk_B: torch.Tensor, device: torch.device, *, dense: bool = False
) -> Any:
    """Return the mask for `WorldTransformer.packed`: a FlexAttention mask on a GPU unless `dense`
    is set, and a dense mask otherwise.
    """
    seen = torch.stack(
        [visibility(frames, chunk, sizes.window, sizes.sink) for chunk in (3, 1)]
    ).to(device)
    mode_B = (chunk_B == 1).long().to(device)
    if device.type == "cuda" and not dense:
        return block_mask(seen, mode_B, sizes.tokens)
    return dense_mask(seen[mode_B], sizes.tokens)


def load_decoder(path: Path, device: torch.device) -> Decode:
    """Load the autoencoder's frozen decoder. Gradients pass through it."""
    from training.tiny_world import autoencoder  # type: ignore[attr-defined,unused-ignore]

    decode: Decode = autoencoder.load_decoder(path, device)
    return decode


@torch.no_grad()
def frame_scores(
    decode: Decode, made: torch.Tensor, truth: torch.Tensor, *, standing: bool = False
) -> dict[str, list[float]]:
    """For every three latent frames, return the video's PSNR against the decoded ground truth and
    its sharpness (mean horizontal difference divided by that of the ground truth). With `standing`,
    every frame is compared with the ground truth's first frame.
    """

    def shown(latents: torch.Tensor) -> torch.Tensor:
        return torch.cat([decode(part).float().clamp(-1, 1) for part in latents.split(2)])

    own = shown(made)
    true = shown(truth[:, :1]).expand_as(own) if standing else shown(truth)
    edges = [0, *range(9, own.shape[2] + 1, 12)]
    psnr, sharpness = [], []
    for start, stop in itertools.pairwise(edges):
        a, b = own[:, :, start:stop], true[:, :, start:stop]
        psnr.append(
            round(float((10 * torch.log10(4 / (a - b).square().mean((1, 2, 3, 4)))).mean()), 2)
        )
        sharpness.append(round(float(a.diff(dim=-1).abs().mean() / b.diff(dim=-1).abs().mean()), 3))
    return {"psnr": psnr, "sharpness": sharpness}


# -- phase teacher ---------------------------------------------------------------------------------


def packed_losses(
    model: WorldTransformer, batch: Batch, sigma: torch.Tensor, context: torch.Tensor, mask: Any
) -> Losses:
    """Return every chunk's loss on v at `sigma` [B, F], with the clean frames `context` as its
    past.
    """
    noise = torch.randn_like(batch.latents)
    flow = model.packed(
        context, noised(batch.latents, sigma, noise), 1000 * sigma, batch.clips, mask
    )
    by_frame = (flow - (noise - batch.latents)).square().mean((2, 3, 4))
    total = (by_frame * batch.weights).mean()
    return Losses(total, by_frame.detach(), sigma, batch.weights, {})


class TeacherForcing:
    """Objective of the first phase. The context consists of true frames with a little noise. All
    chunks of a clip are trained at once, each at its own sigma.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def losses(self) -> Losses:
        trainer = self.trainer
        sampler = trainer.sampler
        batch = sampler.draw()
        return packed_losses(
            trainer.model,
            batch,
            sampler.noise_levels(),
            sampler.context(batch.latents),
            trainer.mask,
        )

    def extra_state(self) -> Any:
        return None

    def load_extra_state(self, state: Any) -> None:
        pass


# -- export ----------------------------------------------------------------------------------------


def export(state_folder: Path, out: Path, chunk_frames: int | None) -> None:
    """Write a state's averaged weights as the transformer folder of a checkpoint.

    The folder must be named `transformers` as in the v2 layout, because the network was trained for
    the v2 schedule.
    """
    state = read_parts(state_folder)
    sizes = Sizes.read_values(state["sizes"])
    if chunk_frames is not None:
        sizes = replace(sizes, chunk_frames=chunk_frames)
    WorldTransformer(sizes).export(out, state["ema"])
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / 1e6:.2f} MB, step {state['step']} of phase {state['phase']}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the tiny world's transformer.")
    parser.add_argument("--phase", choices=["teacher"], default="teacher")
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="write the state of --resume as a checkpoint"
    )
    add_common_options(parser)
    options = parser.parse_args(arguments)
    if options.export is not None:
        if options.resume is None:
            parser.error("--export needs --resume")
        export(options.resume, options.export, options.chunk_frames)
        return
    for name in ("data", "prompts", "out"):
        if getattr(options, name) is None:
            parser.error(f"--{name} is needed")
    trainer = Trainer(options, options.phase)
    trainer.run_objective(TeacherForcing(trainer))
    trainer.ranks.destroy_group()


if __name__ == "__main__":
    main()
