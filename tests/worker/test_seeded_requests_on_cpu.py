# SPDX-License-Identifier: Apache-2.0
"""Seeded requests with a chunked prefill do not crash the engine on a CPU."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.cpu_build import on_cpu
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from vllm_omni.worker.ar.runner import ARModelRunnerV1Mixin

pytestmark = on_cpu


def runner(unfinished: list[bool], generators: dict[int, torch.Generator]) -> Any:
    from vllm_omni.worker.ar.cpu_worker import ARCPUModelRunner

    made: Any = ARCPUModelRunner.__new__(ARCPUModelRunner)
    made.input_batch = SimpleNamespace(num_reqs=len(unfinished), generators=generators)
    # The mask is longer than the batch.
    made.discard_request_mask = SimpleNamespace(np=np.array([*unfinished, True, True]))
    return made


def test_an_unfinished_prompt_does_not_use_its_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sampler does not receive a request's generator while the request's prompt is unfinished.
    After the step, all generators are restored.
    """
    generators = {index: torch.Generator().manual_seed(index) for index in (0, 1, 3)}
    retained, seen = dict(generators), []
    monkeypatch.setattr(
        ARModelRunnerV1Mixin,
        "sample_tokens",
        lambda self, output: seen.append(sorted(self.input_batch.generators)),
    )
    runner([True, False, True, False], generators).sample_tokens(None)
    assert seen == [[1, 3]]
    assert generators == retained


def test_a_failed_step_restores_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a step fails, the generators are restored and the exception reaches the caller."""

    def fail(self: Any, output: Any) -> None:
        raise RuntimeError("a fault of the model")

    generators = {0: torch.Generator()}
    monkeypatch.setattr(ARModelRunnerV1Mixin, "sample_tokens", fail)
    with pytest.raises(RuntimeError, match="a fault of the model"):
        runner([True], generators).sample_tokens(None)
    assert list(generators) == [0]


def test_vllm_rewinds_by_an_offset_that_a_cpu_lacks() -> None:
    """vLLM rewinds a generator by changing its offset, but CPU generators have no offset.

    If this test fails, remove `ARCPUModelRunner.sample_tokens`.
    """
    source = inspect.getsource(GPUModelRunner._bookkeeping_sync)
    assert (
        "gen.set_offset(gen.get_offset() - 4)" in source
        and "self.discard_request_mask.np[:num_reqs]" in source
    )
    with pytest.raises(RuntimeError, match="offset"):
        torch.Generator().get_offset()
