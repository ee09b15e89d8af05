# SPDX-License-Identifier: Apache-2.0
"""Constants that the PyTorch kernels and the Triton kernels for e4m3 share."""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
MANTISSA = (1 << 23) - 1
"""Mask for the mantissa bits of an fp32 value."""
