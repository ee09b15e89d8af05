# SPDX-License-Identifier: Apache-2.0
"""Tests of the pipeline runner, step by step.

Requests produce the same results as in diffusers, bit for bit, even if other requests fail or are
aborted.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers_direct import direct
from helpers.scheduling import execute, new_request, run_to_end, step

from vllm_omni.executor.pipeline_runner import PipelineRunner
from vllm_omni.outputs import RequestFailed

MakeRunner = Callable[..., PipelineRunner]
Pipelines = Callable[[str], Path]
SMALL = {"height": 32, "width": 48, "num_inference_steps": 4}


def request(request_id: str, tensors: dict[str, torch.Tensor] | None = None, **fields: Any) -> Any:
    return new_request(
        request_id,
        tensors,
        session_id=request_id,
        one_shot=True,
        **{"prompt": "a red fox", **SMALL, **fields},
    )


def reference(path: Path, seed: int, **arguments: Any) -> torch.Tensor:
    return direct(path, seed, **{**SMALL, **arguments})


def images(result: Any) -> torch.Tensor:
    assert not isinstance(result, RequestFailed), result
    return result[1]["images"]


def test_several_images_have_consecutive_seeds(
    make_runner: MakeRunner, tiny_pipelines: Pipelines
) -> None:
    """Image i of a request equals image 0 of a request with seed + i, up to rounding in a larger
    batch.
    """
    got = images(run_to_end(make_runner(), request("a", seed=5, num_images=2))["a"])
    assert torch.equal(got[0], reference(tiny_pipelines("qwen_image"), 5)[0])
    other = reference(tiny_pipelines("qwen_image"), 6)[0]
    assert (got[1].int() - other.int()).abs().max() <= 1


def test_steps_progress_and_metadata(make_runner: MakeRunner) -> None:
    """The first engine step runs encoding and the first denoise step. Each following engine step
    runs one denoise step, until a final engine step decodes.
    """
    runner = make_runner()
    assert execute(runner, step(new=[request("a", seed=5)])) == {"a": None}
    assert runner.request_progress() == {"a": [1, 4]}
    for done in (2, 3, 4):
        assert execute(runner, step(running=["a"])) == {"a": None}
        assert runner.request_progress() == {"a": [done, 4]}
    meta, tensors = execute(runner, step(running=["a"]))["a"]
    assert tensors["images"].shape == (1, 32, 48, 3)
    assert (meta["seed"], meta["num_steps"], meta["pipeline"]) == (5, 4, "QwenImagePipeline")
    assert len(meta["timings_ms"]["steps"]) == 3
    execute(runner, step(finished=["a"]))
    assert runner.request_progress() == {}


def test_stock_scheduler_runs_whole_requests(
    make_runner: MakeRunner, tiny_pipelines: Pipelines
) -> None:
    """With the stock scheduler, a single engine step runs several whole requests, which generate
    the same images as diffusers.
    """
    runner = make_runner(step_at_a_time=False)
    results = execute(runner, step(new=[request("a", seed=1), request("b", seed=2)]))
    for name, seed in (("a", 1), ("b", 2)):
        assert torch.equal(images(results[name]), reference(tiny_pipelines("qwen_image"), seed))


def test_requests_run_one_at_a_time_by_default(
    make_runner: MakeRunner, tiny_pipelines: Pipelines
) -> None:
    """By default, a second request waits until the first request has finished. Both produce the
    same results as diffusers.
    """
    runner = make_runner()
    execute(runner, step(new=[request("a", seed=1), request("b", seed=2)]))
    execute(runner, step(running=["a", "b"]))
    assert runner.request_progress() == {"a": [2, 4], "b": [0, 4]}
    for _ in range(3):
        results = execute(runner, step(running=["a", "b"]))
    assert torch.equal(images(results["a"]), reference(tiny_pipelines("qwen_image"), 1))
    # The second request started in the same engine step in which the first request ended.
    assert runner.request_progress()["b"] == [1, 4]
    for _ in range(4):
        results = execute(runner, step(running=["b"], finished=["a"]))
    assert torch.equal(images(results["b"]), reference(tiny_pipelines("qwen_image"), 2))


@pytest.mark.parametrize("layout", ["qwen_image", "flux", "sd3", "wan"])
def test_interleaved_requests_equal_single_ones(
    make_runner: MakeRunner, tiny_pipelines: Pipelines, layout: str
) -> None:
    """Two interleaved requests with different image sizes and numbers of steps take turns. Their
    schedulers are independent.
    """
    frames = {"num_frames": 5} if layout == "wan" else {}
    runner = make_runner(layout, interleave=2)
    results = run_to_end(
        runner,
        request("a", seed=1, **frames),
        request("b", **{"seed": 2, "height": 64, "num_inference_steps": 3, **frames}),
    )
    key = "frames" if frames else "images"
    path = tiny_pipelines(layout)
    assert torch.equal(results["a"][1][key], reference(path, 1, **frames))
    assert torch.equal(
        results["b"][1][key], reference(path, 2, height=64, num_inference_steps=3, **frames)
    )


def test_an_abort_stops_before_the_next_step(
    make_runner: MakeRunner, tiny_pipelines: Pipelines
) -> None:
    """When a request is aborted in the second of its four steps, no later step runs, and its
    latents are freed.

    The next request is not affected.
    """
    runner = make_runner()
    transformer = runner.host.pipeline.transformer
    steps: list[weakref.ref[torch.Tensor]] = []
    hook = transformer.register_forward_pre_hook(
        lambda module, args, kwargs: steps.append(weakref.ref(kwargs["hidden_states"])),
        with_kwargs=True,
    )
    execute(runner, step(new=[request("a", seed=1)]))
    execute(runner, step(running=["a"]))
    execute(runner, step(finished=["a"]))
    hook.remove()
    gc.collect()
    assert len(steps) == 2 and all(latents() is None for latents in steps)
    assert runner.request_progress() == {}
    got = images(run_to_end(runner, request("b", seed=2))["b"])
    assert torch.equal(got, reference(tiny_pipelines("qwen_image"), 2))


def test_a_waiting_request_can_be_aborted(make_runner: MakeRunner) -> None:
    """If a waiting request is aborted, it never starts, and the running request continues."""
    runner = make_runner()
    execute(runner, step(new=[request("a", seed=1), request("b", seed=2)]))
    execute(runner, step(running=["a"], finished=["b"]))
    assert runner.request_progress() == {"a": [2, 4]}


def test_an_error_fails_only_its_request(
    make_runner: MakeRunner, tiny_pipelines: Pipelines
) -> None:
    """A refusal, a failure inside the model or non-finite values cause only the affected request to
    fail.
    """
    runner = make_runner(interleave=2)
    transformer = runner.host.pipeline.transformer
    calls = {"n": 0}

    def fail(module: Any, args: Any, kwargs: Any) -> None:
        # Only the 64x64 request fails, not the 32x48 request.
        if kwargs["hidden_states"].shape[1] == 16:
            calls["n"] += 1
            if calls["n"] == 2:
                raise RuntimeError("at 0x7f00 in /somewhere")

    hook = transformer.register_forward_pre_hook(fail, with_kwargs=True)
    results = run_to_end(
        runner,
        request("good", seed=1),
        request("fails", seed=2, height=64, width=64),
    )
    hook.remove()
    assert isinstance(results["fails"], RequestFailed) and results["fails"].code == "engine_error"
    assert "0x7f00" not in results["fails"].message
    path = tiny_pipelines("qwen_image")
    assert torch.equal(images(results["good"]), reference(path, 1))

    results = run_to_end(runner, request("refused", width=40), request("good-2", seed=2))
    assert results["refused"].code == "unsupported_size"
    assert torch.equal(images(results["good-2"]), reference(path, 2))

    hook = transformer.register_forward_hook(lambda module, args, output: (output[0] * torch.nan,))
    assert run_to_end(runner, request("nan", seed=1))["nan"].code == "non_finite"
    hook.remove()
    assert torch.equal(
        images(run_to_end(runner, request("good-3", seed=1))["good-3"]), reference(path, 1)
    )


def test_a_value_error_of_the_pipeline_is_a_client_error(make_runner: MakeRunner) -> None:
    """A ValueError before the first step is a client error. The error message is returned only if
    it reveals no internals.
    """
    runner = make_runner("wan")
    failure = run_to_end(runner, request("a", num_frames=5, options={"guidance_scale_2": 3.0}))["a"]
    assert failure.code == "invalid_request" and "guidance_scale_2" in failure.message
    typed = run_to_end(make_runner(), request("a", options={"sigmas": [0.5, "x"]}))["a"]
    assert typed.code == "invalid_request"


def test_an_error_of_the_device_ends_the_engine(make_runner: MakeRunner) -> None:
    """An illegal memory access makes the device unusable, so the runner does not catch the
    exception.
    """
    runner = make_runner()

    def fail(module: Any, args: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner.host.pipeline.transformer.register_forward_pre_hook(fail)
    with pytest.raises(torch.AcceleratorError):
        execute(runner, step(new=[request("a")]))


def test_out_of_memory_fails_one_request(make_runner: MakeRunner) -> None:
    """If a request runs out of memory, only that request fails, with its own error code."""
    runner = make_runner()

    def fail(module: Any, args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = runner.host.pipeline.transformer.register_forward_pre_hook(fail)
    assert run_to_end(runner, request("a"))["a"].code == "oom"
    hook.remove()
    images(run_to_end(runner, request("b"))["b"])


def test_latents_on_request(make_runner: MakeRunner) -> None:
    """`output="latents"` returns the pipeline's packed latents."""
    _, tensors = run_to_end(make_runner(), request("a", seed=1, output="latents"))["a"]
    assert tensors["latents"].shape == (1, 6, 64)


