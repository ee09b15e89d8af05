# SPDX-License-Identifier: Apache-2.0
"""Architecture from checkpoints in both key styles, options, and how they make a chunk plan."""

import json
import re
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from public_choices import PR3701, SGLANG

import vllm_omni.model_executor.models.lingbot_world as lingbot_world
from vllm_omni.model_executor.layers.parallel import checkpoint_slots
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions, LingBotWorldConfig, resolve_plan
from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer

assert lingbot_world.__file__ is not None
README = Path(lingbot_world.__file__).with_name("README.md")
ORIGINAL = {
    "_class_name": "WanModelFast",
    "model_type": "i2v",
    "control_type": "cam",
    "patch_size": [1, 2, 2],
    "text_len": 512,
    "in_dim": 36,
    "dim": 5120,
    "ffn_dim": 13824,
    "freq_dim": 256,
    "text_dim": 4096,
    "out_dim": 16,
    "num_heads": 40,
    "num_layers": 40,
    "qk_norm": True,
    "cross_attn_norm": True,
    "eps": 1e-6,
}
DIFFUSERS = {
    "_class_name": "CausalLingBotWorldTransformer3DModel",
    "_diffusers_version": "0.36",
    "in_channels": 36,
    "out_channels": 16,
    "num_attention_heads": 40,
    "attention_head_dim": 128,
    "num_layers": 40,
    "ffn_dim": 13824,
    "text_dim": 4096,
    "freq_dim": 256,
    "patch_size": [1, 2, 2],
    "qk_norm": "rms_norm_across_heads",
    "cross_attn_norm": True,
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
    "image_dim": None,
    "added_kv_proj_dim": None,
    "pos_embed_seq_len": None,
    "local_attn_size": -1,
    "sink_size": 9,
    "num_frames_per_block": 3,
    "sliding_window_num_frames": 18,
}


def test_both_key_styles_and_no_config_name_the_same_released_model() -> None:
    original, diffusers = LingBotWorldConfig.from_checkpoint(ORIGINAL), LingBotWorldConfig.from_checkpoint(DIFFUSERS)
    assert original == LingBotWorldConfig.from_checkpoint({}) == LingBotWorldConfig()
    assert (diffusers.dim, diffusers.head_dim, diffusers.text_len) == (5120, 128, 512)
    assert (diffusers.window_frames, diffusers.sink_frames, diffusers.frames_per_chunk) == (18, 9, 3)


def test_the_released_model_has_the_published_tensors() -> None:
    """1421 tensors, 18,544,332,864 parameters: 21 outside the blocks, 35 in each (counted on the meta device)."""
    with torch.device("meta"):
        slots = checkpoint_slots(LingBotTransformer(LingBotWorldConfig()))
    assert len(slots) == 1421
    assert sum(torch.Size(slot.shape).numel() for slot in slots.values()) == 18_544_332_864
    outside = [slot.shape for name, slot in slots.items() if not name.startswith("blocks.")]
    assert len(outside) == 21
    assert sum(torch.Size(shape).numel() for shape in outside) == 293_437_504


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, r"unknown keys \['surprise'\]"),
        ({"control_type": "act"}, "control_type = 'act'; this model implements"),
        ({"_class_name": "WanTransformer3DModel"}, "_class_name = 'WanTransformer3DModel'"),
        ({"qk_norm": False}, "qk_norm = False"),
        ({"image_dim": 1280}, "image_dim = 1280"),
        ({"patch_size": [1, 1, 1]}, r"patch_size must be \(1, 2, 2\)"),
        ({"in_dim": 16}, "36 in"),
        ({"dim": 5121}, "even head size"),
        ({"num_attention_heads": 20}, "gives num_heads twice"),
        ({"attention_head_dim": 64}, "contradicts dim 5120"),
    ],
)
def test_what_the_code_does_not_implement_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LingBotWorldConfig.from_checkpoint({**ORIGINAL, **change})


def test_the_window_of_a_checkpoint_counts_only_if_it_states_one() -> None:
    """The original's `local_attn_size = -1, sink_size = 0` are its code's defaults; a session needs a window."""
    silent = LingBotWorldConfig.from_checkpoint({**ORIGINAL, "local_attn_size": -1, "sink_size": 0})
    assert (silent.window_frames, silent.sink_frames) == (None, None)
    stated = LingBotWorldConfig.from_checkpoint({**ORIGINAL, "local_attn_size": 12, "sink_size": 3})
    assert (stated.window_frames, stated.sink_frames) == (12, 3)


