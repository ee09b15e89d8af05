# SPDX-License-Identifier: Apache-2.0
"""Tests of Lance, run step by step in this process: every task, mixed batches, retries, text
generated in parts, and the step cache.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.chunks import finish, step
from helpers.unreachable_weights import offloaded_out_of_reach
from lance_driver import REQUESTS, load_lance, make_request, prepare, request_of, run

from vllm_omni.model_executor.models.lance.config import TASKS
from vllm_omni.model_executor.models.lance.pipeline import Lance
from vllm_omni.outputs import RequestFailed

SMALL = {"max_image_pixels": 224 * 304, "max_video_pixels": 64 * 96, "max_num_frames": 9}
TOLERANCE = 1e-4
"""Tolerance for fp32 latents of magnitude 1 after three guided steps. Results are not
bit-identical, because batched matrix products sum in a different order.
"""


@pytest.fixture(scope="module")
def lance(checkpoint: Path) -> Lance:
    return load_lance(checkpoint, **SMALL)


def latents_of(lance: Lance, task: str, **changes: Any) -> torch.Tensor:
    return run(lance, request_of(task, output="latents", **changes))[1]["latents"]


def test_every_task_returns_its_kind_of_result(lance: Lance) -> None:
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


def test_no_layer_runs_before_its_weights_are_fetched(lance: Lance, checkpoint: Path) -> None:
    offloaded = offloaded_out_of_reach(lambda: load_lance(checkpoint, **SMALL))
    assert torch.equal(latents_of(offloaded, "i2v"), latents_of(lance, "i2v"))


def test_a_mixed_batch_equals_solo_runs(lance: Lance) -> None:
    """When all seven tasks are started one step apart, they share engine steps and produce the same
    results as when each runs alone.
    """
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
def test_request_fields_change_the_result(lance: Lance, task: str, change: dict[str, Any]) -> None:
    if "options" in change:
        change = {"options": {**REQUESTS[task][0].get("options", {}), **change["options"]}}
    assert (latents_of(lance, task, **change) - latents_of(lance, task)).abs().max() > 1e-2


def test_image_guidance_extrapolates_from_the_result_without_the_image(lance: Lance) -> None:
    """After one step with an image guidance scale of 2 and no text guidance, the velocity is twice
    the velocity with the image, minus the velocity with only the text.
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


def test_image_guidance_combines_with_text_guidance_and_batches(lance: Lance) -> None:
    """With image guidance, each of several images in a request equals the same image generated
    separately.
    """
    options = {"resolution": "image_256res", "cfg_img_scale": 1.5}
    changes = {"options": options, "output": "latents", "seed": 5}
    _, two = run(lance, request_of("image_edit", num_images=2, **changes))
    _, second = run(lance, request_of("image_edit", **{**changes, "seed": 6}))
    torch.testing.assert_close(two["latents"][1], second["latents"][0], atol=1e-5, rtol=0)


def test_image_guidance_without_an_image_is_refused(lance: Lance) -> None:
    with pytest.raises(RequestFailed, match="applies to edits only; omit it with t2i"):
        run(lance, request_of("t2i", options={"cfg_img_scale": 1.5}))


def test_the_first_frame_is_pinned(lance: Lance) -> None:
    """The first frame's latents equal the start image's latents, whatever the number of steps."""
    many = latents_of(lance, "i2v", num_inference_steps=5)
    few = latents_of(lance, "i2v")
    assert torch.equal(many[0, :, 0], few[0, :, 0])
    assert not torch.equal(many[0, :, 1:], few[0, :, 1:])


def test_image_n_of_a_request_has_the_seed_plus_n(lance: Lance) -> None:
    several = latents_of(lance, "t2i", seed=5, num_images=3)
    for number in range(3):
        alone = latents_of(lance, "t2i", seed=5 + number)
        torch.testing.assert_close(several[number : number + 1], alone, atol=TOLERANCE, rtol=0)


