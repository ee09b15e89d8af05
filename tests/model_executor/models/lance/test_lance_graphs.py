# SPDX-License-Identifier: Apache-2.0
"""Generations with CUDA graphs are bit-identical to generations without them.

On a CPU, a simulated "graph" reruns the forward pass with the host-side decisions made during
capture, so an incomplete graph key would change the latents.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import finish, step
from helpers.host_capture import hold
from lance_driver import load_lance, make_request, prepare, request_of, run

from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs
from vllm_omni.model_executor.models.lance.network.pack import (
    BranchCache,
    Expert,
    PackBuilder,
    TokenPack,
)
from vllm_omni.model_executor.models.lance.pipeline import Lance


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Lance:
    return load_lance(checkpoint)


@pytest.fixture
def by_graphs(checkpoint: Path) -> Lance:
    lance = load_lance(checkpoint)
    lance.stepper.graphs = ForwardGraphs(4, capture=hold)
    return lance


CAT: dict[str, Any] = {
    "prompt": "a cat",
    "height": 64,
    "width": 96,
    "num_inference_steps": 5,
    "output": "latents",
}


@pytest.mark.parametrize("task", ["t2i", "image_edit", "t2v", "i2v"])
def test_a_generation_with_graphs_equals_the_generation(
    plain: Lance, by_graphs: Lance, task: str
) -> None:
    """Tasks with and without a pinned first frame produce the same latents with graphs as without.
    Each task runs twice, so the second run replays the first run's graph.
    """
    changes = {"num_inference_steps": 5, "output": "latents"}
    want = run(plain, request_of(task, **changes))[1]["latents"]
    for _ in range(2):
        assert torch.equal(run(by_graphs, request_of(task, **changes))[1]["latents"], want)
    assert by_graphs.stepper.graphs is not None and len(by_graphs.stepper.graphs) > 0


def test_each_set_of_guidance_branches_has_its_graph(plain: Lance, by_graphs: Lance) -> None:
    """If only the first steps use guidance, a generation has two kinds of steps, and each kind has
    its own graph.
    """
    fields = {**CAT, "num_inference_steps": 8, "options": {"cfg_interval": [0.85, 1.0]}}
    want = run(plain, make_request(fields))[1]["latents"]
    assert torch.equal(run(by_graphs, make_request(fields))[1]["latents"], want)
    assert by_graphs.stepper.graphs is not None and len(by_graphs.stepper.graphs) == 2


def test_generations_may_join_and_leave_between_graphs(plain: Lance, by_graphs: Lance) -> None:
    """Two generations of different sizes share steps, although the second generation joins three
    steps after the first.
    """
    fields = [CAT, {**CAT, "prompt": "a dog", "width": 64, "num_inference_steps": 6}]
    want = [run(plain, make_request(each))[1]["latents"] for each in fields]
    waiting, running, done = [make_request(each) for each in fields], [], []
    steps = 0
    while waiting or running:
        if waiting and steps % 3 == 0:
            prepare(by_graphs, waiting[0])
            running.append(waiting.pop(0))
        step(by_graphs, running)
        steps += 1
        for request in [request for request in running if request.step >= request.num_steps]:
            done.append(by_graphs.post_decode(request)[1]["latents"])
            running.remove(request)
    for got, alone in zip(done, want, strict=True):
        torch.testing.assert_close(got, alone, atol=2e-5, rtol=0)


def test_another_prompt_replays_the_graphs(plain: Lance, by_graphs: Lance) -> None:
    """A generation with a new prompt replays the graphs of preceding generations, one for the
    contexts and one for denoise steps, because it reuses their caches, contexts are padded, and the
    context length is a device tensor. The contexts are captured with the second prompt.
    """
    run(by_graphs, make_request(CAT))
    graphs = by_graphs.stepper.graphs
    assert graphs is not None and len(graphs) == 1 and len(graphs.pool) == 2
    for prompt in ("a dog with a much longer tail", "it"):
        fields = {**CAT, "prompt": prompt}
        want = run(plain, make_request(fields))[1]["latents"]
        assert torch.equal(run(by_graphs, make_request(fields))[1]["latents"], want)
        assert len(graphs) == 2, "no other graph was captured"
    by_graphs.trim_pool(0)
    assert len(graphs.pool) == 0


def test_concurrent_generations_have_separate_caches(plain: Lance, by_graphs: Lance) -> None:
    """Two concurrent generations have separate caches, even if the pool holds caches for only one
    of them.
    """
    run(by_graphs, make_request(CAT))
    fields = [{**CAT, "prompt": prompt} for prompt in ("a dog", "a bird")]
    want = [run(plain, make_request(each))[1]["latents"] for each in fields]
    requests = [make_request(each) for each in fields]
    for request in requests:
        prepare(by_graphs, request)
    while requests[0].step < requests[0].num_steps:
        step(by_graphs, requests)
    for request, latents in zip(requests, want, strict=True):
        torch.testing.assert_close(
            finish(by_graphs, request)[1]["latents"], latents, atol=2e-5, rtol=0
        )
    assert by_graphs.stepper.graphs is not None and len(by_graphs.stepper.graphs.pool) == 4


def test_caches_of_a_failed_generation_are_not_pooled(by_graphs: Lance) -> None:
    """The caches of a failed generation are discarded, because the generation may have failed in
    the middle of a step.
    """
    request = make_request(CAT)
    prepare(by_graphs, request)
    step(by_graphs, [request])
    assert by_graphs.stepper.graphs is not None and len(by_graphs.stepper.graphs.pool) == 0


def test_the_key_contains_every_slot_that_is_read_or_written() -> None:
    """The graph key contains every slot that is read or written. Otherwise, a replay with the same
    caches would use the slots that were used during the capture.
    """
    caches = [BranchCache(torch.zeros(1, 9, 1, 2), torch.zeros(1, 9, 1, 2)) for _ in range(2)]

    def pack(
        start: int = 2, keys: int | None = 4, causal: bool = False, order: int = 1
    ) -> TokenPack:
        builder = PackBuilder()
        for cache in caches[::order]:
            tokens = builder.add_tokens(
                "gen", torch.zeros(2, 4), (torch.zeros(2, 1), torch.zeros(2, 1)), cache, start
            )
            if keys is None:
                builder.attend_to_block("gen", tokens, cache, torch.tensor([0, 9]))
            else:
                builder.attend("gen", tokens, cache, keys, causal=causal)
        return builder.build()

    assert pack().key == pack().key
    others = [pack(start=3), pack(keys=5), pack(keys=None), pack(causal=True)]
    assert len({pack().key, *(other.key for other in others)}) == 5
    assert pack(order=-1).caches == pack().caches[::-1], "the key contains their order"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_on_a_gpu_equal_plain_launches(
    checkpoint: Path, plain: Lance, dtype: torch.dtype
) -> None:
    """The third generation only replays graphs. In fp32, the latents equal those computed on a
    CPU.
    """
    with torch.device("cuda"):
        launched, by_graphs = (
            load_lance(checkpoint, dtype=dtype),
            load_lance(checkpoint, dtype=dtype),
        )
    by_graphs.stepper.graphs = ForwardGraphs(4)
    prompts = {"a cat": 1, "a dog with a much longer tail": 2, "it": 2}
    for prompt, graphs in prompts.items():
        fields = {**CAT, "prompt": prompt}
        got = run(by_graphs, make_request(fields))[1]["latents"]
        assert torch.equal(got, run(launched, make_request(fields))[1]["latents"])
        assert len(by_graphs.stepper.graphs) == graphs
        if dtype == torch.float32:
            want = run(plain, make_request(fields))[1]["latents"]
            torch.testing.assert_close(got.cpu(), want, atol=2e-3, rtol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("slow", ["und", "gen"])
def test_the_experts_wait_for_each_other(checkpoint: Path, slow: Expert) -> None:
    """In a graph, each expert's attention waits for the keys and values of the other expert, even
    if the other expert is much slower.
    """
    with torch.device("cuda"):
        launched, by_graphs = load_lance(checkpoint), load_lance(checkpoint)
    by_graphs.stepper.graphs = ForwardGraphs(4)
    ops = by_graphs.network.language_model._fused_ops

    def slow_norm_rope(*args: Any) -> torch.Tensor:
        torch.cuda._sleep(200_000)
        return norm_rope(*args)

    norm_rope = ops[slow].norm_rope
    ops[slow] = replace(ops[slow], norm_rope=slow_norm_rope)
    for prompt in ("a cat", "it"):
        fields = {**CAT, "prompt": prompt}
        want = run(launched, make_request(fields))[1]["latents"]
        assert torch.equal(run(by_graphs, make_request(fields))[1]["latents"], want)
    assert len(by_graphs.stepper.graphs) == 2
