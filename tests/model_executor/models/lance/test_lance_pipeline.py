# SPDX-License-Identifier: Apache-2.0
"""Lance step by step in this process: every task, mixed batches, retries, answers in pieces."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.unreachable_weights import offloaded_out_of_reach
from lance_driver import (
    REQUESTS,
    clip,
    finish,
    image,
    load_lance,
    make_request,
    prepare,
    request_of,
    run,
    step,
)

from vllm_omni.model_executor.models.lance.config import TASKS
from vllm_omni.model_executor.models.lance.pipeline import Lance
from vllm_omni.outputs import RequestFailed
from vllm_omni.testing.tiny.lance import make_tiny

SMALL = {"max_image_pixels": 224 * 304, "max_video_pixels": 64 * 96, "max_num_frames": 9}
TOLERANCE = 1e-4
"""fp32 latents of order 1 after three guided steps: a shared matrix product sums in another
order.
"""


@pytest.fixture(scope="module")
def lance(tmp_path_factory: pytest.TempPathFactory) -> Lance:
    out = tmp_path_factory.mktemp("lance_video")
    make_tiny(out, 0, "video")
    return load_lance(out, **SMALL)


def latents_of(lance: Lance, task: str, **changes: Any) -> torch.Tensor:
    return run(lance, request_of(task, output="latents", **changes))[1]["latents"]


def test_every_task_gives_its_kind_of_result(lance: Lance) -> None:
    shapes = {}
    for task in TASKS:
        meta, tensors = run(lance, request_of(task))
        assert meta["task"] == task
        (name,) = tensors
        shapes[task] = (name, tuple(tensors[name].shape))
    assert shapes == {
        "t2i": ("images", (1, 64, 96, 3)),
        "image_edit": ("images", (1, 224, 304, 3)),
        "t2v": ("frames", (9, 64, 96, 3)),
        "i2v": ("frames", (9, 64, 96, 3)),
        "video_edit": ("frames", (5, 224, 304, 3)),
        "x2t_image": ("token_ids", (9,)),
        "x2t_video": ("token_ids", (9,)),
    }


def test_no_layer_is_used_without_its_fetch_from_host_memory(lance: Lance, tmp_path: Path) -> None:
    make_tiny(tmp_path / "lance", 0, "video")
    offloaded = offloaded_out_of_reach(lambda: load_lance(tmp_path / "lance", **SMALL))
    assert torch.equal(latents_of(offloaded, "i2v"), latents_of(lance, "i2v"))


def test_a_mixed_batch_equals_solo_runs(lance: Lance) -> None:
    """All seven tasks in the same engine steps, each started one step later than the one before."""
    solo = [
        latents_of(lance, task) if not task.startswith("x2t") else run(lance, request_of(task))
        for task in TASKS
    ]
    requests = [
        request_of(task, **({} if task.startswith("x2t") else {"output": "latents"}))
        for task in TASKS
    ]
    waiting, running, results = list(requests), [], {}
    while waiting or running:
        if waiting:
            prepare(lance, waiting[0])
            running.append(waiting.pop(0))
        step(lance, running)
        for request in [request for request in running if request.step >= request.num_steps]:
            results[request.request_id] = finish(lance, request)
            running.remove(request)
    for request, alone in zip(requests, solo, strict=True):
        meta, tensors = results[request.request_id]
        if isinstance(alone, torch.Tensor):
            torch.testing.assert_close(tensors["latents"], alone, atol=TOLERANCE, rtol=0)
        else:
            assert tensors["token_ids"].tolist() == alone[1]["token_ids"].tolist()
            assert meta["text"] == alone[0]["text"]


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("t2i", {"prompt": "a dog"}),
        ("t2i", {"seed": 7}),
        ("t2i", {"negative_prompt": "blurry"}),
        ("t2i", {"guidance_scale": 1.0}),
        ("t2i", {"options": {"cfg_renorm_type": "none"}}),
        ("t2i", {"options": {"cfg_interval": [0.8, 1.0]}}),
        ("t2i", {"options": {"timestep_shift": 1.0}}),
        ("t2i", {"options": {"system_prompt": "Draw."}}),
        ("image_edit", {"prompt": "a hat"}),
    ],
)
def test_what_is_requested_matters(lance: Lance, task: str, change: dict[str, Any]) -> None:
    if "options" in change:
        change = {"options": {**REQUESTS[task][0].get("options", {}), **change["options"]}}
    assert (latents_of(lance, task, **change) - latents_of(lance, task)).abs().max() > 1e-2


def test_the_reference_and_the_first_frame_matter(lance: Lance) -> None:
    for task in ("image_edit", "i2v"):
        fields, tensors = REQUESTS[task]
        other = run(
            lance, make_request({**fields, "output": "latents"}, {**tensors, "image": image(9)})
        )
        assert (other[1]["latents"] - latents_of(lance, task)).abs().max() > 1e-2


def test_guidance_by_the_image_goes_away_from_the_result_without_it(lance: Lance) -> None:
    """One step of scale 2, without the text's guidance: twice the edit's velocity less that of
    the same words alone.
    """
    options = {"resolution": "image_256res", "cfg_renorm_type": "none", "system_prompt": "Paint."}
    shared = {"num_inference_steps": 1, "guidance_scale": 1.0, "output": "latents", "seed": 3}

    def edited(**more: Any) -> torch.Tensor:
        _, tensors = run(lance, request_of("image_edit", **shared, options={**options, **more}))
        return tensors["latents"]

    plain, guided = edited(), edited(cfg_img_scale=2.0)
    height, width = (16 * side for side in plain.shape[-2:])
    fields = {**shared, "prompt": "no hat", "height": height, "width": width, "options": options}
    _, alone = run(lance, make_request({**fields, "options": {**options, "task": "t2i"}}))
    torch.testing.assert_close(guided, 2 * plain - alone["latents"], atol=1e-5, rtol=0)
    assert not torch.allclose(plain, guided, atol=1e-3)
    assert torch.equal(plain, edited(cfg_img_scale=1.0))


def test_guidance_by_the_image_works_alongside_the_texts_and_in_a_batch(lance: Lance) -> None:
    """With several pictures of one request too, each as it is drawn alone."""
    options = {"resolution": "image_256res", "cfg_img_scale": 1.5}
    changes = {"options": options, "output": "latents", "seed": 5}
    _, two = run(lance, request_of("image_edit", num_images=2, **changes))
    _, second = run(lance, request_of("image_edit", **{**changes, "seed": 6}))
    torch.testing.assert_close(two["latents"][1], second["latents"][0], atol=1e-5, rtol=0)


def test_guidance_by_the_image_needs_one(lance: Lance) -> None:
    with pytest.raises(RequestFailed, match="applies to edits only; omit it with t2i"):
        run(lance, request_of("t2i", options={"cfg_img_scale": 1.5}))


def test_the_first_frame_is_pinned(lance: Lance) -> None:
    """The latents of the first frame are the image's, whatever the steps did to the others."""
    many = latents_of(lance, "i2v", num_inference_steps=5)
    few = latents_of(lance, "i2v")
    assert torch.equal(many[0, :, 0], few[0, :, 0])
    assert not torch.equal(many[0, :, 1:], few[0, :, 1:])


