# SPDX-License-Identifier: Apache-2.0
"""Train the world's autoencoder.

The autoencoder must reproduce frames closely, with latents that are smooth enough to predict.

    torchrun --nproc-per-node 2 -m training.tiny_world.train_vae --out DIR --minutes 7

The script writes `vae.pt` (averaged weights in fp32, with normalised latents), `vae_state.pt` (for
--resume) and `vae_curve.jsonl`. Two measures keep unpredictable details out of the latents: noise
on the decoder's input, and a loss on the posterior's KL divergence from the standard normal
distribution. Some of the clips consist of an image followed by grey frames, because the served
model's condition has the same form.
"""

import argparse
import json
from pathlib import Path

import torch

from training.tiny_world import measure
from training.tiny_world.autoencoder import BASE_WIDTH, Autoencoder, with_latents_scaled
from training.tiny_world.footage import Footage, pixels
from training.tiny_world.optimizers import Ema, build_optimizer, learning_rate
from training.tiny_world.ranks import Clock, Ranks
from training.tiny_world.render import Renderer
from vllm_omni.evaluation import likeness

_HELD_OUT_SEED = 990_001
_GREY_SHARE = 0.05


def loss_of(
    model: Autoencoder, clips_BTCHW: torch.Tensor, divergence: float, noise: float
) -> dict[str, torch.Tensor]:
    """Return the loss terms for one batch. `total` is minimised."""
    mean, log_variance = model.moments(clips_BTCHW)
    deviation = (0.5 * log_variance).exp()
    extra = noise * torch.rand(len(mean), 1, 1, 1, 1, device=mean.device)
    latents = mean + torch.sqrt(deviation.square() + extra.square()) * torch.randn_like(mean)
    errors = measure.image_errors(model.decode(latents), clips_BTCHW)
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return {**errors, "kl": kl, "total": measure.image_loss(errors) + divergence * kl}


@torch.no_grad()
def evaluate(model: Autoencoder, clips: torch.Tensor) -> dict[str, float]:
    """Return the PSNR and sharpness of held-out clips and the spread of their latents."""
    rows = []
    for part in clips.split(16):
        mean, _ = model.moments(part)
        made = (model.decode(mean).clamp(-1, 1) + 1) / 2
        truth = (part + 1) / 2
        rows.append(
            (
                likeness.psnr(made, truth),
                likeness.sharpness(made, truth),
                mean.square().flatten(1).mean(dim=1),
            )
        )
    db, sharp, power = (torch.cat(column).mean() for column in zip(*rows, strict=True))
    return {"psnr": float(db), "sharpness": float(sharp), "latent_power": float(power)}


@torch.no_grad()
def normalised(model: Autoencoder, clips: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the model's state dict, modified so that latents have zero mean and unit standard
    deviation on `clips`.

    The standard deviation includes the posterior's, so channels that carry no information remain
    near zero instead of being amplified.
    """
    moments = [model.moments(part) for part in clips.split(16)]
    mean, log_variance = (torch.cat(column) for column in zip(*moments, strict=True))
    others = (0, 1, 3, 4)
    centre = mean.mean(others)
    scale = (mean.var(others) + log_variance.exp().mean(others)).sqrt()
    return with_latents_scaled(model.state_dict(), centre, scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=7.0, help="wall time of this piece, everything included"
    )
    parser.add_argument("--steps", type=int, help="stop after so many steps (tests)")
    parser.add_argument("--resume", type=Path, help="a folder with vae_state.pt")
    parser.add_argument("--batch", type=int, default=16, help="clips a process and step")
    parser.add_argument("--frames", type=int, default=9)
    parser.add_argument("--width", type=int, default=BASE_WIDTH)
    parser.add_argument("--divergence", type=float, default=1e-3, help="weight of the KL term")
    parser.add_argument(
        "--noise", type=float, default=0.25, help="largest extra deviation of the latents decoded"
    )
    parser.add_argument("--footage-seconds", type=float, default=25.0)
    parser.add_argument("--footage-clips", type=int, default=6000)
    parser.add_argument("--muon-lr", type=float, default=2e-3)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
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

    renderer = Renderer(ranks.device, *args.size)
    latents = max(5, (args.frames + 3) // 4)
    footage = Footage(
        renderer,
        latents,
        args.seed * 1000 + 500 * ranks.rank,
        seconds=args.footage_seconds,
        largest=args.footage_clips,
        at_once=256 if cuda else 3,
    )
    held = Footage(renderer, latents, _HELD_OUT_SEED, seconds=0, at_once=96 if cuda else 3)
    held_clips = pixels(held.clips if cuda else held.clips[:, : args.frames])

    model = Autoencoder(args.width).to(ranks.device)
    if args.resume:
        state = torch.load(
            args.resume / "vae_state.pt", map_location=ranks.device, weights_only=True
        )
        model.load_state_dict(state["model"])
    ranks.share(model)
    optimizer = build_optimizer(model, args.muon_lr, args.adam_lr)
    ema = Ema(model, 0.999)
    step = 0
    if args.resume:
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    torch.manual_seed(args.seed + 17 + ranks.rank)

    def forward(clips: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.autocast(ranks.device.type, torch.bfloat16, enabled=cuda):
            return loss_of(model, clips, args.divergence, args.noise)

    run = torch.compile(forward, dynamic=False) if cuda else forward
    curve = (args.out / "vae_curve.jsonl").open("a") if ranks.leads else None

    def report(terms: dict[str, torch.Tensor], **more: float) -> None:
        row = {"step": step, "seconds": round(clock.elapsed(), 1)}
        row |= {name: round(float(value.detach()), 5) for name, value in terms.items()} | more
        print(json.dumps(row), flush=True)
        if curve is not None:
            curve.write(json.dumps(row) + "\n")
            curve.flush()

    if ranks.leads:
        print(
            f"{len(footage)} clips after {clock.elapsed():.0f} s,",
            f"{sum(p.numel() for p in model.parameters())} parameters",
            flush=True,
        )
    next_report, first_step, steps_then, seconds_then = 20.0, step, step, clock.elapsed()
    progress = 0.0
    while True:
        if (step - first_step) % 20 == 0:
            (progress,) = ranks.agree([clock.fraction()])
        if progress >= 0.97 or (args.steps is not None and step - first_step >= args.steps):
            break
        clips = footage.sample(args.batch, args.frames)
        grey = torch.rand(args.batch, 1, 1, 1, 1, device=ranks.device) < _GREY_SHARE
        clips = torch.cat((clips[:, :1], clips[:, 1:] * ~grey), dim=1)
        terms = run(clips)
        optimizer.zero_grad(set_to_none=True)
        terms["total"].backward()
        ranks.average_gradients(optimizer.parameters)
        optimizer.clip(1.0)
        optimizer.step(learning_rate(progress, warmup=0.02, decay_from=0.35, last=0.02))
        ema.update()
        step += 1
        if ranks.leads and step % 20 == 0 and clock.elapsed() > next_report:
            rate = (step - steps_then) / (clock.elapsed() - seconds_then)
            report(terms, steps_per_second=round(rate, 2))
            next_report = clock.elapsed() + 20
            steps_then, seconds_then = step, clock.elapsed()
    if ranks.leads:
        with ema.applied():
            score = evaluate(model, held_clips)
        report(terms, **{name: round(value, 4) for name, value in score.items()})
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(torch.bfloat16),
            "step": step,
        }
        torch.save(state, args.out / "vae_state.pt")
        with ema.applied():
            torch.save(normalised(model, held_clips), args.out / "vae.pt")
    ranks.destroy_group()


if __name__ == "__main__":
    main()
