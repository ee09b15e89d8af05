# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tiny pipelines of every layout, and for their hosts and runners."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_direct import CPU, MakeHost

from vllm_omni.executor.pipeline_host import PipelineHost
from vllm_omni.executor.pipeline_runner import PipelineRunner
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions


@pytest.fixture(scope="session")
def tiny_pipelines(tiny_checkpoint: Callable[..., Path]) -> Callable[[str], Path]:
    """Return a function, called as `tiny_pipelines(layout)`, that returns a tiny pipeline's
    directory. Each directory is written only once.
    """
    return partial(tiny_checkpoint, "diffusers_pipeline")


@pytest.fixture
def make_host(tiny_pipelines: Callable[[str], Path]) -> MakeHost:
    """Return a function, called as `make_host(layout, **options)`, that creates a pipeline host on
    the CPU in float32.
    """

    def make(layout: str = "qwen_image", **options: Any) -> PipelineHost:
        return PipelineHost(
            tiny_pipelines(layout), DiffusersOptions.parse(options), CPU, torch.float32
        )

    return make


@pytest.fixture
def make_runner(make_host: MakeHost) -> Iterator[Callable[..., PipelineRunner]]:
    """Yield a function, called as `make_runner(layout, **options)`, that creates a pipeline runner.

    The runner executes one denoise step per engine step. With `step_at_a_time=False`, it executes
    whole requests.
    """
    runners: list[PipelineRunner] = []

    def make(
        layout: str = "qwen_image", step_at_a_time: bool = True, **options: Any
    ) -> PipelineRunner:
        runners.append(PipelineRunner(make_host(layout, **options), step_at_a_time=step_at_a_time))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()
