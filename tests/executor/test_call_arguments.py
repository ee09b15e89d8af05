# SPDX-License-Identifier: Apache-2.0
"""A request's options become arguments of the pipeline's `__call__`, and client mistakes become
errors.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_omni.config import OmniConfig
from vllm_omni.executor.call_arguments import PipelineCall, PipelineInfo, pipeline_call
from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.diffusers_pipeline.options import DiffusersOptions
from vllm_omni.model_executor.models.diffusers_pipeline.qwen_image import (
    ASPECT_RATIOS,
    PROMPT_SUFFIXES,
)
from vllm_omni.model_executor.models.diffusers_pipeline.tasks import capabilities
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed

CPU = torch.device("cpu")
Image = torch.zeros(8, 8, 3, dtype=torch.uint8)


@pytest.fixture(scope="module")
def info(tiny_pipelines: Callable[[str], Path]) -> Callable[..., PipelineInfo]:
    """Return a function, called as `info(layout, pipeline_class=None)`, that returns a tiny
    pipeline's `PipelineInfo`.
    """
    import diffusers

    @cache
    def of(layout: str, pipeline_class: str | None = None) -> PipelineInfo:
        cls = getattr(diffusers, pipeline_class or "DiffusionPipeline")
        return PipelineInfo.of_pipeline(cls.from_pretrained(tiny_pipelines(layout)))

    return of


def call(
    info: PipelineInfo, tensors: dict[str, torch.Tensor] | None = None, **fields: Any
) -> PipelineCall:
    options = DiffusersOptions.parse(fields.pop("deployment", {}))
    prompt = fields.pop("prompt", "a fox")
    params = DiffusionParams(session_id="s", prompt=prompt, **fields)
    return pipeline_call(params, tensors or {}, info, options, CPU)


def refused(
    info: PipelineInfo, tensors: dict[str, torch.Tensor] | None = None, **fields: Any
) -> RequestFailed:
    with pytest.raises(RequestFailed) as failure:
        call(info, tensors, **fields)
    return failure.value


def test_sizes_of_the_pipelines(info: Callable[..., PipelineInfo]) -> None:
    """A pipeline's size multiple and frame stride are derived from its loaded components."""
    assert [info(layout).size_multiple for layout in ("qwen_image", "flux", "sd3", "wan")] == [
        16,
        16,
        16,
        16,
    ]
    assert [info(layout).frame_stride for layout in ("qwen_image", "wan")] == [1, 4]
    assert [info(layout).text_widths for layout in ("qwen_image", "flux", "sd3", "wan")] == [
        (32,),
        (32,),
        (64,),
        (32,),
    ]


def test_guidance_scale_sets_the_guidance_argument_of_the_pipeline(
    info: Callable[..., PipelineInfo],
) -> None:
    """`guidance_scale` sets the pipeline's guidance argument. Zero is a valid value.

    Qwen-Image uses classifier-free guidance (`true_cfg_scale`). FLUX uses distilled guidance
    (`guidance_scale`). Wan has only one guidance argument.
    """
    assert call(info("qwen_image"), guidance_scale=3.0).arguments["true_cfg_scale"] == 3.0
    assert call(info("flux"), guidance_scale=3.0).arguments["guidance_scale"] == 3.0
    assert call(info("wan"), guidance_scale=3.0).arguments["guidance_scale"] == 3.0
    assert call(info("wan"), guidance_scale=0.0).arguments["guidance_scale"] == 0.0
    assert call(info("flux"), options={"true_cfg_scale": 2.0}).arguments["true_cfg_scale"] == 2.0
    both = call(info("qwen_image"), guidance_scale=3.0, options={"true_cfg_scale": 2.0})
    # The pipeline's own argument takes precedence, because endpoints always send guidance_scale.
    assert both.arguments["true_cfg_scale"] == 2.0


