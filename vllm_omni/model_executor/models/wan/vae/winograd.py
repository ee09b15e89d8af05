# SPDX-License-Identifier: Apache-2.0
"""Winograd convolution F(m, 3) along time. It computes m frames of a convolution over three frames
with m + 2 products instead of 3 m.

Frames are combined before the convolutions, weights are combined once after they are loaded, and
results are combined after the convolutions. Combinations and products are fp16. Because fp16 has
three more mantissa bits than bf16, F(4, 3) in fp16 loses less precision than a plain convolution in
bf16. Maths: A. Lavin and S. Gray, "Fast Algorithms for Convolutional Neural Networks", 2015
(arXiv:1509.09308).
"""

# O, C channels; H, W the kernel's rows and columns; T its three frames

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

Matrix = tuple[tuple[float, ...], ...]

_RANGE: Final = 16.0
"""Inputs are divided and results are multiplied by this factor, because activations can exceed
65504, the largest fp16 value.
"""


@dataclass(frozen=True)
class WinogradMatrices:
    """The matrices of F(m, 3)."""

    inputs: Matrix
    """Matrix [m + 2, m + 2] that maps frames to combined frames."""
    weights: Matrix
    """Matrix [m + 2, 3] that maps weights to combined weights."""
    results: Matrix
    """Matrix [m, m + 2] that maps products to results."""

    def transformed(self, weight_OCTHW: torch.Tensor) -> torch.Tensor:
        """Combine a weight [O, C, 3, H, W] into m + 2 weights [m + 2, O, C, H, W] in
        `product_dtype`.

        Each combined weight is channels-last. The combinations are computed in fp32.
        """
        matrix = weight_OCTHW.new_tensor(self.weights, dtype=torch.float32)
        of_products = torch.einsum("jt,octhw->johwc", matrix, weight_OCTHW.float())
        return of_products.to(product_dtype(weight_OCTHW.dtype)).permute(0, 1, 4, 2, 3)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of combined frames, combined weights and products in a network that runs in
    `dtype`.
    """
    return torch.float32 if dtype == torch.float32 else torch.float16


def _scaled(inputs: Matrix, weights: Matrix, results: Matrix) -> WinogradMatrices:
    return WinogradMatrices(
        tuple(tuple(value / _RANGE for value in row) for row in inputs),
        weights,
        tuple(tuple(value * _RANGE for value in row) for row in results),
    )


OF_FRAMES: Final[Mapping[int, WinogradMatrices]] = {
    2: _scaled(
        ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, -1, 0, 1)),
        ((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
        ((1, 1, 1, 0), (0, 1, -1, 1)),
    ),
    4: _scaled(
        (
            (4, 0, -5, 0, 1, 0),
            (0, -4, -4, 1, 1, 0),
            (0, 4, -4, -1, 1, 0),
            (0, -2, -1, 2, 1, 0),
            (0, 2, -1, -2, 1, 0),
            (0, 4, 0, -5, 0, 1),
        ),
        (
            (1 / 4, 0, 0),
            (-1 / 6, -1 / 6, -1 / 6),
            (-1 / 6, 1 / 6, -1 / 6),
            (1 / 24, 1 / 12, 1 / 6),
            (1 / 24, -1 / 12, 1 / 6),
            (0, 0, 1),
        ),
        ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1)),
    ),
}
"""The matrices of F(2, 3) and F(4, 3), keyed by m. F(2, 3) interpolates at the points 0, 1, -1 and
infinity; F(4, 3) also interpolates at 2 and -2.
"""
