# SPDX-License-Identifier: Apache-2.0
"""An implementation of Wan 2.1's video autoencoder for whole clips. It is fast to train and uses
the original code's parameter names.

The frames of all clips form one batch of images. A causal convolution over time is a 2-D
convolution over three frames concatenated along the channel axis. As in the original, the first
latent frame skips the convolutions that change the frame rate, and in the decoder, these
convolutions see zeros before the second latent frame. The results equal those of the streaming
autoencoder in the serving package. Tested by tests/training/tiny_world/test_autoencoder.py.
"""

# B clips, T frames, C channels, H, W pixels, h, w latent positions

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

LATENT_CHANNELS = 16
BASE_WIDTH = 12
_MULTIPLES = (1, 2, 4, 4)
_BLOCKS = 2
_DOWN_IN_TIME = (False, True, True)


class Frames:
    """Images of `clips` clips, ordered by clip and then by time. Shape: [B T, C, H, W]."""

    def __init__(self, pixels: torch.Tensor, clips: int) -> None:
        self.pixels, self.clips = pixels, clips

    @property
    def length(self) -> int:
        return len(self.pixels) // self.clips

    def split(self) -> torch.Tensor:
        return self.pixels.view(self.clips, self.length, *self.pixels.shape[1:])

    def like(self, pixels: torch.Tensor) -> "Frames":
        return Frames(pixels, self.clips)


def _merge(clips_BTCHW: torch.Tensor) -> torch.Tensor:
    return clips_BTCHW.flatten(0, 1)


class CausalConv3d(nn.Module):
    """A convolution over a frame and its two predecessors (temporal kernel size 3) or over single
    frames (temporal kernel size 1).
    """

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int, int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *kernel))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=1 / math.sqrt(inputs * math.prod(kernel)))

    def forward(self, x: Frames) -> Frames:
        taps = self.weight.shape[2]
        if taps == 1:
            return x.like(
                functional.conv2d(
                    x.pixels, self.weight[:, :, 0], self.bias, padding=self.weight.shape[3] // 2
                )
            )
        clips = x.split()
        history = torch.cat((clips.new_zeros(x.clips, taps - 1, *clips.shape[2:]), clips), dim=1)
        return x.like(self._convolve([history[:, tap : tap + x.length] for tap in range(taps)]))

    def every_second(self, x: Frames) -> Frames:
        """Return frames 2, 4, ... of the result, without padding."""
        clips = x.split()
        count = (x.length - 1) // 2
        return x.like(self._convolve([clips[:, tap : tap + 2 * count - 1 : 2] for tap in range(3)]))

    def _convolve(self, taps_BTCHW: list[torch.Tensor]) -> torch.Tensor:
        stacked = _merge(torch.cat(taps_BTCHW, dim=2))
        return functional.conv2d(
            stacked,
            self.weight.transpose(1, 2).flatten(1, 2),
            self.bias,
            padding=self.weight.shape[3] // 2,
        )


class RMSNorm(nn.Module):
    def __init__(self, channels: int, *, video: bool = True) -> None:
        super().__init__()
        self.gamma = nn.Parameter(
            torch.ones(channels, 1, 1, 1) if video else torch.ones(channels, 1, 1)
        )

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        wide = pixels.float()
        scale = wide.square().sum(dim=1, keepdim=True).clamp(min=1e-24).rsqrt() * math.sqrt(
            pixels.shape[1]
        )
        return (wide * scale * self.gamma.view(1, -1, 1, 1)).to(pixels.dtype)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        first, last = (
            CausalConv3d(inputs, outputs, (3, 3, 3)),
            CausalConv3d(outputs, outputs, (3, 3, 3)),
        )
        self.residual = nn.ModuleDict(
            {"0": RMSNorm(inputs), "2": first, "3": RMSNorm(outputs), "6": last}
        )
        nn.init.zeros_(last.weight)
        self.shortcut = CausalConv3d(inputs, outputs, (1, 1, 1)) if inputs != outputs else None

    def forward(self, x: Frames) -> Frames:
        hidden = self.residual["2"](x.like(functional.silu(self.residual["0"](x.pixels))))
        hidden = self.residual["6"](x.like(functional.silu(self.residual["3"](hidden.pixels))))
        direct = x if self.shortcut is None else self.shortcut(x)
        return x.like(direct.pixels + hidden.pixels)