def test_aspect_ratios_and_suffixes_of_qwen_image(info: Callable[..., PipelineInfo]) -> None:
    """Qwen-Image's aspect ratios and prompt suffixes match its model card.

    The quality suffix is in the language of the prompt and is off by default.
    """
    assert all(side % 16 == 0 for size in ASPECT_RATIOS.values() for side in size)
    wide = call(info("qwen_image"), width=64, height=64, options={"aspect_ratio": "16:9"})
    assert (wide.arguments["width"], wide.arguments["height"]) == (1664, 928)
    assert call(info("qwen_image")).arguments["prompt"] == "a fox"
    english = call(info("qwen_image"), options={"prompt_suffix": "auto"})
    assert english.arguments["prompt"] == "a fox" + PROMPT_SUFFIXES["en"]
    assert english.meta["prompt_suffix"] == PROMPT_SUFFIXES["en"]
    chinese = call(
        info("qwen_image"), prompt="一只狐狸", deployment={"defaults": {"prompt_suffix": "auto"}}
    )
    assert chinese.arguments["prompt"] == "一只狐狸" + PROMPT_SUFFIXES["zh"]
    japanese = call(info("qwen_image"), prompt="森のキツネ", options={"prompt_suffix": "auto"})
    assert japanese.arguments["prompt"].endswith(PROMPT_SUFFIXES["en"])
    forced = call(info("qwen_image"), options={"prompt_suffix": "zh"})
    assert forced.arguments["prompt"].endswith(PROMPT_SUFFIXES["zh"])
    assert "prompt_suffix" not in call(info("sd3"), options={"prompt_suffix": "auto"}).meta


def test_deployment_defaults_yield_to_the_request(info: Callable[..., PipelineInfo]) -> None:
    """A deployment's default applies only if a request omits the field."""
    deployment = {
        "defaults": {"true_cfg_scale": 4.0, "negative_prompt": " ", "num_inference_steps": 7}
    }
    plain = call(info("qwen_image"), deployment=deployment)
    assert (
        plain.arguments["true_cfg_scale"],
        plain.arguments["negative_prompt"],
        plain.num_steps,
    ) == (4.0, " ", 7)
    own = call(
        info("qwen_image"),
        deployment=deployment,
        negative_prompt="",
        num_inference_steps=3,
        guidance_scale=1,
    )
    assert (own.arguments["true_cfg_scale"], own.arguments["negative_prompt"], own.num_steps) == (
        1.0,
        "",
        3,
    )


def test_deployment_defaults_are_checked_at_startup() -> None:
    """An invalid deployment default is rejected at startup, and the error lists the allowed
    values.
    """
    with pytest.raises(ValueError, match="allowed values: 'auto', 'off'"):
        DiffusersOptions.parse({"defaults": {"prompt_suffix": "zh"}})
    with pytest.raises(ValueError, match=r"omni\.model\.defaults: .*width"):
        DiffusersOptions.parse({"defaults": {"width": 0}})


def test_a_missing_seed_is_generated_and_returned(info: Callable[..., PipelineInfo]) -> None:
    """If a request has no seed, one is generated and returned. Two requests without a seed yield
    different results, and each can be repeated with the returned seed.
    """
    assert call(info("sd3")).seed != call(info("sd3")).seed
    assert call(info("sd3"), seed=0).seed == 0


LATER_TENSORS = {
    "prompt_embeds": torch.zeros(4, 32),
    "prompt_embeds_mask": torch.ones(4, dtype=torch.int64),
}