def test_a_failed_step_can_be_repeated(lance: Lance, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed step must not change any state, because the runner repeats a failed batch one
    request at a time.
    """
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
            # A CPU with AMX rounds batched products differently, so a pixel may differ by one
            # level.
            assert difference.abs().max() <= (name in ("images", "frames"))


def test_a_text_in_parts_equals_the_whole_text(lance: Lance) -> None:
    """Text generated in parts of four tokens, with one request per part in the same session, equals
    text generated at once. An aborted part leaves no trace.
    """
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
    with pytest.raises(RequestFailed, match="is complete; close the session"):
        prepare(lance, make_request({"session_id": "talk"}), session)


def test_a_session_with_an_unfinished_text_refuses_another_question(lance: Lance) -> None:
    fields, tensors = REQUESTS["x2t_image"]
    first = make_request({**fields, "options": {**fields["options"], "chunk_tokens": 2}}, tensors)
    session = lance.new_session(first.params)
    run(lance, first, session)
    with pytest.raises(RequestFailed, match="this session is generating a text"):
        prepare(lance, make_request(fields, tensors), session)


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(lance: Lance) -> None:
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


def test_a_request_holds_at_most_the_announced_bytes(lance: Lance) -> None:
    """A request's announced size must be an upper bound on the request's memory use, because
    admission compares sizes before the tensors arrive.
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


# -- step cache ------------------------------------------------------------------------------------

CAT = {"height": 64, "width": 96, "output": "latents"}


def generate(
    lance: Lance, monkeypatch: pytest.MonkeyPatch, *wanted: dict[str, Any]
) -> tuple[list[tuple[dict[str, Any], torch.Tensor]], int]:
    """Return the metadata and latents of a batch, and the number of denoise forward passes that it
    ran.
    """
    forwards, velocity = [], lance.network.velocity
    monkeypatch.setattr(
        lance.network, "velocity", lambda hidden: forwards.append(1) or velocity(hidden)
    )
    batch = [request_of("t2i", **CAT, **fields) for fields in wanted]
    for request in batch:
        prepare(lance, request)
    while running := [request for request in batch if request.step < request.num_steps]:
        step(lance, running)
    monkeypatch.undo()
    results = [finish(lance, request) for request in batch]
    return [(meta, tensors["latents"]) for meta, tensors in results], len(forwards)


def cached(threshold: float, **options: Any) -> dict[str, Any]:
    return {"num_inference_steps": 12, "options": {"step_cache": threshold, **options}}


def test_the_step_cache_saves_forwards(lance: Lance, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step cache saves forward passes unless its threshold is below every change between
    steps.
    """
    ((_, whole),), steps = generate(lance, monkeypatch, {"num_inference_steps": 12})
    ((meta, same),), all_steps = generate(lance, monkeypatch, cached(1e-6))
    assert torch.equal(same, whole) and steps == all_steps
    assert meta["step_cache"] == {"threshold": 1e-6, "computed_share": 1.0}
    ((meta, reused),), fewer = generate(lance, monkeypatch, cached(3.0))
    assert 2 <= fewer < steps and meta["step_cache"]["computed_share"] == pytest.approx(
        fewer / steps, abs=1e-4
    )
    assert 0 < (reused - whole).norm() / whole.norm() < 1


def test_the_step_cache_computes_where_guidance_starts_or_ends(
    lance: Lance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step cache never skips a step at which guidance starts or ends, because a cached
    prediction of one branch cannot replace predictions of two branches.
    """
    fields = cached(100.0, cfg_interval=[0.6, 0.9])
    ((meta, latents),), forwards = generate(lance, monkeypatch, fields)
    assert forwards == 4 and meta["step_cache"]["computed_share"] == pytest.approx(4 / 12, abs=1e-4)
    assert latents.isfinite().all()


def test_a_step_cache_changes_no_other_request_of_the_batch(
    lance: Lance, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"num_inference_steps": 8, "seed": 2}
    alone = [generate(lance, monkeypatch, fields)[0][0][1] for fields in (cached(3.0), plain)]
    together, _ = generate(lance, monkeypatch, cached(3.0), plain)
    for (_, found), expected in zip(together, alone, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