class Attention(nn.Module):
    """Self-attention over the spatial positions in each frame."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, video=False)
        self.to_qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.proj = nn.Conv2d(channels, channels, 1)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Frames) -> Frames:
        height, width = x.pixels.shape[2:]
        q, k, v = self.to_qkv(self.norm(x.pixels)).flatten(2).mT.unsqueeze(1).chunk(3, dim=-1)
        mixed = functional.scaled_dot_product_attention(q, k, v)[:, 0].mT.unflatten(
            2, (height, width)
        )
        return x.like(x.pixels + self.proj(mixed))


class Resample(nn.Module):
    """Halve or double the frame height and width and, with `in_time`, the frame rate."""

    def __init__(self, channels: int, *, down: bool, in_time: bool) -> None:
        super().__init__()
        self.down = down
        conv = nn.Conv2d(
            channels,
            channels if down else channels // 2,
            3,
            stride=2 if down else 1,
            padding=0 if down else 1,
        )
        self.resample = nn.ModuleDict({"1": conv})
        self.time_conv = (
            CausalConv3d(channels, channels * (1 if down else 2), (3, 1, 1)) if in_time else None
        )

    def forward(self, x: Frames) -> Frames:
        if self.down:
            x = x.like(self.resample["1"](functional.pad(x.pixels, (0, 1, 0, 1))))
            if self.time_conv is not None and x.length > 1:
                later = self.time_conv.every_second(x).split()
                x = Frames(_merge(torch.cat((x.split()[:, :1], later), dim=1)), x.clips)
            return x
        if self.time_conv is not None and x.length > 1:
            clips = x.split()
            grown = self.time_conv(Frames(_merge(clips[:, 1:]), x.clips)).split()
            channels = clips.shape[2]
            pairs = torch.stack((grown[:, :, :channels], grown[:, :, channels:]), dim=2).flatten(
                1, 2
            )
            x = Frames(_merge(torch.cat((clips[:, :1], pairs), dim=1)), x.clips)
        return x.like(
            self.resample["1"](
                functional.interpolate(x.pixels, scale_factor=2.0, mode="nearest-exact")
            )
        )


class Encoder(nn.Module):
    def __init__(self, width: int = BASE_WIDTH) -> None:
        super().__init__()
        widths = [width * multiple for multiple in (1, *_MULTIPLES)]
        self.conv1 = CausalConv3d(3, widths[0], (3, 3, 3))
        layers: list[nn.Module] = []
        for level, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            for block in range(_BLOCKS):
                layers.append(ResidualBlock(inputs if block == 0 else outputs, outputs))
            if level < len(_DOWN_IN_TIME):
                layers.append(Resample(outputs, down=True, in_time=_DOWN_IN_TIME[level]))
        self.downsamples = nn.Sequential(*layers)
        self.middle = nn.Sequential(
            ResidualBlock(widths[-1], widths[-1]),
            Attention(widths[-1]),
            ResidualBlock(widths[-1], widths[-1]),
        )
        self.head = nn.ModuleDict(
            {
                "0": RMSNorm(widths[-1]),
                "2": CausalConv3d(widths[-1], 2 * LATENT_CHANNELS, (3, 3, 3)),
            }
        )

    def forward(self, x: Frames) -> Frames:
        x = self.middle(self.downsamples(self.conv1(x)))
        return self.head["2"](x.like(functional.silu(self.head["0"](x.pixels))))


class Decoder(nn.Module):
    def __init__(self, width: int = BASE_WIDTH) -> None:
        super().__init__()
        widths = [width * multiple for multiple in (_MULTIPLES[-1], *reversed(_MULTIPLES))]
        self.conv1 = CausalConv3d(LATENT_CHANNELS, widths[0], (3, 3, 3))
        self.middle = nn.Sequential(
            ResidualBlock(widths[0], widths[0]),
            Attention(widths[0]),
            ResidualBlock(widths[0], widths[0]),
        )
        layers: list[nn.Module] = []
        for level, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            inputs = inputs if level == 0 else inputs // 2
            for block in range(_BLOCKS + 1):
                layers.append(ResidualBlock(inputs if block == 0 else outputs, outputs))
            if level < len(_DOWN_IN_TIME):
                layers.append(Resample(outputs, down=False, in_time=_DOWN_IN_TIME[-1 - level]))
        self.upsamples = nn.Sequential(*layers)
        self.head = nn.ModuleDict(
            {"0": RMSNorm(widths[-1]), "2": CausalConv3d(widths[-1], 3, (3, 3, 3))}
        )

    def forward(self, x: Frames) -> Frames:
        x = self.upsamples(self.middle(self.conv1(x)))
        return self.head["2"](x.like(functional.silu(self.head["0"](x.pixels))))


class Autoencoder(nn.Module):
    """Encodes pixels to latents, and decodes latents to pixels.

    Pixels are [B, T, 3, H, W] in [-1, 1], where T = 1 + 4 n. Latents are [B, 1 + n, 16, H/8, W/8].

    The latents are normalised as the transformer expects. `export.py` folds Wan's fixed
    normalisation into `conv1` and `conv2`.
    """

    def __init__(self, width: int = BASE_WIDTH) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(width), Decoder(width)
        self.conv1 = CausalConv3d(2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS, (1, 1, 1))
        self.conv2 = CausalConv3d(LATENT_CHANNELS, LATENT_CHANNELS, (1, 1, 1))

    def moments(self, pixels_BTCHW: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the posterior's mean and log-variance, each fp32 [B, 1 + n, 16, h, w]."""
        clips = len(pixels_BTCHW)
        encoded = self.conv1(self.encoder(Frames(_merge(pixels_BTCHW), clips))).split().float()
        mean, log_variance = encoded.chunk(2, dim=2)
        return mean, log_variance.clamp(-12.0, 4.0)

    def decode(self, latents_BTCHW: torch.Tensor) -> torch.Tensor:
        """Decode latents to pixels without clamping the pixels. Shape: fp32
        [B, 1 + 4 n, 3, H, W].
        """
        clips = len(latents_BTCHW)
        return self.decoder(self.conv2(Frames(_merge(latents_BTCHW), clips))).split().float()


