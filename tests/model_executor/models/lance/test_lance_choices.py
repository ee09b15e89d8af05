# SPDX-License-Identifier: Apache-2.0
"""Where public implementations of Lance differ: each choice is what it says, and the conventions
are served whole.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from lance_driver import REQUESTS, clip, image, load_lance, make_request, prepare, request_of, run
from lance_reference import DRAW, FILM, Reference, Run, write_model
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLVideoProcessor

from vllm_omni.inputs import DiffusionParams
from vllm_omni.model_executor.models.lance.config import (
    CONVENTIONS,
    EDIT_TASKS,
    READING_TASKS,
    TASKS,
    Choices,
    Convention,
    LanceOptions,
    Task,
)
from vllm_omni.model_executor.models.lance.family import FAMILY
from vllm_omni.model_executor.models.lance.media import for_vit
from vllm_omni.model_executor.models.lance.network.vae import to_uint8
from vllm_omni.model_executor.models.lance.network.vision import to_patches
from vllm_omni.model_executor.models.lance.pipeline import Lance
from vllm_omni.model_executor.models.lance.request import parse_request_options, read_question
from vllm_omni.model_executor.models.lance.tasks.context import Visuals
from vllm_omni.model_executor.models.lance.tasks.generation import ImageGeneration, plan_generation
from vllm_omni.model_executor.models.lance.tasks.prompt import LanceTokenizer, build_prompt
from vllm_omni.model_executor.models.lance.tasks.sampling import Guidance, flow_timesteps
from vllm_omni.outputs import RequestFailed
from vllm_omni.testing.parity.lance.recorded import ToyModel
from vllm_omni.testing.tiny.lance import make_tiny, write_tokenizer

SMALL = {"max_image_pixels": 64 * 96, "max_video_pixels": 64 * 96, "max_num_frames": 9}
TEXT_TASKS: tuple[Task, ...] = ("t2i", "t2v")
DRAWING_TASKS = tuple(task for task in TASKS if task not in READING_TASKS)


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


def test_a_convention_is_its_row_of_the_models_notes() -> None:
    """The default is the original's; each other one differs from it in what is written here."""
    original = asdict(Choices())
    assert LanceOptions().choices == CONVENTIONS["original"] == Choices()
    assert asdict(LanceOptions(convention="vllm_omni").choices) == {**original, **VLLM_OMNI}
    assert set(CONVENTIONS) == set(get_args(Convention))


def test_every_value_of_a_choice_is_served_by_some_convention() -> None:
    for name, kind in get_type_hints(Choices).items():
        assert {getattr(choices, name) for choices in CONVENTIONS.values()} == set(
            get_args(kind)
        ), name


def test_an_unknown_convention_is_refused_with_the_allowed_ones() -> None:
    with pytest.raises(ValueError, match=r"convention.*allowed values: 'original', 'vllm_omni'"):
        LanceOptions.parse({"convention": "nonsense"})


