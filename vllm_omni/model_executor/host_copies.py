# SPDX-License-Identifier: Apache-2.0
"""Copies from the host that do not make it wait for the device. Held by tests/model_executor/test_noise.py."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor's copy on `device`; on CUDA queued behind the running kernels, through page-locked memory."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