def test_image_to_image_and_inpainting_by_pipeline_class(
    make_runner: MakeRunner, tiny_pipelines: Pipelines
) -> None:
    """The same pipeline directory can also be run with the image-to-image and inpainting pipeline
    classes.

    `strength` reduces the number of steps and the reported progress.
    """
    import diffusers
    from PIL import Image

    image = torch.randint(
        0, 256, (32, 48, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    runner = make_runner(pipeline_class="QwenImageImg2ImgPipeline")
    result = run_to_end(runner, request("a", {"image": image}, seed=3, options={"strength": 0.5}))[
        "a"
    ]
    pipeline = diffusers.QwenImageImg2ImgPipeline.from_pretrained(tiny_pipelines("qwen_image"))
    expected = pipeline(
        prompt="a red fox",
        image=Image.fromarray(image.numpy()),
        strength=0.5,
        generator=torch.Generator().manual_seed(3),
        output_type="pt",
        **SMALL,
    ).images
    assert torch.equal(images(result), (expected * 255).round().to(torch.uint8).movedim(1, -1))
    assert result[0]["num_steps"] == 2


def test_session_operations_without_sessions(make_runner: MakeRunner) -> None:
    """A pipeline has no sessions: the `close` operation succeeds, and `fork` is refused."""
    runner = make_runner()
    closed = run_to_end(runner, new_request("c", session_id="s", op="close"))["c"]
    assert closed[0]["existed"] is False
    assert (
        run_to_end(runner, new_request("f", session_id="s", op="fork", fork_to="t"))["f"].code
        == "invalid_request"
    )
