# SPDX-License-Identifier: Apache-2.0
"""`FastPath`: whether a faster implementation is used, and the reason if it is not.

The module that chooses between two implementations returns its choice as a `FastPath` and branches
on `is_on`. The log, `vllm-omni doctor`, `/omni/ready` and benchmark results all report this
`FastPath` (`model_executor/fast_paths.py` lists all fast paths), so a report cannot differ from the
actual choice.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

logger = logging.getLogger("vllm." + __name__)


_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class FastPath:
    """A choice between a fast implementation and a slower one."""

    name: str
    """Name of the fast path in reports."""
    instead: str
    """The implementation that is used if this path is off."""
    reason: str = ""
    """Reason why the path is off. Empty: the path is on."""
    remedy: str = ""
    """Action that turns the path on, if the machine supports it. Empty: there is no remedy, because
    the hardware does not support the path or an option disables it.
    """

    @property
    def is_on(self) -> bool:
        return not self.reason

    def disabled(self, reason: str) -> "FastPath":
        """Return a copy of this path that is off for `reason`, which is not a missing machine
        requirement.
        """
        return FastPath(self.name, self.instead, reason)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for benchmark results and `/omni/ready`."""
        return {"name": self.name, "on": self.is_on, "reason": self.reason}

    def __str__(self) -> str:
        return f"{self.name}: " + (
            "on" if self.is_on else f"off, because {self.reason}; {self.instead} instead"
        )


@dataclass(frozen=True)
class Lack:
    """A requirement of a fast path that this machine does not meet. A `Lack` is falsy if nothing is
    missing.
    """

    reason: str = ""
    """Reason why the path is off; see `FastPath.reason`."""
    remedy: str = ""
    """Action that turns the path on; see `FastPath.remedy`."""

    def __bool__(self) -> bool:
        return bool(self.reason)

    def of(self, name: str, instead: str) -> FastPath:
        """Return the fast path `name`, which is off if this requirement is missing."""
        return FastPath(name, instead, self.reason, self.remedy)


def this_device() -> torch.device:
    """Return the device that a model in this process runs on: CUDA if there is a GPU, otherwise the
    CPU.
    """
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def lacks_gpu(device: torch.device) -> Lack:
    return Lack("" if device.type == "cuda" else "there is no CUDA GPU")


def lacks_hopper(device: torch.device) -> Lack:
    if device.type != "cuda":
        return lacks_gpu(device)
    capability = torch.cuda.get_device_capability(device)
    return Lack("" if capability == (9, 0) else f"this GPU is sm_{_digits(capability)}, not sm_90")


def lacks_capability(device: torch.device, least: tuple[int, int]) -> Lack:
    """Check for a CUDA compute capability of at least `least`."""
    if device.type != "cuda":
        return lacks_gpu(device)
    capability = torch.cuda.get_device_capability(device)
    return Lack(
        ""
        if capability >= least
        else f"this GPU is sm_{_digits(capability)}, older than sm_{_digits(least)}"
    )


def _digits(capability: tuple[int, int]) -> str:
    return "".join(map(str, capability))


def is_half_on_cuda(x: torch.Tensor) -> bool:
    """Return whether a tensor is on a CUDA device and has a half-precision type."""
    return x.is_cuda and x.dtype in _HALF


def lacks_half(dtype: torch.dtype, option: str) -> Lack:
    """Check that `dtype`, which is set by `option`, is a half-precision type."""
    return Lack(
        "" if dtype in _HALF else f"the dtype is {str(dtype).removeprefix('torch.')} ({option})"
    )


def lacks_package(module: str, package: str) -> Lack:
    """Check that a module can be imported. `package` is the pip name of the package that contains
    it.
    """
    if find_spec(module) is not None:
        return Lack()
    return Lack(f"the package {package} is not installed", f"pip install {package}")


def lacks_triton() -> Lack:
    """Check that Triton can run GPU kernels on this machine."""
    from vllm.triton_utils import HAS_TRITON

    missing = lacks_package("triton", "triton")
    if missing or HAS_TRITON:
        return missing
    return Lack("Triton finds no driver of this GPU", "install a CUDA build of torch")


def joined(parts: Iterable[Iterable[FastPath]]) -> list[FastPath]:
    """Merge several components' lists of fast paths. A path is on if it is on in all components
    that list it.
    """
    found: dict[str, FastPath] = {}
    for path in (path for part in parts for path in part):
        if found.setdefault(path.name, path).is_on:
            found[path.name] = path
    return list(found.values())


def log_paths(paths: Sequence[FastPath]) -> None:
    """Log one line with all paths that are on, and one line for each path that is off."""
    logger.info("fast paths: %s", ", ".join(path.name for path in paths if path.is_on) or "none")
    for path in paths:
        if path.remedy:
            logger.warning("fast path %s (%s)", path, path.remedy)
        elif not path.is_on:
            logger.info("fast path %s", path)
