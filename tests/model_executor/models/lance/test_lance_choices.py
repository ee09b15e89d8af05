# SPDX-License-Identifier: Apache-2.0
"""Public Lance implementations make different choices. A convention is a named combination of such
choices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from lance_driver import REQUESTS, clip, load_lance, make_request, request_of, run
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLVideoProcessor

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.lance.config import (
    CONVENTIONS,
    EDIT_TASKS,
    READING_TASKS,
    TASKS,
    Convention,
    LanceChoices,
    LanceOptions,
    Task,
)
from vllm_omni.model_executor.models.lance.family import FAMILY
from vllm_omni.model_executor.models.lance.media import for_vit
from vllm_omni.model_executor.models.lance.network.vae import to_uint8
from vllm_omni.model_executor.models.lance.network.vision import to_patches
from vllm_omni.model_executor.models.lance.pipeline import Lance
from vllm_omni.model_executor.models.lance.request import parse_request_options, read_question
from vllm_omni.model_executor.models.lance.tasks.generation import plan_generation
from vllm_omni.model_executor.models.lance.tasks.prompt import LanceTokenizer, build_prompt
from vllm_omni.outputs import RequestFailed
from vllm_omni.testing.tiny.lance import make_tiny, write_tokenizer

SMALL = {"max_image_pixels": 64 * 96, "max_video_pixels": 64 * 96, "max_num_frames": 9}
TEXT_TASKS: tuple[Task, ...] = ("t2i", "t2v")
GENERATION_TASKS = tuple(task for task in TASKS if task not in READING_TASKS)


# -- names -----------------------------------------------------------------------------------------


VLLM_OMNI = {
    "drawing_prompt": "wrapped",
    "uncond_context": "empty",
    "edit_apostrophe": "ascii",
    "uncond_positions": "own",
    "i2v_noise_place": "before_text",
    "understanding_video": "smart_resize",
    "understanding_vit_time": "origin",
    "position_table": "checkpoint",
    "reference_latent": "sample",
    "pixel_rounding": "truncate",
}


def test_conventions_differ_in_the_documented_choices() -> None:
    """Conventions differ from each other only in the documented choices. The default is the
    original implementation's convention.
    """
    original = asdict(LanceChoices())
    assert LanceOptions().choices == CONVENTIONS["original"] == LanceChoices()
    assert asdict(LanceOptions(convention="vllm_omni").choices) == {**original, **VLLM_OMNI}
    assert set(CONVENTIONS) == set(get_args(Convention))


def test_every_value_of_a_choice_belongs_to_a_convention() -> None:
    for name, kind in get_type_hints(LanceChoices).items():
        assert {getattr(choices, name) for choices in CONVENTIONS.values()} == set(
            get_args(kind)
        ), name


def test_an_unknown_convention_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"convention.*allowed values: 'original', 'vllm_omni'"):
        LanceOptions.parse({"convention": "nonsense"})


@pytest.mark.parametrize(
    "name", [*(field.name for field in fields(LanceChoices)), "max_video_frames", "tokens_per_step"]
)
def test_a_single_choice_is_not_an_option(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field `{name}`"):
        LanceOptions.parse({name: getattr(LanceChoices(), name, 4)})


@contextmanager
def options_with(**choices: Any) -> Iterator[LanceOptions]:
    """Yield options that differ from the `original` convention only in the given choices. The
    choices are patched in, because no existing convention combines them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONVENTIONS, "original", replace(LanceChoices(), **choices))
        yield LanceOptions()


# -- ids -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LanceTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return LanceTokenizer(folder / "tokenizer.json", {}, 288)


def texts(
    tokenizer: LanceTokenizer, task: Task, negative: str | None = None, **choices: Any
) -> tuple[str, str]:
    """Return the conditional and unconditional contexts as text, without visual blocks."""
    block = (1, 1, 1)
    edits = {"vit": block, "reference": block} if task in EDIT_TASKS else {}
    with options_with(**choices) as served:
        prompt = build_prompt(
            task,
            tokenizer.tokens,
            "A cat",
            negative_prompt=negative,
            noise=block,
            served=served,
            **edits,
        )
    assert prompt.cond[-1].kind == prompt.uncond[-1].kind == "noise"
    cond, uncond = (
        tokenizer._template.decode(
            [number for run in runs for number in run.ids], skip_special_tokens=False
        )
        for runs in (prompt.cond, prompt.uncond)
    )
    return cond, uncond


def test_system_prompts_of_edits_may_have_ascii_apostrophes(tokenizer: LanceTokenizer) -> None:
    for task in EDIT_TASKS:
        cond, _ = texts(tokenizer, task)
        other, _ = texts(tokenizer, task, edit_apostrophe="ascii")
        assert "the user\u2019s text" in cond and "meets the user\u2019s requirements" in cond
        assert "the user's text" in other and "meets the user's requirements" in other
        assert other.replace("'", "\u2019") == cond
    assert texts(tokenizer, "t2i", edit_apostrophe="ascii") == texts(tokenizer, "t2i")


