# SPDX-License-Identifier: Apache-2.0
"""Recognise whether a frame shows the village in a given style.

Other frames show, for example, a mosaic, fog, a smear or another style.

    # minutes on a CPU; writes recognise.safetensors
    python -m training.tiny_world.recognise --train
    python -m training.tiny_world.recognise --calibrate   # its threshold alone
    # measures the shipped classifier on fresh renders
    python -m training.tiny_world.recognise --seed 2

The classifier is a small network on hand-made features of a frame at 48x80 pixels: colours in a
coarse grid, histograms of gradients at two scales, and the autocorrelation of gradients, which
reveals repeated edges. The classifier is trained on renders, on damaged renders, and on the frames
of `broken.webp`. The frames of `broken.webp` were chosen by eye from what the world without world
poses generated after 40 s or more of standing still or walking. The threshold is set on other
renders, so that 99.5 % of them are accepted. Renders contain only views without a wall or a tree at
arm's length (`open_views`). Tested by tests/training/tiny_world/test_recognise.py.
"""

# N frames, S styles, F features

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from training.tiny_world.render import Renderer
from training.tiny_world.village import STYLES
from training.tiny_world.walks import random_walks, village_grid
from vllm_omni.evaluation.likeness import unit

WEIGHTS = Path(__file__).with_name("recognise.safetensors")
BROKEN = Path(__file__).with_name("broken.webp")
"""Frames that do not show a village, at the size that the classifier reads. Each row shows a
session in the style `STYLES[row % 3]`.
"""
BROKEN_COLUMNS = 10
UNSEEN_ROWS = 11, 14
"""Rows of `broken.webp` that are not used for training, because they show another session."""
SIZE = 48, 80
"""Height and width to which frames are reduced, so that worlds of any size are measured in the same
way.
"""
ACCEPTED = 0.995
"""Share of the calibration renders that is accepted. For renders of any seed, at least 0.99 must be
accepted.
"""
_VIEW_LATENT = 40
"""Number of latent frames after which a render shows the view of a random walker."""
_LARGEST_PITCH = 0.6
_HIDDEN = 192
_JITTER = 0.2
"""Noise on the features in training, in units of their standard deviations."""
_SEEDS = {"train": 880_001, "calibrate": 880_002, "check": 880_003}


