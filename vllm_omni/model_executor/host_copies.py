# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device that do not make the host wait. Held by tests/model_executor/test_noise.py."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor's copy on `device`; on CUDA queued behind the running kernels, through page-locked memory."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Arriving:
    """A number that the device computes while the host goes on; elsewhere than on CUDA it is there at once.

    number: of one element.
    """

    def __init__(self, number: torch.Tensor) -> None:
        self._number, self._arrived = number, None
        if number.is_cuda:
            self._number = torch.empty((), dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    @property
    def known(self) -> bool:
        """Whether `wait` would return at once."""
        return self._arrived is None or bool(self._arrived.query())

    def wait(self) -> int:
        """The number, as soon as the device has it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return int(self._number)
