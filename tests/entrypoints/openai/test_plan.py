# SPDX-License-Identifier: Apache-2.0
"""Conversion of HTTP requests to engine requests: the served model's default settings, sizes and
lengths, and the seeds.
"""

import dataclasses
from typing import Any

import msgspec
import pytest

from vllm_omni.entrypoints.errors import ApiError
from vllm_omni.entrypoints.openai.engine_requests import (
    fit_size,
    plan_images,
    plan_video,
    plan_video_edit,
)
from vllm_omni.entrypoints.openai.protocol import ImageGenerationRequest, VideoRequest, read_request
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.inputs import Lora
from vllm_omni.model_executor.models.capabilities import Capabilities, ImageSizes

IMAGE_MODEL = Capabilities(
    tasks=("text_to_image", "image_edit", "text_to_video"),
    num_inference_steps=20,
    guidance_scale=4.0,
    negative_prompt=True,
    images_per_request=4,
    frame_stride=4,
    max_num_frames=81,
)


def served(capabilities: Capabilities = IMAGE_MODEL, **changes: Any) -> ServedModel:
    return ServedModel(
        names=("m", "alias"),
        capabilities=msgspec.structs.replace(capabilities, **changes),
        width=832,
        height=480,
        max_pixels=832 * 480,
        max_sessions=4,
    )


def images(**fields: Any) -> Any:
    return plan_images(read_request(ImageGenerationRequest, {"prompt": "p", **fields}), served())


def video(model: ServedModel | None = None, **fields: Any) -> Any:
    return plan_video(
        read_request(VideoRequest, {"prompt": "p", **fields}), model or served(), has_image=False
    )


def test_defaults_come_from_the_model() -> None:
    """By default, the size comes from the deployment, the number of steps and the guidance scale
    come from the model family, and the endpoint generates the seed.
    """
    (params,) = images().requests()
    assert (params.width, params.height, params.num_images, params.one_shot) == (832, 480, 1, True)
    assert (params.num_inference_steps, params.guidance_scale, params.num_frames) == (20, 4.0, None)
    assert params.seed is not None and params.prompt == "p" and params.negative_prompt is None


@pytest.mark.parametrize("size", [{}, {"size": "auto"}, {"size": "160x96"}])
def test_width_and_height_are_an_alternative_to_size(size: dict[str, str]) -> None:
    """Clients of vLLM-Omni (LiteLLM, ComfyUI) send `width` and `height` instead of `size`. In form
    data, these values are text.
    """
    (params,) = images(width=160, height=96, **size).requests()
    form = read_request(
        VideoRequest, {"prompt": "p", "width": "160", "height": "96", "n": "1"}, is_form=True
    )
    sampling = plan_video(form, served(), has_image=False).sampling
    assert (params.width, params.height) == (sampling.width, sampling.height) == (160, 96)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"width": 160}, "go together, or send size: height is missing"),
        (
            {"width": 160, "height": 96, "size": "320x96"},
            "size 320x96 and width x height 160x96 differ",
        ),
        ({"width": 161, "height": 96}, "size 161x96: width must be a multiple of 16"),
    ],
)
def test_half_a_size_and_two_sizes_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ApiError, match=says):
        images(**fields)


@pytest.mark.parametrize(
    ("fields", "guidance"),
    [
        ({"true_cfg_scale": 2.5}, 2.5),
        ({"true_cfg_scale": 1.0}, 1.0),
        ({"true_cfg_scale": 1.0, "guidance_scale": 7.5}, 7.5),
        ({"true_cfg_scale": 7.5, "guidance_scale": 7.5}, 7.5),
    ],
)
def test_true_cfg_scale_is_another_name_of_guidance_scale(
    fields: dict[str, float], guidance: float
) -> None:
    """vLLM-Omni's ComfyUI nodes send both `true_cfg_scale` and `guidance_scale`. A value of 1 means
    no guidance.
    """
    (params,) = images(**fields, vae_use_slicing=False, vae_use_tiling=True).requests()
    assert (params.guidance_scale, params.options) == (guidance, {})


def test_true_cfg_scale_is_an_option_of_pipelines_that_have_it() -> None:
    """If a pipeline has a `true_cfg_scale` option, the field sets that option and is not an alias
    of `guidance_scale`.
    """
    request = read_request(
        ImageGenerationRequest, {"prompt": "p", "true_cfg_scale": 2.0, "guidance_scale": 3.5}
    )
    (params,) = plan_images(request, served(true_cfg_scale=True)).requests()
    assert (params.guidance_scale, params.options) == (3.5, {"true_cfg_scale": 2.0})


