# SPDX-License-Identifier: Apache-2.0
"""Train the tiny decoder for the world's latents, in TAEHV's layout.

    python -m training.tiny_world.train_tiny_decoder --vae vae.pt --out DIR --minutes 4

The script writes `tiny_decoder.pt` (with TAEHV's names, in fp32) and `tiny_decoder_curve.jsonl`.
The inputs are latents of the autoencoder with added noise, because the transformer's latents are
never exact. The targets are rendered frames.
"""

import argparse
import json
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from training.tiny_world import measure
from training.tiny_world.autoencoder import LATENT_CHANNELS, load_autoencoder
from training.tiny_world.footage import Footage
from training.tiny_world.optimizers import Ema, build_optimizer, learning_rate
from training.tiny_world.ranks import Clock, Ranks
from training.tiny_world.render import Renderer
from vllm_omni.evaluation import likeness

WIDTHS = (80, 48, 32, 16)
_GROWTH = (1, 2, 2)
_MEMORIES = 3
_HELD_OUT_SEED = 990_002
_FIRST_AND_LAST = ("decoder.1", "decoder.22")


class Memory(nn.Module):
    """A residual block over each frame and its predecessor, [B, T, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        convolutions = [
            nn.Conv2d(inputs, channels, 3, padding=1)
            for inputs in (2 * channels, channels, channels)
        ]
        self.conv = nn.Sequential(
            convolutions[0], nn.ReLU(), convolutions[1], nn.ReLU(), convolutions[2]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), dim=1)
        moved = self.conv(torch.cat((x, before), dim=2).flatten(0, 1))
        return functional.relu(moved.view_as(x) + x)


class Grow(nn.Module):
    """Expand each frame to `factor` frames."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels * factor, 1, bias=False)
        self.channels = channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        grown = self.conv(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return grown.unflatten(2, (-1, self.channels)).flatten(1, 2)


class TinyDecoder(nn.Module):
    """Decodes whole clips: latents [B, n, 16, h, w] to pixels [B, 4 n - 3, 3, 8 h, 8 w] in [0,
    1].
    """

    def __init__(self, widths: tuple[int, ...] = WIDTHS) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Identity(),
            nn.Conv2d(LATENT_CHANNELS, widths[0], 3, padding=1),
            nn.ReLU(),
        ]
        for level, factor in enumerate(_GROWTH):
            layers += [Memory(widths[level]) for _ in range(_MEMORIES)]
            layers += [nn.Upsample(scale_factor=2), Grow(widths[level], factor)]
            layers += [nn.Conv2d(widths[level], widths[level + 1], 3, padding=1, bias=False)]
        layers += [nn.ReLU(), nn.Conv2d(widths[-1], 3, 3, padding=1)]
        self.decoder = nn.Sequential(*layers)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(latents / 3) * 3
        for layer in self.decoder:
            x = (
                layer(x)
                if isinstance(layer, Memory | Grow)
                else layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            )
        return x[:, 3:]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="a tiny_decoder.pt to start from")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--frames", type=int, default=13)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--footage-seconds", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--device")
    parser.add_argument("--size", type=int, nargs=2, default=(96, 160), metavar=("HEIGHT", "WIDTH"))
    args = parser.parse_args()

    clock = Clock(args.minutes)
    ranks = Ranks.join(args.device)
    cuda = ranks.device.type == "cuda"
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    autoencoder = load_autoencoder(args.vae, ranks.device)
    renderer = Renderer(ranks.device, *args.size)
    footage = Footage(
        renderer,
        5,
        args.seed * 1000,
        seconds=args.footage_seconds,
        largest=4000,
        at_once=256 if cuda else 3,
    )
    held = Footage(renderer, 5, _HELD_OUT_SEED, seconds=0, at_once=96 if cuda else 3)
    model = TinyDecoder().to(ranks.device)
    if args.resume:
        model.load_state_dict(torch.load(args.resume, map_location=ranks.device, weights_only=True))
    optimizer = build_optimizer(model, 2e-3, 1e-3, adam=_FIRST_AND_LAST)
    ema = Ema(model, 0.998)

    def latents_of(clips: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(ranks.device.type, torch.bfloat16, enabled=cuda):
            return autoencoder.moments(clips)[0]

    def loss_of(latents: torch.Tensor, clips: torch.Tensor) -> torch.Tensor:
        with torch.autocast(ranks.device.type, torch.bfloat16, enabled=cuda):
            made = model(latents).float() * 2 - 1
        return measure.image_loss(measure.image_errors(made, clips))

    encode = torch.compile(latents_of, dynamic=False) if cuda else latents_of
    run = torch.compile(loss_of, dynamic=False) if cuda else loss_of

    @torch.no_grad()
    def evaluate() -> dict[str, float]:
        rows = []
        for part in held.sample(len(held), args.frames).split(args.batch):
            truth = (part + 1) / 2
            made = model(latents_of(part).float()).clamp(0, 1)
            rows.append((likeness.psnr(made, truth), likeness.sharpness(made, truth)))
        db, sharp = (torch.cat(column).mean() for column in zip(*rows, strict=True))
        return {"psnr": round(float(db), 3), "sharpness": round(float(sharp), 3)}

    step, next_report = 0, 20.0
    with (args.out / "tiny_decoder_curve.jsonl").open("a") as curve:
        while clock.fraction() < 0.96 and (args.steps is None or step < args.steps):
            clips = footage.sample(args.batch, args.frames)
            latents = encode(clips)
            noise = args.noise * torch.rand(len(clips), 1, 1, 1, 1, device=clips.device)
            loss = run(latents + noise * torch.randn_like(latents), clips)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step(learning_rate(clock.fraction(), warmup=0.02, decay_from=0.4, last=0.02))
            ema.update()
            step += 1
            if step % 20 == 0 and clock.elapsed() > next_report:
                row = {
                    "step": step,
                    "seconds": round(clock.elapsed(), 1),
                    "loss": round(float(loss.detach()), 5),
                }
                print(json.dumps(row), flush=True)
                curve.write(json.dumps(row) + "\n")
                next_report = clock.elapsed() + 30
        with ema.applied():
            row = {"step": step, "seconds": round(clock.elapsed(), 1), **evaluate()}
        print(json.dumps(row), flush=True)
        curve.write(json.dumps(row) + "\n")
    torch.save(ema.averaged_state_dict(), args.out / "tiny_decoder.pt")


if __name__ == "__main__":
    main()