@pytest.mark.parametrize(
    ("layout", "fields", "code", "words"),
    [
        ("qwen_image", {"prompt": None}, "invalid_request", "a prompt or the tensor prompt_embeds"),
        (
            "qwen_image",
            {"width": 100, "height": 64},
            "unsupported_size",
            "multiples of 16, for example 96x64",
        ),
        ("qwen_image", {"width": 64}, "invalid_request", "both width and height"),
        (
            "qwen_image",
            {"width": 4096, "height": 4096},
            "unsupported_size",
            "exceeds the limit of 4194304 pixels",
        ),
        ("qwen_image", {"options": {"aspect_ratio": "5:4"}}, "invalid_request", "known: 1:1, 16:9"),
        (
            "sd3",
            {"options": {"aspect_ratio": "1:1"}},
            "invalid_request",
            "has none; send width and height",
        ),
        ("qwen_image", {"num_frames": 5}, "invalid_request", "generates images"),
        ("qwen_image", {"num_images": 9}, "invalid_request", "more than 8"),
        ("qwen_image", {"num_inference_steps": 201}, "invalid_request", "more than 200"),
        (
            "qwen_image",
            {"options": {"strength": 0.5}},
            "invalid_request",
            "has no option 'strength'; it has",
        ),
        ("qwen_image", {"options": {"generator": 1}}, "invalid_request", "no option 'generator'"),
        ("qwen_image", {"options": {"callback_on_step_end": 1}}, "invalid_request", "no option"),
        (
            "qwen_image",
            {"options": {"attention_kwargs": {"scale": 1}}},
            "invalid_request",
            "no option",
        ),
        (
            "qwen_image",
            {"options": {"sigmas": ["a"]}},
            "invalid_request",
            "list of 1 to 1000 numbers",
        ),
        (
            "qwen_image",
            {"options": {"max_sequence_length": 10**9}},
            "invalid_request",
            "from 1 to 4096",
        ),
        (
            "qwen_image",
            {"options": {"prompt_suffix": "fr"}},
            "invalid_request",
            "off, auto, en, zh",
        ),
        ("qwen_image", {"chunk_index": 1}, "invalid_request", "no sessions"),
        ("qwen_image", {"actions": [["w"]]}, "invalid_request", "worlds"),
        ("wan", {"num_frames": 6}, "invalid_request", "for example 5"),
        ("wan", {"num_frames": 261}, "invalid_request", "more than 257"),
        ("wan", {"num_images": 2}, "invalid_request", "one result per request"),
    ],
)
def test_refusals(
    info: Callable[..., PipelineInfo], layout: str, fields: dict[str, Any], code: str, words: str
) -> None:
    """An invalid request is refused before the pipeline runs, with an error that states the mistake
    and the allowed values.
    """
    failure = refused(info(layout), **fields)
    assert failure.code == code and words in failure.message


@pytest.mark.parametrize(
    ("layout", "tensors", "code", "words"),
    [
        ("qwen_image", {"image": Image}, "invalid_request", "takes no tensor 'image'; it takes"),
        ("qwen_image", {"nonsense": Image}, "invalid_request", "no tensor 'nonsense'"),
        (
            "qwen_image",
            {"prompt_embeds": torch.zeros(4, 33)},
            "invalid_request",
            "32 wide for this model, got 33",
        ),
        (
            "qwen_image",
            {"prompt_embeds": torch.zeros(1, 4, 32)},
            "invalid_request",
            "[tokens, width]",
        ),
        ("qwen_image", {"prompt_embeds": torch.full((4, 32), torch.nan)}, "invalid_request", "NaN"),
        (
            "qwen_image",
            {"prompt_embeds": torch.zeros(4, 32, dtype=torch.int64)},
            "invalid_request",
            "floating point",
        ),
        ("qwen_image", {"prompt_embeds": torch.zeros(0, 32)}, "invalid_request", "empty"),
        (
            "qwen_image",
            {**LATER_TENSORS, "prompt_embeds_mask": torch.ones(5, dtype=torch.int64)},
            "invalid_request",
            "one entry for each token",
        ),
        (
            "qwen_image",
            {**LATER_TENSORS, "prompt_embeds_mask": torch.full((4,), 2)},
            "invalid_request",
            "0 and 1",
        ),
        (
            "qwen_image",
            {"prompt_embeds_mask": LATER_TENSORS["prompt_embeds_mask"]},
            "invalid_request",
            "prompt_embeds",
        ),
        ("flux", {"pooled_prompt_embeds": torch.zeros(1, 32)}, "invalid_request", "[width]"),
        ("flux", {"ip_adapter_image": Image}, "invalid_request", "no tensor 'ip_adapter_image'"),
        ("wan", {"video": Image}, "invalid_request", "no tensor 'video'"),
    ],
)
def test_refused_tensors(
    info: Callable[..., PipelineInfo],
    layout: str,
    tensors: dict[str, torch.Tensor],
    code: str,
    words: str,
) -> None:
    """Tensors with wrong names, shapes, dtypes or values are rejected."""
    prompt = None if any("embeds" in name for name in tensors) else "a fox"
    failure = refused(info(layout), tensors, prompt=prompt)
    assert failure.code == code and words in failure.message


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (torch.zeros(8, 8, 3), "must be uint8, got float32"),
        (torch.zeros(8, 8, 4, dtype=torch.uint8), "must be [H, W, 3]"),
        (torch.zeros(8, dtype=torch.uint8), "must be [H, W, 3]"),
        (torch.zeros(0, 8, 3, dtype=torch.uint8), "1 to 8192 pixels"),
        (torch.zeros(1, 9000, 3, dtype=torch.uint8), "1 to 8192 pixels"),
    ],
)
def test_invalid_images_are_refused(
    info: Callable[..., PipelineInfo], image: torch.Tensor, words: str
) -> None:
    """An edit's input image is rejected if its dtype, number of channels or size is wrong."""
    failure = refused(info("qwen_image", "QwenImageImg2ImgPipeline"), {"image": image})
    assert failure.code == "invalid_image" and words in failure.message


