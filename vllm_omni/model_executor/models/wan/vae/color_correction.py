# SPDX-License-Identifier: Apache-2.0
"""Correct the colours of decoded frames by matching each frame's Lab statistics to a target.

Without correction, a long stream's colours drift. The target for a session's first chunk is the
chunk's first frame, and the target for a later chunk is the previous chunk's last corrected frame.
A stream's correction state thus consists of six values (the mean and standard deviation of three
channels). The conversion to Lab follows the textbook formula (sRGB transfer curve, D65).
"""

# T video frames

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import (
    ChunkDecoder,
    DecoderLayout,
    DecoderState,
)
from vllm_omni.model_executor.models.wan.vae.vae import to_uint8
from vllm_omni.tensors.saved import SavedTensors

_WHITE: Final = (0.950456, 1.0, 1.088754)
_PRIMARIES: Final = (
    (0.412453, 0.357580, 0.180423),
    (0.212671, 0.715160, 0.072169),
    (0.019334, 0.119193, 0.950227),
)
_XYZ_OF_RGB: Final[list[list[float]]] = (np.array(_PRIMARIES) / np.array(_WHITE)[:, None]).tolist()
"""Matrix that converts linear RGB to XYZ divided by the white point. It is a list, because
torch.compile fails on a module's NumPy arrays.
"""
_RGB_OF_XYZ: Final[list[list[float]]] = np.linalg.inv(np.array(_XYZ_OF_RGB)).tolist()
_CURVED: Final = 0.04045
_CUBIC: Final = 0.008856
"""Threshold above which Lab's transfer function is a cube root rather than linear. `_CURVED` is the
corresponding threshold of the sRGB transfer curve.
"""
_SLOPE, _OFFSET = 7.787, 16 / 116
_SMALLEST = 1e-6
"""Lower bound for standard deviations, which prevents division by zero for single-colour frames."""
_TARGET = "color_target"


def lab_of_rgb(rgb_T3HW: torch.Tensor) -> torch.Tensor:
    """Convert RGB in [0, 1] to CIE Lab, fp32."""
    rgb = rgb_T3HW.float()
    linear = torch.where(rgb > _CURVED, ((rgb + 0.055) / 1.055) ** 2.4, rgb / 12.92)
    xyz = torch.stack(_mixed(linear, _XYZ_OF_RGB), dim=1)
    f = torch.where(xyz > _CUBIC, xyz.clamp_min(_CUBIC) ** (1 / 3), _SLOPE * xyz + _OFFSET)
    x, y, z = f.unbind(1)
    return torch.stack((116 * y - 16, 500 * (x - y), 200 * (y - z)), dim=1)


def rgb_of_lab(lab_T3HW: torch.Tensor) -> torch.Tensor:
    """Convert CIE Lab to RGB. Values are not clamped to [0, 1]."""
    lightness, a, b = lab_T3HW.float().unbind(1)
    y = (lightness + 16) / 116
    f = torch.stack((y + a / 500, y, y - b / 200), dim=1)
    xyz = torch.where(f > _SLOPE * _CUBIC + _OFFSET, f**3, (f - _OFFSET) / _SLOPE)
    linear = torch.stack(_mixed(xyz, _RGB_OF_XYZ), dim=1)
    least = _CURVED / 12.92
    curved = 1.055 * linear.clamp_min(least) ** (1 / 2.4) - 0.055
    return torch.where(linear > least, curved, 12.92 * linear)


def _mixed(planes_T3HW: torch.Tensor, matrix_33: Sequence[Sequence[float]]) -> list[torch.Tensor]:
    """Multiply the colour vectors by `matrix_33`, and return the three resulting planes."""
    first, second, third = planes_T3HW.unbind(1)
    return [a * first + b * second + c * third for a, b, c in matrix_33]


def lab_statistics(lab_T3HW: torch.Tensor) -> torch.Tensor:
    """Return the mean and standard deviation of each channel in each frame, [T, 2, 3]."""
    deviation, mean = torch.std_mean(lab_T3HW, dim=(2, 3), correction=0)
    return torch.stack((mean, deviation), dim=1)


