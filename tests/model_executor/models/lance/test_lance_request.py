# SPDX-License-Identifier: Apache-2.0
"""Tests of client requests to Lance: the task derived from modalities and tensors, sizes, options,
and error messages that name the allowed values.
"""

from typing import Any

import pytest
import torch
from lance_driver import clip, image

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.lance.config import LanceConfig, LanceOptions, Task
from vllm_omni.model_executor.models.lance.request import (
    GenerationInputs,
    find_task,
    parse_request_options,
    read_generation,
    read_question,
)
from vllm_omni.outputs import RequestFailed

IMAGE = {"image": image()}
VIDEO = {"video": clip()}
CONFIG = LanceConfig(max_latent_frames=31)


def params(**fields: Any) -> DiffusionParams:
    return DiffusionParams(session_id="s", **{"prompt": "a cat", **fields})


def task(fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    request = params(**fields)
    return find_task(request, parse_request_options(request), tensors)


def read(
    fields: dict[str, Any], tensors: dict[str, torch.Tensor], config: LanceConfig = CONFIG
) -> GenerationInputs:
    request = params(**fields)
    options = parse_request_options(request)
    return read_generation(
        request, options, find_task(request, options, tensors), tensors, config, LanceOptions()
    )


@pytest.mark.parametrize(
    ("fields", "tensors", "expected"),
    [
        ({}, {}, "t2i"),
        ({}, IMAGE, "image_edit"),
        ({"num_frames": 9}, {}, "t2v"),
        ({"num_frames": 9}, IMAGE, "i2v"),
        ({"num_frames": 9}, VIDEO, "video_edit"),
        ({"options": {"modalities": ["video"]}}, {}, "t2v"),
        ({"options": {"modalities": ["text"]}}, IMAGE, "x2t_image"),
        ({"options": {"modalities": ["text"]}}, VIDEO, "x2t_video"),
        ({"options": {"modalities": ["text"]}, "prompt": "hello"}, {}, "t2t"),
        ({"options": {"task": "video_edit"}}, VIDEO, "video_edit"),
        ({"options": {"task": "x2t_image"}}, IMAGE, "x2t_image"),
    ],
)
def test_the_task_follows_from_the_request(
    fields: dict[str, Any], tensors: dict[str, torch.Tensor], expected: str
) -> None:
    assert task(fields, tensors) == expected


@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        ({}, {**IMAGE, **VIDEO}, "either `image` or `video`"),
        ({}, {"mask": image()}, "unknown tensors"),
        ({}, VIDEO, "options.modalities"),
        (
            {"options": {"modalities": ["text"]}, "prompt": None},
            {},
            "needs an `image` or a `video`",
        ),
        ({"options": {"modalities": ["text", "image"]}}, IMAGE, "must name one of"),
        ({"options": {"task": "image_edit"}}, {}, "no image or video was sent"),
        ({"options": {"task": "x2t_video"}}, IMAGE, "an image was sent"),
        ({"options": {"task": "paint"}}, {}, "options"),
        ({"options": {"colour": 1}}, {}, "colour"),
        ({"options": {"cfg_interval": [0.9, 0.1]}}, {}, "low < high"),
        ({"options": {"cfg_renorm_type": "loud"}}, {}, "allowed: global, channel, none"),
        ({"options": {"resolution": "4k"}}, {}, "image_768res"),
        ({"options": {"temperature": -1}}, IMAGE, "temperature"),
    ],
)
def test_a_contradiction_is_refused(
    fields: dict[str, Any], tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(RequestFailed, match=message):
        task(fields, tensors)


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"prompt": ""}, "invalid_request", "prompt must not be empty"),
        ({"prompt": "  "}, "invalid_request", "prompt must not be empty"),
        ({"height": 1000, "width": 1024}, "unsupported_size", "multiples of 16 .* 1024x576"),
        ({"height": 2048, "width": 512}, "unsupported_size", "to 1024"),
        ({"height": 8192, "width": 8192}, "unsupported_size", "1048576 pixels"),
        ({"height": 1024, "width": 1024, "num_frames": 9}, "unsupported_size", "848x480"),
        ({"num_frames": 200}, "unsupported_size", "above 121"),
        ({"num_frames": 9, "num_images": 2}, "invalid_request", "num_images"),
        (
            {"guidance_scale": 3.0, "options": {"cfg_text_scale": 4.0}},
            "invalid_request",
            "contradicts",
        ),
        ({"actions": [["w"]]}, "invalid_request", "does not use actions"),
        ({"fps": 12.0}, "invalid_request", "does not use fps"),
        (
            {"num_frames": 9, "options": {"task": "t2i"}},
            "invalid_request",
            "does not use num_frames",
        ),
    ],
)
def test_a_generation_out_of_range_is_refused(
    fields: dict[str, Any], code: str, message: str
) -> None:
    with pytest.raises(RequestFailed, match=message) as failure:
        read(fields, {})
    assert failure.value.code == code