def test_the_unconditional_context_may_be_empty(tokenizer: LanceTokenizer) -> None:
    """With `uncond_context="empty"`, the unconditional context is an empty string for text-to-image
    and two markers for text-to-video. A negative prompt is placed between two markers. Other tasks
    keep their context.
    """
    empty = {"uncond_context": "empty"}
    markers = "<|im_start|><|im_end|>"
    for task, expected in (("t2i", ""), ("t2v", markers)):
        assert texts(tokenizer, task, **empty) == (texts(tokenizer, task)[0], expected)
        assert texts(tokenizer, task, "a dog", **empty)[1] == "<|im_start|>a dog<|im_end|>"
    for task in ("i2v", *EDIT_TASKS):
        assert texts(tokenizer, task, **empty) == texts(tokenizer, task)


def test_a_prompt_may_be_wrapped(tokenizer: LanceTokenizer) -> None:
    """With wrapped prompts, both contexts of a text task are enclosed in a pair of markers."""
    for task in TEXT_TASKS:
        plain, wrapped = texts(tokenizer, task), texts(tokenizer, task, drawing_prompt="wrapped")
        assert wrapped == tuple(f"<|im_start|>{text}<|im_end|>" for text in plain)
    for task in ("i2v", *EDIT_TASKS):
        assert texts(tokenizer, task, drawing_prompt="wrapped") == texts(tokenizer, task)


def test_positions_of_the_unconditional_context_and_of_the_block(
    tokenizer: LanceTokenizer,
) -> None:
    """`uncond_positions` selects the positions of the text after the user's text in the
    unconditional context. With `noise_before_text`, the generated block starts at the position
    where the user's text starts.
    """
    prompt = build_prompt("i2v", tokenizer.tokens, "A cat", noise=(2, 1, 1))
    shared, own = (plan_generation(prompt, choice) for choice in ("cond", "own"))
    separator = shared.cond[-1].positions_3T
    assert torch.equal(shared.uncond[-1].positions_3T, separator)
    tokens = torch.cat([part.positions_3T for part in own.uncond], dim=1)
    assert torch.equal(tokens, torch.arange(tokens.shape[1]).expand(3, -1))
    assert int(own.uncond_block[0, 0]) == tokens.shape[1]
    before = plan_generation(prompt, "own", noise_before_text=True)
    user = next(part for part in before.cond if part.segment.user)
    for block in (before.cond_block, before.uncond_block):
        assert (
            int(block[0, 0])
            == int(user.positions_3T[0, 0])
            == tokens.shape[1] - (separator.shape[1])
        )


# -- pixels ----------------------------------------------------------------------------------------


def test_pixels_are_rounded_or_truncated() -> None:
    """Pixel values of -1, 0 and 1 map to 0, 127.5 and 255, and 0.2 maps to exactly 153. Values
    outside [-1, 1] are clamped.
    """
    values = torch.tensor([-1.5, -1.0, 0.0, 0.1999, 0.2001, 0.9999, 1.0, 2.0])
    pixels = values.expand(3, 1, 1, -1)
    assert to_uint8(pixels)[0, 0, :, 0].tolist() == [0, 0, 128, 153, 153, 255, 255, 255]
    assert to_uint8(pixels, "truncate")[0, 0, :, 0].tolist() == [0, 0, 127, 152, 153, 254, 255, 255]


@pytest.mark.parametrize(("height", "width"), [(60, 90), (500, 301), (900, 1600)])
def test_patches_of_a_clip_equal_qwen2_vls_processor(height: int, width: int) -> None:
    """Patches match Qwen2-VL's processor within one pixel level of rounding. The test clips are
    below the processor's minimum size, above its maximum size, and in between.
    """
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    frames = torch.stack(
        [
            torch.stack((y / 9 + 7 * n, x / 13, 128 + 90 * torch.sin(x / 31 + y / 17)), dim=-1)
            for n in range(3)
        ]
    ).to(torch.uint8)
    processor = Qwen2VLVideoProcessor(cap_pixels_per_frame=False)
    theirs = processor(videos=[frames.permute(0, 3, 1, 2)], return_tensors="pt")
    patches, grid = to_patches(for_vit(frames, None))
    assert theirs["video_grid_thw"].tolist() == [list(grid)]
    level = 1.01 / 255 / 0.26
    assert (patches - theirs["pixel_values_videos"]).abs().max() <= level


def test_every_frame_of_a_clip_is_read_and_its_length_is_bounded() -> None:
    """With buckets, five of eight frames are sampled at 12 fps. Under vLLM-Omni's convention, every
    frame is used, as in Qwen2-VL's processor, and clips that are too long are refused.
    """
    served = LanceOptions(convention="vllm_omni", max_num_frames=8)

    def question(video: torch.Tensor, served: LanceOptions, **options: Any) -> Any:
        params = DiffusionParams(
            session_id="s", prompt="what?", options={"task": "x2t_video", **options}
        )
        return read_question(
            params, parse_request_options(params), "x2t_video", {"video": video}, served
        )

    assert len(question(clip(8), LanceOptions()).source) == 5
    retained = question(clip(8), served, origin_fps=30)
    assert len(retained.source) == 8 and retained.preset is None
    with pytest.raises(RequestFailed, match=r"video has 9 frames.*allows 1 to 8"):
        question(clip(9), served)
    with pytest.raises(RequestFailed, match=r"options\.resolution names buckets"):
        question(clip(8), served, resolution="video_480p")
    with pytest.raises(RequestFailed, match="aspect ratio"):
        question(torch.zeros(1, 28, 8000, 3, dtype=torch.uint8), served)