def correct_frames(
    rgb_T3HW: torch.Tensor, target_23: torch.Tensor | None, strength: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Correct a chunk's frames.

    Args:
        rgb_T3HW: Frames in [0, 1].
        target_23: Statistics that all frames are matched to. None: the statistics of the first
            frame.
        strength: Weight of the corrected frames in the result, in [0, 1].

    Returns:
        The corrected frames in [0, 1], and the target for the next chunk, fp32 [2, 3].
    """
    rgb = rgb_T3HW.float()
    lab = lab_of_rgb(rgb)
    own_T23 = lab_statistics(lab)
    if target_23 is None:
        target_23 = own_T23[0]
    mean, deviation = (part[..., None, None] for part in own_T23.unbind(1))
    target_mean, target_deviation = (part[:, None, None] for part in target_23.unbind(0))
    factor = target_deviation / deviation.clamp_min(_SMALLEST)
    corrected = rgb_of_lab((lab - mean) * factor + target_mean).clamp(0, 1)
    corrected = (1 - strength) * rgb + strength * corrected
    return corrected, lab_statistics(lab_of_rgb(corrected[-1:]))[0]


# -- the decoder -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CorrectedState:
    """Immutable decoder and colour correction state of a stream, shared by a session's forks."""

    decoder: DecoderState
    """State of the stream's decoder."""
    target_23: torch.Tensor | None
    """Target for the next chunk, fp32. None if no chunk has been corrected yet."""

    @property
    def tiny(self) -> bool:
        return self.decoder.tiny

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, keyed by their names in digests and snapshots."""
        named = self.decoder.tensors()
        return named if self.target_23 is None else {**named, _TARGET: self.target_23}

    def to(self, device: torch.device | str) -> "CorrectedState":
        target = None if self.target_23 is None else self.target_23.to(device)
        return CorrectedState(self.decoder.to(device), target)


@dataclass(frozen=True)
class CorrectedLayout:
    """Shapes of a stream's `CorrectedState` on this rank."""

    decoder: DecoderLayout
    """Layout of the decoder's state."""

    def restore(
        self, saved: SavedTensors, device: torch.device | str, num_latents: int
    ) -> CorrectedState:
        """Restore the state saved after `num_latents` latent frames."""
        target = None
        if saved.shape(_TARGET) is not None:
            target = saved.take_tensor(_TARGET, device, torch.float32, [2, 3])
        return CorrectedState(self.decoder.restore(saved, device, num_latents), target)


class CorrectingDecoder:
    """A `ChunkDecoder` that corrects the colours of its frames.

    Args:
        decoder: Decoder that returns whole frames on this rank.
        strength: Strength of the correction, as in `correct_frames`. With 0, neither the frames nor
            the target change.
        compiled: Whether to compile the correction with torch.compile.
    """

    def __init__(self, decoder: ChunkDecoder, strength: float, *, compiled: bool = False) -> None:
        self.decoder, self.strength = decoder, strength
        self._correct = torch.compile(correct_frames, dynamic=False) if compiled else correct_frames

    def with_strength(self, strength: float) -> Self:
        """Return a copy of this decoder with a different correction strength."""
        other = copy.copy(self)
        other.strength = strength
        return other

    def state_nbytes(self, height: int, width: int) -> int:
        """Return the maximum state size in bytes for a stream of `height` x `width` pixels."""
        return self.decoder.state_nbytes(height, width) + 6 * torch.float32.itemsize

    def state_layout(self, height: int, width: int) -> CorrectedLayout:
        """Return the state layout for a stream of `height` x `width` pixels."""
        return CorrectedLayout(self.decoder.state_layout(height, width))

    def can_be_tiny(self, before: CorrectedState | None) -> bool:
        """Return whether the tiny decoder can decode the next chunk."""
        return self.decoder.can_be_tiny(None if before is None else before.decoder)

    def decode_frames(
        self,
        latents_CFhw: torch.Tensor,
        size: tuple[int, int],
        before: CorrectedState | None,
        *,
        tiny: bool = False,
    ) -> tuple[torch.Tensor | None, CorrectedState]:
        """Decode a chunk as `ChunkDecoder.decode_frames` does, and correct its colours."""
        state, target = (None, None) if before is None else (before.decoder, before.target_23)
        if self.strength == 0:
            frames, state = self.decoder.decode_frames(latents_CFhw, size, state, tiny=tiny)
            return frames, CorrectedState(state, target)
        pixels, state = self.decoder.decode(latents_CFhw.unsqueeze(0), state, tiny=tiny)
        rgb_T3HW = (pixels[0].float() / 2 + 0.5).clamp(0, 1).transpose(0, 1)
        # The strength is a tensor, because a Python float would cause a recompilation for each new
        # value.
        strength = to_device(torch.tensor(self.strength), pixels.device)
        corrected, target = self._correct(rgb_T3HW, target, strength)
        levels = to_uint8(corrected.transpose(0, 1).unsqueeze(0) * 2 - 1, self.decoder.rounding)
        return levels, CorrectedState(state, target)

    def most_streams(self, before: CorrectedState | None, latents_CFhw: torch.Tensor) -> int:
        """Return 1, because chunks are corrected separately."""
        return 1

    def decode_frames_together(
        self, latents_CFhw: Sequence[torch.Tensor], before: Sequence[CorrectedState]
    ) -> list[tuple[torch.Tensor, CorrectedState]]:
        """Raise an error. This method is never called, because `most_streams` returns 1."""
        raise NotImplementedError