@pytest.mark.parametrize(
    ("tensors", "code"),
    [
        ({"image": torch.zeros(60, 90, dtype=torch.uint8)}, "invalid_image"),
        ({"image": torch.zeros(60, 90, 4, dtype=torch.uint8)}, "invalid_image"),
        ({"image": torch.zeros(60, 90, 3)}, "invalid_image"),
        ({"image": torch.zeros(0, 90, 3, dtype=torch.uint8)}, "invalid_image"),
        ({"image": torch.zeros(8, 9000, 3, dtype=torch.uint8)}, "invalid_image"),
        ({"video": torch.zeros(0, 60, 90, 3, dtype=torch.uint8)}, "invalid_video"),
        ({"video": torch.zeros(60, 90, 3, dtype=torch.uint8)}, "invalid_video"),
        ({"video": torch.zeros(2, 4, 4, 3, dtype=torch.uint8)}, "invalid_video"),
    ],
)
@pytest.mark.parametrize("reads", [False, True])
def test_a_broken_image_or_clip_is_refused(
    tensors: dict[str, torch.Tensor], code: str, reads: bool
) -> None:
    kind = (
        ("x2t_image" if "image" in tensors else "x2t_video")
        if reads
        else ("image_edit" if "image" in tensors else "video_edit")
    )
    request = params(options={"task": kind})
    options = parse_request_options(request)

    def read_media() -> None:
        if reads:
            read_question(request, options, kind, tensors, LanceOptions())  # type: ignore[arg-type]
        else:
            read_generation(request, options, kind, tensors, CONFIG, LanceOptions())  # type: ignore[arg-type]

    with pytest.raises(RequestFailed) as failure:
        read_media()
    assert failure.value.code == code


def test_defaults_are_the_released_ones() -> None:
    inputs = read({}, {})
    assert (inputs.size, inputs.num_steps, inputs.shift, inputs.guidance.scale, inputs.seed) == (
        (768, 768),
        30,
        3.5,
        4.0,
        42,
    )
    video = read({"num_frames": 50}, {})
    assert (video.size, video.num_frames, video.fps) == ((480, 848), 49, 12.0)


def test_an_edit_has_the_bucket_of_its_reference() -> None:
    assert read({}, {"image": image(0, 900, 1600)}).size == (576, 1024)
    assert read({"options": {"task": "video_edit"}}, {"video": clip(9)}).grid == (
        3,
        560 // 16,
        752 // 16,
    )


def test_the_image_checkpoint_makes_no_videos() -> None:
    with pytest.raises(RequestFailed, match="Lance_3B_Video"):
        read({"num_frames": 9}, {}, LanceConfig())


def test_a_question_may_be_missing_but_not_empty() -> None:
    request = DiffusionParams(session_id="s", options={"task": "x2t_image"})
    options = parse_request_options(request)
    assert (
        "detailed and accurate description of the image"
        in read_question(request, options, "x2t_image", IMAGE, LanceOptions()).prompt
    )
    empty = DiffusionParams(session_id="s", prompt=" ", options={"task": "x2t_image"})
    with pytest.raises(RequestFailed, match="prompt must not be empty"):
        read_question(empty, options, "x2t_image", IMAGE, LanceOptions())


@pytest.mark.parametrize(
    ("task", "tensors", "shown", "message"),
    [("x2t_image", IMAGE, 1, "there are 1 turns$"), ("t2t", {}, 0, "no image")],
)
def test_an_image_belongs_to_an_existing_turn(
    task: Task, tensors: dict[str, torch.Tensor], shown: int, message: str
) -> None:
    """An image can belong to any existing turn of the conversation. The turns keep their order and
    text.
    """
    turns = [{"role": "user", "text": "What?"}]
    request = params(options={"task": task, "turns": turns})
    question = read_question(request, parse_request_options(request), task, tensors, LanceOptions())
    assert [(turn.role, turn.text) for turn in question.messages] == [("user", "What?")]
    wrong = params(options={"task": task, "turns": turns, "picture_turn": shown})
    with pytest.raises(RequestFailed, match=message):
        read_question(wrong, parse_request_options(wrong), task, tensors, LanceOptions())


def test_more_tokens_than_served_are_refused() -> None:
    request = params(options={"task": "x2t_image", "max_tokens": 5000})
    with pytest.raises(RequestFailed, match="above this server's 2048"):
        read_question(request, parse_request_options(request), "x2t_image", IMAGE, LanceOptions())


@pytest.mark.parametrize(
    "fields",
    [
        {"num_inference_steps": 5},
        {"guidance_scale": 2.0},
        {"negative_prompt": "fog"},
        {"height": 64},
        {"fps": 8.0},
    ],
)
def test_image_parameters_of_a_question_are_refused(fields: dict[str, Any]) -> None:
    """An understanding request that sets image parameters is refused, because these parameters have
    no effect on generated text.
    """
    request = params(options={"task": "t2t"}, **fields)
    with pytest.raises(RequestFailed, match=f"does not use {next(iter(fields))}"):
        read_question(request, parse_request_options(request), "t2t", {}, LanceOptions())