@pytest.mark.parametrize(
    "name", [*(field.name for field in fields(Choices)), "max_video_frames", "tokens_per_step"]
)
def test_a_choice_alone_is_no_option(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown field `{name}`"):
        LanceOptions.parse({name: getattr(Choices(), name, 4)})


@contextmanager
def choosing(**choices: Any) -> Iterator[LanceOptions]:
    """Options under which one choice alone differs from the original's, which no convention has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONVENTIONS, "original", replace(Choices(), **choices))
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
    """The two contexts as text; visual blocks are left out."""
    block = (1, 1, 1)
    edits = {"vit": block, "reference": block} if task in EDIT_TASKS else {}
    with choosing(**choices) as served:
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


def test_an_empty_unconditional_context(tokenizer: LanceTokenizer) -> None:
    """Nothing for an image, the two marks for a video, a negative prompt between them; other
    tasks keep theirs.
    """
    empty = {"uncond_context": "empty"}
    assert texts(tokenizer, "t2i", **empty) == (texts(tokenizer, "t2i")[0], "")
    assert texts(tokenizer, "t2v", **empty) == (
        texts(tokenizer, "t2v")[0],
        "<|im_start|><|im_end|>",
    )
    for task in TEXT_TASKS:
        assert texts(tokenizer, task, "a dog", **empty)[1] == "<|im_start|>a dog<|im_end|>"
    for task in ("i2v", *EDIT_TASKS):
        assert texts(tokenizer, task, **empty) == texts(tokenizer, task)


def test_a_wrapped_prompt(tokenizer: LanceTokenizer) -> None:
    for task in TEXT_TASKS:
        plain = texts(tokenizer, task)
        assert plain[0].startswith("<|im_start|>system") and plain[0].endswith(
            "A cat<|im_end|>\n<|im_start|>assistant\n"
        )
        wrapped = texts(tokenizer, task, drawing_prompt="wrapped")
        assert wrapped == tuple(f"<|im_start|>{text}<|im_end|>" for text in plain)
    for task in ("i2v", *EDIT_TASKS):
        assert texts(tokenizer, task, drawing_prompt="wrapped") == texts(tokenizer, task)


def test_ascii_apostrophes_in_the_system_prompts_of_edits(tokenizer: LanceTokenizer) -> None:
    for task in EDIT_TASKS:
        cond, _ = texts(tokenizer, task)
        other, _ = texts(tokenizer, task, edit_apostrophe="ascii")
        assert "the user\u2019s text" in cond and "meets the user\u2019s requirements" in cond
        assert "the user's text" in other and "meets the user's requirements" in other
        assert other.replace("'", "\u2019") == cond
    assert texts(tokenizer, "t2i", edit_apostrophe="ascii") == texts(tokenizer, "t2i")


# -- positions and velocities, against the second implementation -----------------------------------

SIZES = {
    "hidden": 64,
    "ffn": 80,
    "layers": 2,
    "heads": 4,
    "kv_heads": 1,
    "mrope": [2, 2, 4],
    "theta": 1e4,
    "latent_size": 7,
    "latent_frames": 3,
    "vit_layers": 1,
    "vit_hidden": 32,
    "vit_ffn": 40,
    "vit_heads": 2,
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reference, ToyModel]:
    """The same random weights in the dense fp64 implementation and in this package's."""
    folder = tmp_path_factory.mktemp("recorded")
    reference = Reference(SIZES, 5)
    write_model(folder, reference)
    return reference, ToyModel(folder, "fp32", torch.float32)


def velocities(
    toy: ToyModel, task: Task, choices: dict[str, Any], latents: torch.Tensor, grid: Any
) -> torch.Tensor:
    """This package's conditional and unconditional velocity at t = 1, [2, N, C]."""
    with choosing(**choices) as served:
        prompt = build_prompt(task, toy.tokens, "a red boat", noise=grid, served=served)
        plan = plan_generation(
            prompt, served.choices.uncond_positions, "i2v_noise_place" in choices
        )
    capacities = plan.capacities()
    decoder = toy.network.language_model
    drawing = ImageGeneration(
        plan=plan,
        visuals=Visuals(),
        guidance=Guidance(4.0, (0.4, 1.0), "global", 0.0),
        timesteps=flow_timesteps(1, 3.5),
        latents=latents[None],
        cond=[decoder.new_cache(capacities[0], plan.block)],
        uncond=[decoder.new_cache(capacities[1], plan.block)],
    )
    toy.stepper.step([drawing], [])
    drawing.advance()
    toy.stepper.step([drawing], [])
    assert drawing.prediction is not None
    return drawing.prediction[:, 0]


@torch.no_grad()
@pytest.mark.parametrize(
    ("task", "choices"),
    [
        ("t2i", {"uncond_positions": "own"}),
        ("t2i", {"uncond_context": "empty"}),
        ("t2v", {"uncond_context": "empty"}),
        ("t2v", {"drawing_prompt": "wrapped", "uncond_positions": "own"}),
        ("i2v", {"i2v_noise_place": "before_text", "uncond_positions": "own"}),
    ],
    ids=str,
)
def test_velocities_equal_the_second_implementations(
    two: tuple[Reference, ToyModel], task: Task, choices: dict[str, Any]
) -> None:
    """The alternative's sequence written down by hand, one dense masked pass in fp64."""
    reference, toy = two
    grid = (1, 3, 5) if task == "t2i" else (2, 4, 2)
    latents = torch.randn(math.prod(grid), 48, generator=torch.Generator().manual_seed(3))
    start, end = reference.id["im_start"], reference.id["im_end"]
    block = reference.block("noise", grid)
    system = DRAW if task == "t2i" else FILM
    head, user, separator, _, _ = reference.sequence(system, "a red boat", [], block)
    if choices.get("drawing_prompt") == "wrapped":
        head, separator = Run("text", [start, *head.ids]), Run("text", [*separator.ids, end])
    bare = [head, separator, block]
    if choices.get("uncond_context") == "empty":
        bare = [block] if task == "t2i" else [Run("text", [start, end]), block]
    rows = reference.per_latent(latents, grid, torch.ones(len(latents)))
    expected = []
    for runs in ([head, user, separator, block], bare):
        placed = reference.positions(runs)
        # the block's marker stands where the user's text, or what follows it, starts
        if "i2v_noise_place" in choices:
            placed[-1] = placed[-1] - placed[-1][0, 0] + len(head.ids)
        hidden = reference.forward(runs, placed, {"noise": rows})[-1 - len(latents) : -1]
        expected.append(reference.matmul("llm2vae", hidden))
    found = velocities(toy, task, choices, latents, grid)
    torch.testing.assert_close(found.double(), torch.stack(expected), atol=2e-5, rtol=0)


# -- pixels ----------------------------------------------------------------------------------------


def test_pixels_are_rounded_or_cut() -> None:
    """-1, 0, 1 and beyond are 0, 127.5, 255 and the ends; 0.2 is 153 exactly, a little less is
    not.
    """
    values = torch.tensor([-1.5, -1.0, 0.0, 0.1999, 0.2001, 0.9999, 1.0, 2.0])
    pixels = values.expand(3, 1, 1, -1)
    assert to_uint8(pixels)[0, 0, :, 0].tolist() == [0, 0, 128, 153, 153, 255, 255, 255]
    assert to_uint8(pixels, "truncate")[0, 0, :, 0].tolist() == [0, 0, 127, 152, 153, 254, 255, 255]


@pytest.mark.parametrize(("height", "width"), [(60, 90), (500, 301), (900, 1600)])
def test_a_clip_is_read_as_qwen2_vls_processor_hands_it_over(height: int, width: int) -> None:
    """Below its smallest size, between, and above its largest: the same patches, within a
    rounding of one level.
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
    """Buckets sample five of eight frames at 12 a second; the processor of Qwen2-VL takes what
    it gets.
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
    """A repository whose bundled vision tower differs from the separate one."""
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
    """A request of `REQUESTS` that both servers take."""
    fields, tensors = REQUESTS[task]
    if task == "x2t_video":
        options = {name: value for name, value in fields["options"].items() if name != "resolution"}
        fields = {**fields, "options": options}
    return make_request({**fields, **changes}, tensors)


def latents(lance: Lance) -> dict[Task, torch.Tensor]:
    return {
        task: run(lance, request_of(task, output="latents", num_inference_steps=2))[1]["latents"]
        for task in DRAWING_TASKS
    }


@pytest.fixture(scope="module")
def drawn(original: Lance) -> dict[Task, torch.Tensor]:
    """By the original's choices."""
    return latents(original)


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("drawing_prompt", TEXT_TASKS),
        ("uncond_context", TEXT_TASKS),
        ("edit_apostrophe", EDIT_TASKS),
        ("uncond_positions", DRAWING_TASKS),
        ("i2v_noise_place", ("i2v",)),
        ("reference_latent", ("image_edit", "i2v", "video_edit")),
        ("pixel_rounding", ()),
    ],
)
def test_an_alternative_changes_its_own_tasks_only(
    original: Lance,
    drawn: dict[Task, torch.Tensor],
    name: str,
    tasks: tuple[Task, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Latents of the others are the same bit for bit."""
    monkeypatch.setitem(CONVENTIONS, "original", replace(Choices(), **{name: VLLM_OMNI[name]}))
    after = latents(original)
    assert {task for task in DRAWING_TASKS if not torch.equal(drawn[task], after[task])} == set(
        tasks
    )


def test_the_vision_tower_comes_from_its_own_file_where_there_is_one(
    checkpoint: Path, original: Lance
) -> None:
    name = "merger.mlp.2.bias"
    bundled = load_file(checkpoint / "model.safetensors")[f"vit_model.{name}"].float()
    loaded = dict(original.vision.tower.named_parameters())[name]
    torch.testing.assert_close(loaded, bundled + 0.5, atol=1e-2, rtol=0)


def test_every_task_runs_under_vllm_omnis_convention(original: Lance, switched: Lance) -> None:
    """Finite, of the original's shape, other results for every drawing, within the memory that
    was announced.
    """
    other = switched
    assert other.options.convention == "vllm_omni"
    differ = set()
    for task in TASKS:
        changes = {} if task in READING_TASKS else {"output": "latents"}
        requested = small(task, **changes)
        prepare(other, requested)
        work = requested.state
        caches = (
            [work.understanding.cache]
            if work.understanding
            else [*work.generation.cond, *work.generation.uncond]
        )
        assert (
            sum(cache.k.nbytes + cache.v.nbytes for cache in caches) <= requested.session.nbytes
        ), task
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
    assert differ == set(DRAWING_TASKS)
    pixels = run(other, small("t2i"))[1]["images"]
    assert pixels.dtype == torch.uint8 and pixels.float().std() > 1


def test_a_clip_read_whole_has_qwen2_vls_number_of_tokens(original: Lance, switched: Lance) -> None:
    """Five frames of 60x90 are three pairs: of 280x392 (10x14 rows), or of the bucket 504x700
    (18x25). Not images.
    """

    def tokens(lance: Lance, **tensors: torch.Tensor) -> int:
        options = {"modalities": ["text"], "max_tokens": 2}
        count: int = run(lance, make_request({"prompt": "?", "options": options}, tensors))[0][
            "prompt_tokens"
        ]
        return count

    assert tokens(original, video=clip(5)) - tokens(switched, video=clip(5)) == 3 * (
        18 * 25 - 10 * 14
    )
    assert tokens(original, image=image()) == tokens(switched, image=image())


def test_the_route_does_not_send_more_frames_than_are_read(checkpoint: Path) -> None:
    from vllm_omni.config import OmniConfig
    from vllm_omni.model_executor.models.lance.checkpoint import hf_config

    def frames(**model: Any) -> int:
        assert FAMILY.capabilities is not None
        return FAMILY.capabilities(hf_config(checkpoint), OmniConfig(model=model)).read_frames

    assert frames(max_num_frames=9) == 72  # of which the request keeps what a bucket takes
    assert frames(max_num_frames=9, convention="vllm_omni") == 9
    assert frames(convention="vllm_omni") == 72
