# SPDX-License-Identifier: Apache-2.0
"""Write the transformer's training data: walks as latents, conditions and camera commands.

    torchrun --nproc-per-node 2 -m training.tiny_world.clips --vae vae.pt --out DIR --seconds 90

Each process writes `clips-R.pt`, and the first one also writes `clips-held.pt`. `world_data.Shard`
reads these files. A quarter of the walks are rendered in two styles, so the prompt can change
during a clip.
"""

import argparse
import time
from dataclasses import fields
from pathlib import Path

import torch

from training.tiny_world.autoencoder import Autoencoder, load_autoencoder
from training.tiny_world.footage import pixels, render_video
from training.tiny_world.ranks import Clock, Ranks
from training.tiny_world.render import FOCAL, Renderer
from training.tiny_world.village import STYLES
from training.tiny_world.walks import Walks, random_walks

LATENTS = 21
"""Default number of latent frames per clip: the window length plus the number of sink frames."""
CONDITION_LATENTS = 6
"""Number of latent frames stored for the condition [image, grey, grey, ...]. All later frames equal
the last stored frame.
"""
_HELD_OUT_SEED = 880_001

Shard = dict[str, torch.Tensor]


class Encoder:
    """Encodes pixels to fp16 latents with the trained encoder."""

    def __init__(self, model: Autoencoder) -> None:
        self.model = model
        self.run = (
            torch.compile(self._run, dynamic=False)
            if next(model.parameters()).is_cuda
            else self._run
        )

    @torch.no_grad()
    def __call__(self, clips_BTCHW: torch.Tensor, at_once: int = 16) -> torch.Tensor:
        out = []
        for part in clips_BTCHW.split(at_once):
            padded = (
                part
                if len(part) == at_once
                else torch.cat((part, part[-1:].expand(at_once - len(part), *part.shape[1:])))
            )
            out.append(self.run(padded)[: len(part)].half())
        return torch.cat(out)

    def _run(self, clips_BTCHW: torch.Tensor) -> torch.Tensor:
        with torch.autocast(clips_BTCHW.device.type, torch.bfloat16, enabled=clips_BTCHW.is_cuda):
            return self.model.moments(clips_BTCHW)[0]


def encode_walks(
    walks: Walks, style_N: torch.Tensor, renderer: Renderer, encoder: Encoder, *, at_once: int
) -> Shard:
    """Render and encode walks, and return tensors on the renderer's device."""
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(walks), at_once):
        clips = render_video(
            renderer, walks.part(start, start + at_once), style_N[start : start + at_once]
        )
        latents = torch.cat([encoder(pixels(part), at_once) for part in clips.split(at_once)])
        still = pixels(clips[:, :1])
        grey = still.new_zeros(len(still), 4 * (CONDITION_LATENTS - 1), *still.shape[2:])
        parts.append((latents, encoder(torch.cat((still, grey), dim=1), at_once)))
    latents, condition = (torch.cat(column) for column in zip(*parts, strict=True))
    device = latents.device
    return {
        "latents": latents,
        "condition": condition,
        "relative": walks.relative.to(device),
        "positions": walks.positions.to(device),
        "angles": torch.stack((walks.yaw, walks.pitch), dim=-1).to(device),
        "style": style_N.to(device, torch.uint8),
        "keys": walks.keys.to(device),
    }


def make_clips(
    number: int,
    seed: int,
    renderer: Renderer,
    encoder: Encoder,
    *,
    latents: int = LATENTS,
    at_once: int = 16,
    paired: float = 0.25,
) -> Shard:
    """Return one batch of the data set: `number` walks of `latents` latent frames each. For the
    fraction `paired` of these walks, the batch also contains the same walk in a second style.
    """
    generator = torch.Generator().manual_seed(seed)
    walks = random_walks(number, latents, seed)
    style = torch.randint(len(STYLES), (number,), generator=generator)
    pairs = int(number * paired)
    twins = walks.part(0, pairs)
    both = Walks(
        *(torch.cat((getattr(walks, f.name), getattr(twins, f.name))) for f in fields(Walks))
    )
    other = (style[:pairs] + torch.randint(1, len(STYLES), (pairs,), generator=generator)) % len(
        STYLES
    )
    shard = encode_walks(both, torch.cat((style, other)), renderer, encoder, at_once=at_once)
    total, device = number + pairs, shard["latents"].device
    twin = torch.full((total,), -1)
    twin[:pairs], twin[number:] = torch.arange(number, total), torch.arange(pairs)
    focal = torch.full((total,), FOCAL * renderer.width)
    return shard | {"twin": twin.to(device), "focal": focal.to(device)}


def joined(shards: list[Shard]) -> Shard:
    """Concatenate shards and adjust the indices of twins (the same walk in a second style)."""
    start, twins = 0, []
    for shard in shards:
        twins.append(torch.where(shard["twin"] >= 0, shard["twin"] + start, -1))
        start += len(shard["twin"])
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]} | {
        "twin": torch.cat(twins)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="wall time of rendering and encoding"
    )
    parser.add_argument("--largest", type=int, default=24_000, help="clips a process")
    parser.add_argument(
        "--latents", type=int, default=LATENTS, help="latent frames of a clip, a multiple of 3"
    )
    parser.add_argument("--held", type=int, default=96, help="held-out clips")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device")
    parser.add_argument("--size", type=int, nargs=2, default=(96, 160), metavar=("HEIGHT", "WIDTH"))
    args = parser.parse_args()

    ranks = Ranks.join(args.device)
    torch.set_float32_matmul_precision("high")
    encoder = Encoder(load_autoencoder(args.vae, ranks.device))
    renderer = Renderer(ranks.device, *args.size)
    args.out.mkdir(parents=True, exist_ok=True)
    if ranks.leads:
        held = make_clips(
            args.held, _HELD_OUT_SEED, renderer, encoder, latents=args.latents, at_once=args.at_once
        )
        torch.save(held, args.out / "clips-held.pt")
    clock, count = Clock(args.seconds / 60), 0
    shards: list[Shard] = []
    number = args.at_once * (16 if ranks.device.type == "cuda" else 1)
    while not shards or (clock.fraction() < 1 and count < args.largest):
        seed = args.seed * 1_000_003 + 10_007 * ranks.rank + len(shards)
        shards.append(
            make_clips(number, seed, renderer, encoder, latents=args.latents, at_once=args.at_once)
        )
        count += len(shards[-1]["twin"])
    started = time.monotonic()
    torch.save(joined(shards), args.out / f"clips-{ranks.rank}.pt")
    print(
        f"rank {ranks.rank}: {count} clips in {clock.elapsed():.0f} s, saved in "
        f"{time.monotonic() - started:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