def test_an_edit_without_its_image_is_refused(info: Callable[..., PipelineInfo]) -> None:
    """An edit without an image is refused, even if the pipeline class gives the image argument a
    default.
    """
    assert "needs an image" in refused(info("qwen_image", "QwenImageImg2ImgPipeline")).message


def test_images_and_masks_with_the_names_of_the_endpoints(
    info: Callable[..., PipelineInfo],
) -> None:
    """Images and masks are accepted under the names that the endpoints use: `image_1` is added to
    `image`, and `mask` becomes `mask_image`.
    """
    inpaint = info("qwen_image", "QwenImageInpaintPipeline")
    mask = torch.zeros(8, 8, dtype=torch.uint8)
    arguments = call(inpaint, {"image": Image, "mask": mask}, options={"strength": 0.5}).arguments
    assert (arguments["image"].size, arguments["mask_image"].mode, arguments["strength"]) == (
        (8, 8),
        "L",
        0.5,
    )
    several = call(
        inpaint, {"image": Image, "mask": mask, "image_2": Image, "image_1": Image}
    ).arguments
    assert len(several["image"]) == 3
    assert "first one as image" in refused(inpaint, {"image_1": Image, "mask": mask}).message


def test_capabilities_equal_those_of_the_executor() -> None:
    """Endpoints report the same capabilities as the executor, because both read the same
    signatures.

    The capabilities are the tasks, defaults and limits of known pipeline classes.
    """
    options = DiffusersOptions()
    qwen = capabilities("QwenImagePipeline", options, 4, distilled=False)
    assert (
        qwen.tasks == ("text_to_image",) and qwen.negative_prompt and qwen.num_inference_steps == 50
    )
    assert (qwen.width, qwen.height, qwen.guidance_scale) == (1024, 1024, 4.0)
    assert capabilities("FluxPipeline", options, 4, distilled=True).guidance_scale == 3.5
    assert capabilities("QwenImageEditPipeline", options, 4, distilled=False).tasks == (
        "image_edit",
    )
    assert capabilities("FluxKontextPipeline", options, 4, distilled=True).tasks == (
        "text_to_image",
        "image_edit",
    )
    assert capabilities("QwenImageInpaintPipeline", options, 4, distilled=False).mask
    wan = capabilities("WanPipeline", options, 4, distilled=False)
    assert wan.tasks == ("text_to_video",) and (wan.width, wan.height, wan.frame_stride) == (
        832,
        480,
        4,
    )
    assert capabilities("WanImageToVideoPipeline", options, 4, distilled=False).tasks == (
        "image_to_video",
    )


def test_the_family_states_capabilities_of_a_directory(
    tiny_pipelines: Callable[[str], Path],
) -> None:
    """The API server derives a pipeline's capabilities from its directory and the options."""
    family = get_family("diffusers_pipeline")
    config = family.hf_config(tiny_pipelines("wan"))
    omni = OmniConfig(model={"defaults": {"width": 64, "height": 32, "num_frames": 9, "fps": 8.0}})
    assert family.capabilities is not None
    stated = family.capabilities(config, omni)
    assert (stated.width, stated.height, stated.num_frames, stated.fps, stated.frame_stride) == (
        64,
        32,
        9,
        8.0,
        4,
    )