def test_guidance_that_a_model_lacks_is_refused() -> None:
    """A model without guidance accepts a `true_cfg_scale` of 1, which means no guidance, and
    rejects any other value.
    """
    fixed = served(guidance_scale=None)
    for scale, allowed in ((1.0, True), (2.0, False)):
        request = read_request(ImageGenerationRequest, {"prompt": "p", "true_cfg_scale": scale})
        if allowed:
            assert plan_images(request, fixed).sampling.guidance is None
        else:
            with pytest.raises(ApiError, match="cannot change its true_cfg_scale"):
                plan_images(request, fixed)
    with pytest.raises(ApiError, match="send only guidance_scale"):
        images(guidance_scale=3.0, true_cfg_scale=2.0)


@pytest.mark.parametrize(
    "lora", [{"name": "snow", "scale": 0.5}, {"lora_name": "snow", "lora_scale": 0.5, "int_id": 7}]
)
def test_one_adapter_alone_may_be_an_object(lora: dict[str, Any]) -> None:
    """A single adapter may be given as an object instead of a list, and the field names of
    vLLM-Omni's clients are accepted too.
    """
    assert images(lora=lora).sampling.lora == [Lora(name="snow", scale=0.5)]


def test_an_adapter_is_selected_by_its_name_as_model() -> None:
    """An adapter name in `model` selects that adapter, as in vLLM. Adapters in `lora` are added to
    the adapter in `model`. If `lora` names the same adapter, the strength given in `lora` applies.
    """
    model = dataclasses.replace(served(), adapters=lambda: {"snow", "ink"})
    for fields, lora in (
        ({"model": "m"}, None),
        ({"model": "snow"}, [Lora(name="snow")]),
        ({"model": "snow", "lora": [{"name": "ink"}]}, [Lora(name="snow"), Lora(name="ink")]),
        (
            {"model": "snow", "lora": [{"name": "snow", "scale": 0.5}]},
            [Lora(name="snow", scale=0.5)],
        ),
    ):
        request = read_request(VideoRequest, {"prompt": "p", **fields})
        sampling = plan_video(request, model, has_image=False).sampling
        assert (sampling.lora, sampling.model) == (lora, fields["model"])
    with pytest.raises(ApiError, match="'wool' does not exist; served: m, alias, ") as refused:
        plan_video(
            read_request(VideoRequest, {"prompt": "p", "model": "wool"}), model, has_image=False
        )
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"steps": 3}, "Unknown parameter: 'steps'; use num_inference_steps instead"),
        ({"frames": 3}, "use num_frames instead"),
        ({"first_frame": "x"}, "use input_reference instead"),
        ({"flow_shift": 3.0}, "options of the model itself go into extra_params"),
        (
            {"lora": {"name": "snow", "local_path": "/x"}},
            "POST /v1/load_lora_adapter, then send its name",
        ),
        ({"lora": [{"name": "snow", "weight": 1}]}, "allowed: name, scale"),
    ],
)
def test_a_field_of_another_server_is_refused_with_this_servers_name(
    fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(ApiError, match=says):
        video(**fields)


def test_n_is_split_into_requests_with_consecutive_seeds() -> None:
    """Ten images with at most four per request are split into 4 + 4 + 2, and each request has a
    separate session.
    """
    requests = images(n=10, seed=100).requests()
    assert [(params.num_images, params.seed) for params in requests] == [
        (4, 100),
        (4, 104),
        (2, 108),
    ]
    assert len({params.session_id for params in requests}) == 3


def test_zero_is_a_value() -> None:
    """A guidance of 0.0 or a seed of 0 is used rather than treated as missing."""
    (params,) = images(guidance_scale=0.0, seed=0).requests()
    assert (params.guidance_scale, params.seed) == (0.0, 0)


@pytest.mark.parametrize(
    ("width", "height", "fitted"),
    [
        (1920, 1080, (512, 288)),
        (1080, 1920, (288, 512)),
        (3000, 40, (512, 16)),
        (500, 500, (496, 496)),
    ],
)
def test_no_side_becomes_longer_than_the_model_allows(
    width: int, height: int, fitted: tuple[int, int]
) -> None:
    """An image to be edited is scaled down so that its longer side does not exceed the model's
    limit.
    """
    model = served(max_side=512)
    assert fit_size(width, height, model.images) == fitted
    request = read_request(ImageGenerationRequest, {"prompt": "p"})
    sampling = plan_images(request, model, input_size=(width, height)).sampling
    assert (sampling.width, sampling.height) == fitted


def test_a_side_that_is_too_long_is_refused_with_a_near_size() -> None:
    request = read_request(ImageGenerationRequest, {"prompt": "p", "size": "640x320"})
    with pytest.raises(ApiError, match=r"both at most 512.*allowed and near: 512x256"):
        plan_images(request, served(max_side=512))


def test_images_may_have_other_sizes_than_videos() -> None:
    """Images and videos have separate default sizes and limits."""
    model = served(pictures=ImageSizes(width=512, height=512, max_pixels=1024 * 1024))
    image = plan_images(read_request(ImageGenerationRequest, {"prompt": "p"}), model).sampling
    assert (image.width, image.height) == (512, 512)
    clip = video(model).sampling
    assert (clip.width, clip.height) == (832, 480)
    assert plan_images(
        read_request(ImageGenerationRequest, {"prompt": "p", "size": "1024x1024"}), model
    )
    with pytest.raises(ApiError, match="width x height at most 399360"):
        video(model, size="1024x1024")


@pytest.mark.parametrize(
    ("fields", "num_frames", "fps"),
    [
        ({}, 81, 16.0),
        ({"seconds": "4"}, 65, 16.0),
        ({"seconds": 2.5}, 41, 16.0),
        ({"seconds": "2", "fps": 24}, 49, 24.0),
        ({"num_frames": 1}, 1, 16.0),
        ({"num_frames": 33, "fps": 8}, 33, 8.0),
        ({"seconds": 0.01}, 1, 16.0),
    ],
)
def test_the_length_of_a_video(fields: dict[str, Any], num_frames: int, fps: float) -> None:
    """A video's number of frames has the form 1 + 4 k and is the nearest such number to the
    requested duration.
    """
    plan = video(**fields)
    assert (plan.num_frames, plan.fps) == (num_frames, fps)


@pytest.mark.parametrize(
    ("seconds", "message"), [("8", "5.0625 seconds.*values 4$"), (12, "values 4$")]
)
def test_an_impossible_length_is_refused_with_the_possible_ones(seconds: Any, message: str) -> None:
    """The error for an impossible length lists the possible values, including those of OpenAI's
    client.
    """
    with pytest.raises(ApiError, match=message):
        video(seconds=seconds)
    with pytest.raises(ApiError, match=r"values none$"):
        video(seconds=seconds, fps=60)


@pytest.mark.parametrize(
    ("changes", "fields", "param"),
    [
        ({"num_inference_steps": None}, {"num_inference_steps": 4}, "num_inference_steps"),
        ({"guidance_scale": None}, {"guidance_scale": 1.0}, "guidance_scale"),
        ({"negative_prompt": False}, {"negative_prompt": "x"}, "negative_prompt"),
        ({"tasks": ("text_to_image",)}, {}, None),
        ({}, {"camera_actions": [["w"]]}, "camera_actions"),
        ({}, {"prompts": [{"prompt": "snow", "chunk": 1}]}, "prompts"),
    ],
)
def test_fields_that_the_model_does_not_support_are_refused(
    changes: dict[str, Any], fields: dict[str, Any], param: str | None
) -> None:
    """A request with a field that the model does not support gets 400 `unsupported_by_model`, with
    the supported tasks.
    """
    with pytest.raises(ApiError, match="it can: ") as refused:
        video(served(**changes), **fields)
    assert (refused.value.status, refused.value.code, refused.value.param) == (
        400,
        "unsupported_by_model",
        param,
    )


def test_a_required_start_image_is_named() -> None:
    """If a model requires a start image, the error for a request without one names the missing
    image. A model that cannot use a start image rejects a request that contains one.
    """
    model = served(tasks=("image_to_video",))
    request = read_request(VideoRequest, {"prompt": "p"})
    with pytest.raises(ApiError, match="send input_reference"):
        plan_video(request, model, has_image=False)
    assert plan_video(request, model, has_image=True).num_frames == 81
    with pytest.raises(ApiError, match="cannot start a video from an image"):
        plan_video(request, served(), has_image=True)


@pytest.mark.parametrize(("clip_frames", "num_frames"), [(1, 1), (9, 9), (12, 9), (72, 69)])
def test_an_edited_video_is_as_long_as_the_clip(clip_frames: int, num_frames: int) -> None:
    """An edited video is as long as its input clip, cut to 1 + 4 k frames at the model's frame
    rate.
    """
    model = served(tasks=("text_to_video", "video_edit"), fps=12.0)
    plan = plan_video_edit(read_request(VideoRequest, {"prompt": "p"}), model, clip_frames)
    assert (plan.num_frames, plan.fps) == (num_frames, 12.0)


@pytest.mark.parametrize("fields", [{"seconds": "4"}, {"num_frames": 9}, {"fps": 24}])
def test_a_length_for_an_edited_video_is_refused(fields: dict[str, Any]) -> None:
    request = read_request(VideoRequest, {"prompt": "p", **fields})
    with pytest.raises(ApiError, match="follows the video that is edited"):
        plan_video_edit(request, served(tasks=("text_to_video", "video_edit")), 9)
    with pytest.raises(ApiError, match="cannot edit a video"):
        plan_video_edit(request, served(), 9)


def test_the_model_may_be_called_by_any_of_its_names() -> None:
    """A client may use any of the model's names, and the reply contains the name that the client
    used.
    """
    assert images(model="alias").sampling.model == "alias"
    with pytest.raises(ApiError, match="served: m, alias") as refused:
        images(model="other")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
