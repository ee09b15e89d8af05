# SPDX-License-Identifier: Apache-2.0
"""The CUDA tests in as many processes as there are GPUs (`make test-cuda`): each process sees one
GPU of its own.

Tests marked `several_gpus` need a process that sees all of them, and run after the others. Held by
tests/test_cuda_workers.py.
"""

import os
from collections.abc import Sequence
from typing import Any

import pytest

VARIABLE = "CUDA_VISIBLE_DEVICES"


def runs_cuda_tests(config: pytest.Config) -> bool:
    """Whether the tests marked `cuda` were asked for, as by `-m "cuda and not several_gpus"`."""
    return str(config.option.markexpr).startswith("cuda")


def pin(specs: Sequence[Any], visible: str | None) -> None:
    """Give each process one GPU in turn. visible: of `CUDA_VISIBLE_DEVICES`, None = all that
    there are.
    """
    gpus = [str(number) for number in range(len(specs))] if visible is None else visible.split(",")
    for number, spec in enumerate(specs):
        spec.env[VARIABLE] = gpus[number % len(gpus)]


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    import torch

    return torch.cuda.device_count() or None if runs_cuda_tests(config) else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    if runs_cuda_tests(config):
        pin(specs, os.environ.get(VARIABLE))
