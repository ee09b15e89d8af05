# SPDX-License-Identifier: Apache-2.0
"""In diffusers pipelines, each request can enable step caching with `options.first_block_cache`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_direct import direct
from helpers.scheduling import execute, new_request, run_to_end, step

from vllm_omni.executor.pipeline_runner import PipelineRunner
from vllm_omni.executor.transformer_cache import cached_steps
from vllm_omni.outputs import RequestFailed

MakeRunner = Callable[..., PipelineRunner]
Pipelines = Callable[[str], Path]
SMALL: dict[str, Any] = {"height": 32, "width": 48, "num_inference_steps": 8}


def request(request_id: str, **fields: Any) -> Any:
    return new_request(
        request_id,
        session_id=request_id,
        one_shot=True,
        prompt="a red fox",
        seed=5,
        **SMALL,
        **fields,
    )


def test_a_cached_request_skips_forwards_and_the_next_one_does_not(
    make_runner: MakeRunner, tiny_pipelines: Pipelines
) -> None:
    runner = make_runner()
    meta, tensors = run_to_end(runner, request("a", options={"first_block_cache": 10.0}))["a"]
    assert meta["first_block_cache"] == {"threshold": 10.0, "computed_share": 0.125}, (
        "the first of eight steps"
    )
    plain = direct(tiny_pipelines("qwen_image"), 5, **SMALL)
    assert not torch.equal(tensors["images"], plain)
    meta, tensors = run_to_end(runner, request("b"))["b"]
    assert "first_block_cache" not in meta and torch.equal(tensors["images"], plain)
    meta, tensors = run_to_end(runner, request("c", options={"first_block_cache": 1e-9}))["c"]
    assert meta["first_block_cache"]["computed_share"] == 1.0
    assert (tensors["images"].int() - plain.int()).abs().max() <= 1


def test_an_aborted_request_leaves_no_cache(
    make_runner: MakeRunner, tiny_pipelines: Pipelines
) -> None:
    runner = make_runner()
    execute(runner, step(new=[request("a", options={"first_block_cache": 10.0})]))
    execute(runner, step(running=["a"]))
    assert runner.host.pipeline.transformer.is_cache_enabled
    execute(runner, step(finished=["a"]))
    assert not runner.host.pipeline.transformer.is_cache_enabled
    _, tensors = run_to_end(runner, request("b"))["b"]
    assert torch.equal(tensors["images"], direct(tiny_pipelines("qwen_image"), 5, **SMALL))


@pytest.mark.parametrize(
    ("threshold", "words"),
    [(0, "Expected `float` > 0"), ("much", "Expected `float`"), (11.0, "<= 10"), (None, "float")],
)
def test_thresholds_out_of_range_are_refused(
    make_runner: MakeRunner, threshold: Any, words: str
) -> None:
    result = run_to_end(make_runner(), request("a", options={"first_block_cache": threshold}))["a"]
    assert isinstance(result, RequestFailed) and result.code == "invalid_request"
    assert "options.first_block_cache" in result.message and words in result.message


def test_interleaved_requests_are_refused(make_runner: MakeRunner) -> None:
    result = run_to_end(
        make_runner(interleave=2), request("a", options={"first_block_cache": 0.1})
    )["a"]
    assert isinstance(result, RequestFailed) and "omni.model.interleave 1" in result.message


def test_a_pipeline_that_diffusers_cannot_cache_is_refused() -> None:
    pipeline = type("OwnPipeline", (), {"components": {"unet": torch.nn.Linear(1, 1)}})()
    with (
        pytest.raises(RequestFailed, match="no first-block cache for OwnPipeline"),
        cached_steps(pipeline, 0.1),
    ):
        pass