@pytest.mark.parametrize(
    ("checkpoint", "options", "window", "sink"),
    [
        ({}, {}, 18, 9),
        ({}, {"version": "v2"}, 18, 6),
        ({"sliding_window_num_frames": 45, "sink_size": 3}, {}, 45, 3),
        ({"sliding_window_num_frames": 45, "sink_size": 3}, {"window_frames": 21, "sink_frames": 0}, 21, 0),
        ({}, {"window_frames": -1, "global_frames": 63}, 63, 63),
    ],
)
def test_options_win_over_the_checkpoint_and_that_over_defaults(
    checkpoint: dict[str, Any], options: dict[str, Any], window: int, sink: int
) -> None:
    plan = resolve_plan(LingBotWorldConfig.from_checkpoint(checkpoint), LingBotOptions.parse(options))
    assert (plan.window_frames, plan.sink_frames) == (window, sink)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "window"),
        ({"version": "v3"}, "v3"),
        ({"shift": 0}, "shift"),
        ({"denoise_indices": [3, 1]}, "strictly increasing"),
        ({"window_frames": 0}, "window_frames must be -1"),
        ({"residual_dtype": "fp16"}, "residual_dtype.*allowed values: 'fp32', 'model'"),
        ({"later_condition": "repeat"}, "allowed values: 'fresh_grey', 'last_frame', 'second_chunk', 'streamed'"),
        ({"condition_video_frames": 60}, "condition_video_frames must be 1 \\+ a multiple of 4, got 60"),
        ({"vae_continuation": True}, "vae_continuation.*allowed values: 'cache', 'restart'"),
        ({"camera_dtype": "fp16"}, "allowed values: 'bf16', 'fp32'"),
        ({"camera_scale": "clip_max"}, "allowed values: 'chunk_max', 'constant', 'session_max'"),
        ({"camera_first_frame": "stays"}, "allowed values: 'moves', 'stands', 'stands_each_chunk'"),
        ({"prompt_switch": "queue"}, "allowed values: 'ignore', 'refresh'"),
        ({"prompt_switch": "ignore", "reprime_on_prompt_switch": True}, "needs prompt_switch 'refresh'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LingBotOptions.parse(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window_frames": 10, "sink_frames": 8}, "leaves no room for chunks of 3"),
        ({"first_chunk_latent_frames": 19}, "first chunk of 19 latent frames does not fit"),
        ({"max_attention_frames": 2}, "max_attention_frames 2 is smaller than a chunk"),
    ],
)
def test_windows_that_cannot_serve_a_chunk_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_plan(LingBotWorldConfig(), LingBotOptions.parse(options))


def test_a_session_is_9_then_12_video_frames_a_chunk() -> None:
    plan = resolve_plan(LingBotWorldConfig(), LingBotOptions())
    assert [list(plan.frames(index)) for index in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [len(plan.pixel_frames(index)) for index in range(3)] == [9, 12, 12]
    assert plan.pixel_frames(2) == range(21, 33)


def test_a_first_chunk_of_another_size_shifts_all_later_ones() -> None:
    plan = resolve_plan(LingBotWorldConfig(), LingBotOptions.parse({"first_chunk_latent_frames": 1}))
    assert [len(plan.pixel_frames(index)) for index in range(3)] == [1, 12, 12]
    assert plan.frames(2) == range(4, 7)


def test_defaults_are_the_recommended_choices() -> None:
    """Streamed condition, persistent decoder, interactive camera in fp32/fp64, prompts that take effect."""
    options = LingBotOptions.parse({})
    assert (options.later_condition, options.vae_continuation, options.prompt_switch) == (
        "streamed",
        "cache",
        "refresh",
    )
    assert (options.camera_first_frame, options.camera_scale, options.camera_dtype) == ("moves", "constant", "fp32")
    assert options.camera_torch_dtype == torch.float64


@pytest.mark.parametrize(
    "option",
    [
        "schedule",
        "residual_dtype",
        "camera_first_frame",
        "camera_scale",
        "camera_dtype",
        "later_condition",
        "vae_continuation",
        "prompt_switch",
    ],
)
def test_the_models_notes_name_every_value_of_a_choice(option: str) -> None:
    """In the table of choices, each in its own row, from the option's row on."""
    kind = typing.get_type_hints(LingBotOptions)[option]
    rows = [line for line in README.read_text().splitlines() if line.startswith("|")]
    start = next(index for index, row in enumerate(rows) if f": `{option}` |" in row)
    stop = next((index for index in range(start + 1, len(rows)) if not rows[index].startswith("| |")), len(rows))
    named = {row.split("|")[2].split("`")[1] for row in rows[start:stop] if row.split("|")[2].strip().startswith("`")}
    assert named == set(typing.get_args(kind))


def test_the_models_notes_show_options_that_exist() -> None:
    """Its JSON blocks: how SGLang and PR 3701 serve the model, and how tests elsewhere do."""
    blocks = re.findall(r"```json\n(.*?)```", README.read_text(), re.DOTALL)
    sglang, pr3701 = (json.loads(block) for block in blocks)
    assert sglang == SGLANG and pr3701.items() >= PR3701.items()
    for options in (sglang, pr3701):
        LingBotOptions.parse(options)


def test_versions_differ_in_schedule() -> None:
    """v1: shift 10, indices 0 179 358 679; v2: shift 5, indices 0 250 500 750 (t = 625 at the last step)."""
    v1, v2 = LingBotOptions.parse({}), LingBotOptions.parse({}, checkpoint_version="v2")
    assert v1.denoise_schedule().timesteps[3] == pytest.approx(825.404988, abs=1e-6)
    assert v2.denoise_schedule().timesteps[3] == pytest.approx(625.0, abs=1e-9)
    assert LingBotOptions.parse({"schedule": "original"}).denoise_schedule().timesteps == (999.0, 978.0, 947.0, 825.0)