def test_image_n_of_a_request_is_generated_with_seed_plus_n(lance: Lance) -> None:
    several = latents_of(lance, "t2i", seed=5, num_images=3)
    for number in range(3):
        alone = latents_of(lance, "t2i", seed=5 + number)
        torch.testing.assert_close(several[number : number + 1], alone, atol=TOLERANCE, rtol=0)


def test_a_step_that_failed_can_be_run_again(lance: Lance, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner repeats a failed batch one request at a time: nothing may have moved on."""
    alone = {task: run(lance, request_of(task)) for task in ("t2i", "x2t_image")}
    requests = {task: request_of(task) for task in alone}
    for request in requests.values():
        prepare(lance, request)
    run_forward, calls = lance.stepper._run, 0

    def fails_three_times(builder: Any) -> Any:
        nonlocal calls
        calls += 1
        result = run_forward(builder)
        if calls in (2, 6, 14):
            raise RuntimeError("injected")
        return result

    monkeypatch.setattr(lance.stepper, "_run", fails_three_times)
    failures = 0
    while live := [request for request in requests.values() if request.step < request.num_steps]:
        try:
            step(lance, live)
        except RuntimeError:
            failures += 1
    assert failures == 3
    for task, request in requests.items():
        _, tensors = finish(lance, request)
        for name, tensor in tensors.items():
            difference = tensor.double() - alone[task][1][name].double()
            # A CPU with AMX rounds batched products differently: a pixel may move by one level.
            assert difference.abs().max() <= (name in ("images", "frames"))


def test_an_response_in_parts_equals_the_whole(lance: Lance) -> None:
    """Pieces of four tokens, one request each, one session; an abandoned piece leaves no trace."""
    fields, tensors = REQUESTS["x2t_image"]
    whole = run(lance, make_request(fields, tensors))
    options = {**fields["options"], "chunk_tokens": 4}
    first = make_request(
        {**fields, "session_id": "talk", "one_shot": False, "options": options}, tensors
    )
    session = lance.new_session(first.params)
    results = [run(lance, first, session)]
    abandoned = make_request({"session_id": "talk"})
    prepare(lance, abandoned, session)
    step(lance, [abandoned])
    while results[-1][0]["finish_reason"] is None:
        results.append(run(lance, make_request({"session_id": "talk"}), session))
    assert [len(tensors["token_ids"]) for _, tensors in results] == [4, 4, 1]
    assert torch.equal(
        torch.cat([tensors["token_ids"] for _, tensors in results]), whole[1]["token_ids"]
    )
    assert "".join(meta["text"] for meta, _ in results) == whole[0]["text"]
    assert results[-1][0]["finish_reason"] == whole[0]["finish_reason"] == "length"
    with pytest.raises(RequestFailed, match="has ended"):
        prepare(lance, make_request({"session_id": "talk"}), session)


def test_a_session_in_the_middle_of_an_response_takes_no_other_question(lance: Lance) -> None:
    fields, tensors = REQUESTS["x2t_image"]
    first = make_request({**fields, "options": {**fields["options"], "chunk_tokens": 2}}, tensors)
    session = lance.new_session(first.params)
    run(lance, first, session)
    with pytest.raises(RequestFailed, match="this session is generating a text"):
        prepare(lance, make_request(fields, tensors), session)


def test_a_stop_text_ends_an_response_and_is_not_part_of_it(lance: Lance) -> None:
    fields, tensors = REQUESTS["x2t_image"]
    text = run(lance, make_request(fields, tensors))[0]["text"]
    stop = text[3:5]
    options = {**fields["options"], "stop": [stop]}
    meta, _ = run(lance, make_request({**fields, "options": options}, tensors))
    assert meta["text"] == text[: text.index(stop)]
    assert meta["finish_reason"] == "stop"


def test_sampling_is_repeatable_and_differs_by_seed(lance: Lance) -> None:
    fields, tensors = REQUESTS["x2t_video"]
    options = {**fields["options"], "temperature": 1.0, "top_p": 0.95}

    def tokens(seed: int) -> list[int]:
        result = run(lance, make_request({**fields, "options": options, "seed": seed}, tensors))
        return result[1]["token_ids"].tolist()

    assert tokens(1) == tokens(1)
    assert len({tuple(tokens(seed)) for seed in range(4)}) > 1


def test_no_request_holds_more_than_its_session_announced(lance: Lance) -> None:
    """Admission is by bytes and before tensors are seen: the announced size must be an upper
    bound.
    """
    for task in TASKS:
        request = request_of(task)
        prepare(lance, request)
        work = request.state
        caches = (
            [work.understanding.cache]
            if work.understanding
            else [*work.generation.cond, *work.generation.uncond]
        )
        held = sum(cache.k.nbytes + cache.v.nbytes for cache in caches)
        assert held <= request.session.nbytes, task


def test_a_longer_clip_moves_the_vision_grid(lance: Lance) -> None:
    """Nine frames see more than five; both are accepted in one preset."""
    fields, _ = REQUESTS["x2t_video"]
    sizes = [
        run(lance, make_request(fields, {"video": clip(frames)}))[0]["prompt_tokens"]
        for frames in (5, 9)
    ]
    assert sizes[0] < sizes[1]