# -- the whole model -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository with two different vision towers: one bundled with the decoder and one in
    a separate folder.
    """
    out = tmp_path_factory.mktemp("lance_repository")
    make_tiny(out, 0, "repository")
    path = out / "Qwen2.5-VL-ViT" / "vit.safetensors"
    tensors = load_file(path)
    tensors["merger.mlp.2.bias"] += 0.5
    save_file(tensors, path)
    return out / "Lance_3B_Video"


@pytest.fixture(scope="module")
def original(checkpoint: Path) -> Lance:
    return load_lance(checkpoint, **SMALL)


@pytest.fixture(scope="module")
def switched(checkpoint: Path) -> Lance:
    return load_lance(checkpoint, **SMALL, convention="vllm_omni")


def small(task: str, **changes: Any) -> Any:
    """Return a request from `REQUESTS` that is valid under either convention."""
    fields, tensors = REQUESTS[task]
    if task == "x2t_video":
        options = {name: value for name, value in fields["options"].items() if name != "resolution"}
        fields = {**fields, "options": options}
    return make_request({**fields, **changes}, tensors)


def latents(lance: Lance) -> dict[Task, torch.Tensor]:
    return {
        task: run(lance, request_of(task, output="latents", num_inference_steps=2))[1]["latents"]
        for task in GENERATION_TASKS
    }


@pytest.fixture(scope="module")
def original_latents(original: Lance) -> dict[Task, torch.Tensor]:
    """Return each task's latents under the original implementation's choices."""
    return latents(original)


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("drawing_prompt", TEXT_TASKS),
        ("uncond_context", TEXT_TASKS),
        ("edit_apostrophe", EDIT_TASKS),
        ("uncond_positions", GENERATION_TASKS),
        ("i2v_noise_place", ("i2v",)),
        ("reference_latent", ("image_edit", "i2v", "video_edit")),
        ("pixel_rounding", ()),
    ],
)
def test_a_choice_changes_only_its_tasks(
    original: Lance,
    original_latents: dict[Task, torch.Tensor],
    name: str,
    tasks: tuple[Task, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A choice changes the latents of the listed tasks. The latents of all other tasks stay
    bit-identical.
    """
    monkeypatch.setitem(CONVENTIONS, "original", replace(LanceChoices(), **{name: VLLM_OMNI[name]}))
    after = latents(original)
    assert {
        task for task in GENERATION_TASKS if not torch.equal(original_latents[task], after[task])
    } == set(tasks)


def test_a_separate_vision_tower_takes_precedence(checkpoint: Path, original: Lance) -> None:
    name = "merger.mlp.2.bias"
    bundled = load_file(checkpoint / "model.safetensors")[f"vit_model.{name}"].float()
    loaded = dict(original.vision.tower.named_parameters())[name]
    torch.testing.assert_close(loaded, bundled + 0.5, atol=1e-2, rtol=0)


def test_every_task_runs_under_vllm_omnis_convention(original: Lance, switched: Lance) -> None:
    """Under vLLM-Omni's convention, every result is finite and has the same shape as under the
    original convention. The latents of every generation task differ between the two conventions.
    """
    other = switched
    assert other.options.convention == "vllm_omni"
    differ = set()
    for task in TASKS:
        changes = {} if task in READING_TASKS else {"output": "latents"}
        meta, tensors = run(other, small(task, **changes))
        _, usual = run(original, small(task, **changes))
        assert meta["task"] == task
        if task in READING_TASKS:
            assert tensors["token_ids"].shape == usual["token_ids"].shape
            continue
        assert tensors["latents"].isfinite().all()
        assert tensors["latents"].shape == usual["latents"].shape
        if (tensors["latents"] - usual["latents"]).abs().max() > 1e-3:
            differ.add(task)
    assert differ == set(GENERATION_TASKS)
    pixels = run(other, small("t2i"))[1]["images"]
    assert pixels.dtype == torch.uint8 and pixels.float().std() > 1


def test_the_route_sends_no_more_frames_than_are_read(checkpoint: Path) -> None:
    from vllm_omni.config import OmniConfig
    from vllm_omni.model_executor.models.lance.checkpoint import hf_config

    def frames(**model: Any) -> int:
        assert FAMILY.capabilities is not None
        return FAMILY.capabilities(hf_config(checkpoint), OmniConfig(model=model)).read_frames

    assert frames(max_num_frames=9) == 72  # the frames of a bucket are sampled
    assert frames(max_num_frames=9, convention="vllm_omni") == 9
    assert frames(convention="vllm_omni") == 72