class Recogniser(nn.Module):
    """Classifier that decides whether frames show the village in a style.

    The result depends only on the frames: the classifier uses no randomness and runs in fp32 on the
    CPU.
    """

    mean: torch.Tensor
    deviation: torch.Tensor
    threshold: torch.Tensor

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_features))
        self.register_buffer("deviation", torch.ones(num_features))
        self.register_buffer("threshold", torch.zeros(()))
        self.layers = nn.Sequential(
            nn.Linear(num_features, _HIDDEN), nn.GELU(), nn.Linear(_HIDDEN, _HIDDEN), nn.GELU(),
            nn.Linear(_HIDDEN, len(STYLES) + 1),
        )  # fmt: skip

    def forward(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Return logits [N, S + 1] of the styles and of "no village"."""
        return self.layers((features_NF - self.mean) / self.deviation)

    @torch.no_grad()
    def margins(self, features_NF: torch.Tensor, style_N: torch.Tensor) -> torch.Tensor:
        """Return the log-odds [N] that a frame shows the village in its style."""
        logits = self(features_NF).log_softmax(dim=1)
        chosen = functional.one_hot(style_N.long(), len(STYLES) + 1).bool()
        return logits[chosen] - logits.masked_fill(chosen, -torch.inf).logsumexp(dim=1)

    def villages(self, frames_NHW3: torch.Tensor, style_N: torch.Tensor) -> torch.Tensor:
        """Return whether each uint8 frame [N, H, W, 3] shows the village in its style (index into
        `STYLES`), bool [N].
        """
        parts = zip(frames_NHW3.split(256), style_N.split(256), strict=True)
        found = [
            self.margins(features(reduced(frames)), styles) > self.threshold
            for frames, styles in parts
        ]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)


@cache
def shipped() -> Recogniser:
    """Load the shipped classifier from `recognise.safetensors`."""
    tensors = load_file(WEIGHTS)
    recogniser = Recogniser(len(tensors["mean"]))
    recogniser.load_state_dict(tensors)
    return recogniser.eval()


# -- features --------------------------------------------------------------------------------------


def reduced(frames_NHW3: torch.Tensor) -> torch.Tensor:
    """Reduce uint8 frames [N, H, W, 3] to fp32 [N, 3, 48, 80] in [0, 1], by averaging areas."""
    return functional.interpolate(unit(frames_NHW3.cpu()), SIZE, mode="area")


def features(frames_N3HW: torch.Tensor) -> torch.Tensor:
    """Return the features of reduced frames, [N, F]."""
    grey = frames_N3HW.mean(dim=1, keepdim=True)
    half = functional.avg_pool2d(grey, 2)
    cells = functional.avg_pool2d(frames_N3HW, 8)  # 6 x 10
    in_cells = (
        (functional.avg_pool2d(grey.square(), 8) - functional.avg_pool2d(grey, 8).square())
        .clamp(min=0)
        .sqrt()
    )
    saturation = frames_N3HW.amax(dim=1, keepdim=True) - frames_N3HW.amin(dim=1, keepdim=True)
    parts = [cells, in_cells, functional.avg_pool2d(saturation, 8)]
    for image in (grey, half):
        across, down = image.diff(dim=3), image.diff(dim=2)
        parts += [
            _histogram(across),
            _histogram(down),
            _autocorrelation(across),
            _autocorrelation(down),
        ]
        parts += [_autocorrelation(step.transpose(2, 3)) for step in (across, down)]
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _histogram(steps_N1HW: torch.Tensor) -> torch.Tensor:
    """Return the shares of gradients that are larger than each of eight thresholds, [N, 8]."""
    size = steps_N1HW.abs().flatten(1)
    return torch.stack([(size > 2.0**power / 256).float().mean(dim=1) for power in range(8)], dim=1)


def _autocorrelation(steps_N1HW: torch.Tensor) -> torch.Tensor:
    """Return the autocorrelation of the gradients along rows at lags 1 to 12, divided by their
    power, [N, 12].
    """
    power = steps_N1HW.square().flatten(1).mean(dim=1) + 1e-5
    lags = [steps_N1HW[..., lag:] * steps_N1HW[..., :-lag] for lag in range(1, 13)]
    return torch.stack([product.flatten(1).mean(dim=1) / power for product in lags], dim=1)


# -- frames ----------------------------------------------------------------------------------------


def renders(
    walkers: int, seed: int, size: tuple[int, int], *, compiled: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Render the views of random walkers, uint8 [N, H, W, 3], and return them with their styles,
    which alternate. Only open views are included.
    """
    renderer = Renderer("cpu", *size, compiled=compiled, frames_per_call=8 if compiled else 2)
    walks = random_walks(walkers, _VIEW_LATENT + 1, seed)
    position, yaw, pitch = walks.positions[:, -1], walks.yaw[:, -1], walks.pitch[:, -1]
    style = torch.arange(walkers) % len(STYLES)
    seen = open_views(position, yaw, pitch)
    return renderer.render(position[seen], yaw[seen], pitch[seen], style[seen]), style[seen]


def open_views(
    position_N2: torch.Tensor, yaw_N: torch.Tensor, pitch_N: torch.Tensor
) -> torch.Tensor:
    """Return whether the view is open, bool [N]: there is no obstacle within a metre ahead, and the
    camera does not look far up or down.

    A wall or a tree that fills the view looks like fog in every style, so neither a person nor a
    classifier could recognise it.
    """
    ahead_N2 = torch.stack((yaw_N.sin(), yaw_N.cos()), dim=1)
    probes = torch.stack([(position_N2 + metres * ahead_N2).double() for metres in (0.5, 1.0)])
    blocked = village_grid().blocked(probes).any(dim=0)
    return ~blocked & (pitch_N.abs() < _LARGEST_PITCH)


def broken_frames() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the frames of `broken.webp`, uint8 [N, 48, 80, 3], their styles [N], and whether they
    are used for training, bool [N].
    """
    import numpy as np

    with Image.open(BROKEN) as image:
        sheet = torch.from_numpy(np.array(image.convert("RGB")))
    rows = len(sheet) // SIZE[0]
    frames = sheet.view(rows, SIZE[0], BROKEN_COLUMNS, SIZE[1], 3).transpose(1, 2).flatten(0, 1)
    row = torch.arange(rows).repeat_interleave(BROKEN_COLUMNS)
    return frames, row % len(STYLES), ~torch.isin(row, torch.tensor(UNSEEN_ROWS))


def slightly_off(frames_N3HW: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return frames with the small defects of a good world: slightly blurred and noisy, and with
    small errors in level and contrast.
    """
    number = len(frames_N3HW)
    soft = _blurred(frames_N3HW, 0.9)
    out = torch.lerp(frames_N3HW, soft, _uniform(number, 0.0, 1.0, generator))
    middle = out.mean(dim=(1, 2, 3), keepdim=True)
    out = middle + (out - middle) * _uniform(number, 0.85, 1.12, generator)
    tint = (torch.rand(number, 3, 1, 1, generator=generator) - 0.5) * 0.08
    noise = _noise(frames_N3HW.shape, 1, generator) * _uniform(number, 0.0, 0.02, generator)
    patches = _noise(frames_N3HW.shape, 8, generator) * _uniform(number, 0.0, 0.03, generator)
    return (out + tint + noise + patches).clamp(0, 1)


Damage = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def _blur(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    sigmas = (1.5, 2.0, 3.0, 4.5, 7.0)
    blurred = torch.stack([_blurred(frames, sigma) for sigma in sigmas])
    chosen = torch.randint(len(sigmas), (len(frames),), generator=generator)
    return blurred[chosen, torch.arange(len(frames))]


def _fog(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    number = len(frames)
    own = frames.mean(dim=(2, 3), keepdim=True)
    grey = torch.rand(number, 1, 1, 1, generator=generator).expand(-1, 3, -1, -1)
    any_colour = torch.rand(number, 3, 1, 1, generator=generator)
    kind = torch.randint(3, (number, 1, 1, 1), generator=generator)
    colour = torch.where(kind == 0, own, torch.where(kind == 1, grey, any_colour))
    return torch.lerp(frames, colour.expand_as(frames), _uniform(number, 0.6, 1.0, generator))


def _melted(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Blur frames, reduce their contrast and darken them, all at the same time."""
    soft = _blur(frames, generator)
    flat = torch.lerp(
        soft, soft.mean(dim=(2, 3), keepdim=True), _uniform(len(frames), 0.0, 0.8, generator)
    )
    return flat * _uniform(len(frames), 0.2, 1.0, generator)


def _dark(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return frames * _uniform(len(frames), 0.0, 0.3, generator)


def _noisy(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    cell = (1, 2, 4, 8, 16)[int(torch.randint(5, (1,), generator=generator))]
    own = frames.mean(dim=(2, 3), keepdim=True)
    base = torch.lerp(
        frames, own.expand_as(frames), _uniform(len(frames), 0.0, 1.0, generator).round()
    )
    return (
        base + _noise(frames.shape, cell, generator) * _uniform(len(frames), 0.15, 0.4, generator)
    ).clamp(0, 1)


def _mosaic(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rearrange the tiles of a frame, with some tiles repeated, or fill the frame with a single
    tile.
    """
    side = (4, 8, 16)[int(torch.randint(3, (1,), generator=generator))]
    number, _, height, width = frames.shape
    tiles = functional.unfold(frames, side, stride=side)  # [N, 3 side^2, tiles]
    count = tiles.shape[2]
    few = int(torch.randint(1, count + 1, (1,), generator=generator))
    order = torch.randint(count, (number, count), generator=generator)
    order = torch.gather(order, 1, torch.randint(few, (number, count), generator=generator))
    mixed = torch.gather(tiles, 2, order[:, None].expand_as(tiles))
    return functional.fold(mixed, (height, width), side, stride=side)


def _repeated(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Repeat a part of the width (or height) of a frame, which gives rows of posts and windows."""
    part = (4, 8, 16)[int(torch.randint(3, (1,), generator=generator))]
    along = 3 if float(torch.rand(1, generator=generator)) < 0.6 else 2
    length = frames.shape[along]
    start = int(torch.randint(length - part + 1, (1,), generator=generator))
    return frames.index_select(along, start + torch.arange(length) % part)


def _smear(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Stretch a few columns (or rows) of a frame over the whole frame."""
    part = (2, 4, 8, 16)[int(torch.randint(4, (1,), generator=generator))]
    along = 3 if float(torch.rand(1, generator=generator)) < 0.5 else 2
    length = frames.shape[along]
    part = min(part, length // 6)
    narrow = frames.narrow(
        along, int(torch.randint(length - part + 1, (1,), generator=generator)), part
    )
    return functional.interpolate(narrow, frames.shape[2:], mode="bilinear", align_corners=False)


def _ghosts(frames: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Blend several views, which looks like a mean over positions."""
    shifts = torch.randint(1, max(2, len(frames)), (3,), generator=generator).tolist()
    return torch.stack([frames, *(frames.roll(shift, dims=0) for shift in shifts)]).mean(dim=0)


DAMAGES: dict[str, Damage] = {
    "blur": _blur,
    "fog": _fog,
    "melted": _melted,
    "dark": _dark,
    "noise": _noisy,
    "mosaic": _mosaic,
    "repeated": _repeated,
    "smear": _smear,
    "ghosts": _ghosts,
}
"""Ways to damage a render so that it no longer shows a village."""
_HARDER = "mosaic", "noise", "melted"
"""Damages that occur more often in training."""


def damaged(
    frames_N3HW: torch.Tensor, generator: torch.Generator, names: Sequence[str] = tuple(DAMAGES)
) -> tuple[torch.Tensor, torch.Tensor]:
    """Damage reduced frames in each of the named ways. Return the frames that are clearly damaged,
    and their indices.

    A frame that hardly changes, for example a blurred wall that fills the view, still shows the
    village and is left out.
    """
    out, retained = [], []
    for first in range(len(names)):
        indices = torch.arange(first, len(frames_N3HW), len(names))
        for part in indices.split(32):
            made = DAMAGES[names[first]](frames_N3HW[part], generator)
            clearly = (made - frames_N3HW[part]).square().mean(dim=(1, 2, 3)) > 0.01  # 20 dB
            out.append(made[clearly])
            retained.append(part[clearly])
    return torch.cat(out), torch.cat(retained)


def _uniform(number: int, low: float, high: float, generator: torch.Generator) -> torch.Tensor:
    return low + (high - low) * torch.rand(number, 1, 1, 1, generator=generator)


def _noise(shape: torch.Size, cell: int, generator: torch.Generator) -> torch.Tensor:
    """Return normal noise with grains that are `cell` pixels wide."""
    number, channels, height, width = shape
    small = torch.randn(
        number, channels, -(-height // cell), -(-width // cell), generator=generator
    )
    return functional.interpolate(small, (height, width), mode="bilinear", align_corners=False)


def _blurred(frames_N3HW: torch.Tensor, sigma: float) -> torch.Tensor:
    radius = max(1, round(3 * sigma))
    taps = torch.exp(-torch.arange(-radius, radius + 1).float().square() / (2 * sigma**2))
    taps = (taps / taps.sum()).expand(3, 1, 1, -1)
    padded = functional.pad(frames_N3HW, (radius,) * 4, mode="replicate")
    rows = functional.conv2d(padded, taps, groups=3)
    return functional.conv2d(rows, taps.mT.contiguous(), groups=3)


# -- training --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examples:
    """Training examples: features [N, F] and labels [N], each of which is a style or "no village"
    (the number of styles).
    """

    features: torch.Tensor
    shown: torch.Tensor


def examples(
    frames_NHW3: torch.Tensor,
    style_N: torch.Tensor,
    broken_NHW3: torch.Tensor,
    generator: torch.Generator,
) -> Examples:
    """Return unchanged and slightly defective renders, damaged renders and broken frames, each also
    mirrored.
    """
    order = style_N.argsort(stable=True)  # ghosts blend frames of one style
    good, style_N = reduced(frames_NHW3)[order], style_N[order]
    no_village = len(STYLES)
    parts, shown = [], []

    def add(images: torch.Tensor, what: torch.Tensor | int) -> None:
        parts.append(_features_by_part(images))
        shown.append(torch.full((len(images),), what) if isinstance(what, int) else what)

    for source in (good, good.flip(3)):
        add(source, style_N)
        add(slightly_off(source, generator), style_N)
        for _ in range(2):
            shuffled = source[torch.randperm(len(source), generator=generator)]
            add(damaged(shuffled, generator, (*DAMAGES, *_HARDER))[0], no_village)
        add(damaged(source, generator, ("ghosts",))[0], no_village)
    for source in (reduced(broken_NHW3), reduced(broken_NHW3).flip(3)):
        add(source, no_village)
        for _ in range(9 if len(source) else 0):
            add(slightly_off(source, generator), no_village)
    return Examples(torch.cat(parts), torch.cat(shown))


def trained(data: Examples, *, steps: int, seed: int) -> Recogniser:
    """Train the classifier on equal numbers of villages and other frames. The threshold of the
    classifier remains 0.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        recogniser = Recogniser(data.features.shape[1])
    recogniser.mean.copy_(data.features.mean(dim=0))
    recogniser.deviation.copy_(data.features.std(dim=0) + 0.01)
    optimizer = torch.optim.AdamW(recogniser.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    village = data.shown < len(STYLES)
    groups = [group.nonzero()[:, 0] for group in (village, ~village)]
    for _ in range(steps):
        chosen = torch.cat(
            [group[torch.randint(len(group), (512,), generator=generator)] for group in groups]
        )
        inputs = data.features[chosen]
        inputs = inputs + _JITTER * recogniser.deviation * torch.randn(
            inputs.shape, generator=generator
        )
        loss = functional.cross_entropy(
            recogniser(inputs), data.shown[chosen], label_smoothing=0.01
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return recogniser.eval()


def calibrate(recogniser: Recogniser, frames_NHW3: torch.Tensor, style_N: torch.Tensor) -> None:
    """Set the threshold of the classifier so that the share `ACCEPTED` of the given renders is
    accepted.
    """
    margins = recogniser.margins(_features_by_part(reduced(frames_NHW3)), style_N)
    recogniser.threshold.copy_(margins.quantile(1 - ACCEPTED))


def checked(
    recogniser: Recogniser, frames_NHW3: torch.Tensor, style_N: torch.Tensor, seed: int
) -> dict[str, Any]:
    """Return the accepted share of renders, and of each kind of frame that does not show the
    village in the requested style.
    """
    generator = torch.Generator().manual_seed(seed)
    good = reduced(frames_NHW3)

    def share(images: torch.Tensor, styles: torch.Tensor) -> float:
        margins = recogniser.margins(_features_by_part(images), styles)
        return round(float((margins > recogniser.threshold).float().mean()), 4)

    out: dict[str, Any] = {
        "renders": share(good, style_N),
        "slightly_off": share(slightly_off(good, generator), style_N),
    }
    out["other_style"] = [share(good, (style_N + shift) % len(STYLES)) for shift in (1, 2)]
    for name in DAMAGES:
        bad, which = damaged(good, generator, [name])
        out[name] = share(bad, style_N[which])
    frames, styles, seen = broken_frames()
    out["broken_seen"] = share(reduced(frames[seen]), styles[seen])
    out["broken_unseen"] = share(reduced(frames[~seen]), styles[~seen])
    return out


def _features_by_part(frames_N3HW: torch.Tensor) -> torch.Tensor:
    return torch.cat([features(part) for part in frames_N3HW.split(256)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--train", action="store_true", help="train, calibrate and write the classifier first"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="set the threshold of the shipped one first"
    )
    parser.add_argument(
        "--renders", type=int, default=14_000, help="walkers whose views it is trained on"
    )
    parser.add_argument(
        "--calibration", type=int, default=5400, help="walkers whose views decide the threshold"
    )
    parser.add_argument(
        "--check", type=int, default=1000, help="walkers whose views it is measured on"
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    size = 96, 160
    if args.train:
        generator = torch.Generator().manual_seed(args.seed)
        frames, _, seen = broken_frames()
        data = examples(
            *renders(args.renders, _SEEDS["train"], SIZE, compiled=True), frames[seen], generator
        )
        save_file(trained(data, steps=args.steps, seed=args.seed).state_dict(), WEIGHTS)
    if args.train or args.calibrate:
        recogniser = shipped()
        calibrate(recogniser, *renders(args.calibration, _SEEDS["calibrate"], size, compiled=True))
        save_file(recogniser.state_dict(), WEIGHTS)
    fresh = renders(args.check, _SEEDS["check"] + args.seed, size, compiled=True)
    print(json.dumps(checked(shipped(), *fresh, args.seed)))


if __name__ == "__main__":
    main()