def with_latents_scaled(
    state: dict[str, torch.Tensor], centre_C: torch.Tensor, scale_C: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return a state dict of the same autoencoder whose latents are (z - centre) / scale. Only the
    pointwise convolutions, `conv1` and `conv2`, change.
    """
    out = {name: value.clone() for name, value in state.items()}
    own = slice(0, LATENT_CHANNELS)
    out["conv1.weight"][own] /= scale_C.view(-1, 1, 1, 1, 1)
    out["conv1.bias"][own] = (out["conv1.bias"][own] - centre_C) / scale_C
    out["conv2.bias"] += torch.einsum("oi,i->o", out["conv2.weight"].flatten(1), centre_C)
    out["conv2.weight"] *= scale_C.view(1, -1, 1, 1, 1)
    return out


def load_autoencoder(path: Path, device: torch.device | str) -> Autoencoder:
    """Load the trained autoencoder from a `vae.pt` file, with frozen parameters."""
    weights = torch.load(path, map_location="cpu", weights_only=True)
    model = Autoencoder(width=len(weights["encoder.conv1.bias"]))
    model.load_state_dict(weights)
    return model.to(device).eval().requires_grad_(False)


def load_decoder(path: Path, device: torch.device | str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that decodes latents [B, n, 16, h, w] to video [B, 3, 4 n - 3, H, W] in
    approximately [-1, 1]. Gradients pass through it.
    """
    model = load_autoencoder(path, device)
    return lambda latents: model.decode(latents).transpose(1, 2)
