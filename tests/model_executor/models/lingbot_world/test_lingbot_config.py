# SPDX-License-Identifier: Apache-2.0
"""Tests of the architecture read from configs in both key styles, of options, and of the resulting
chunk plan.
"""

import re
import typing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_omni.model_executor.models.lingbot_world as lingbot_world
from vllm_omni.model_executor.models.lingbot_world.config import (
    CONVENTIONS,
    Convention,
    LingBotChoices,
    LingBotOptions,
    LingBotWorldConfig,
    resolve_plan,
)

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


def test_both_key_styles_and_no_config_give_the_released_model() -> None:
    original, diffusers = (
        LingBotWorldConfig.from_checkpoint(ORIGINAL),
        LingBotWorldConfig.from_checkpoint(DIFFUSERS),
    )
    assert original == LingBotWorldConfig.from_checkpoint({}) == LingBotWorldConfig()
    assert (diffusers.dim, diffusers.head_dim, diffusers.text_len) == (5120, 128, 512)
    assert (diffusers.window_frames, diffusers.sink_frames, diffusers.frames_per_chunk) == (
        18,
        9,
        3,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, r"unknown keys \['surprise'\]"),
        ({"control_type": "pose"}, "control_type = 'pose'; this model implements"),
        (
            {"world_period_m": 8.0},
            "world_period_m must be set for control_type 'world' and for no other",
        ),
        (
            {"control_type": "world"},
            "world_period_m must be set for control_type 'world' and for no other",
        ),
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


def test_a_checkpoint_may_define_its_window() -> None:
    """The values `local_attn_size = -1, sink_size = 0` do not define a window, because they are the
    original code's defaults.
    """
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
        (
            {"sliding_window_num_frames": 45, "sink_size": 3},
            {"window_frames": 21, "sink_frames": 0},
            21,
            0,
        ),
        ({}, {"window_frames": -1}, 21, 21),
    ],
)
def test_options_precede_the_checkpoint_which_precedes_defaults(
    checkpoint: dict[str, Any], options: dict[str, Any], window: int, sink: int
) -> None:
    plan = resolve_plan(
        LingBotWorldConfig.from_checkpoint(checkpoint), LingBotOptions.parse(options)
    )
    assert (plan.window_frames, plan.sink_frames) == (window, sink)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 3}, "window"),
        ({"version": "v3"}, "v3"),
        ({"shift": 0}, "shift"),
        ({"denoise_indices": [3, 1]}, "strictly increasing"),
        ({"window_frames": 0}, "window_frames must be -1"),
        ({"residual_dtype": "model"}, "unknown field `residual_dtype`"),
        ({"later_condition": "second_chunk"}, "unknown field `later_condition`"),
        ({"convention": "fastvideo"}, "allowed values: 'original', 'pr3701', 'realtime', 'sglang'"),
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
    ],
)
def test_windows_that_cannot_serve_a_chunk_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_plan(LingBotWorldConfig(), LingBotOptions.parse(options))


def test_conventions_differ_in_the_documented_choices() -> None:
    """Conventions differ from each other only in the documented choices. The default is the
    convention for interactive worlds.
    """
    sglang = {
        "residual_dtype": "model",
        "camera_first_frame": "stands",
        "camera_scale": "session_max",
        "camera_dtype": "bf16",
        "later_condition": "second_chunk",
    }
    differing: dict[Convention, dict[str, str]] = {
        "realtime": {},
        "original": {"schedule": "original"},
        "sglang": sglang,
        "pr3701": {
            "schedule": "original",
            "camera_first_frame": "stands_each_chunk",
            "camera_scale": "chunk_max",
            "later_condition": "fresh_grey",
            "vae_continuation": "restart",
            "prompt_switch": "ignore",
        },
    }
    assert (
        LingBotOptions.parse({}).choices == LingBotChoices()
        and LingBotChoices().camera_torch_dtype == torch.float64
    )
    for name, changes in differing.items():
        assert asdict(LingBotOptions.parse({"convention": name}).choices) == {
            **asdict(LingBotChoices()),
            **changes,
        }
    assert set(differing) == set(CONVENTIONS) == set(typing.get_args(Convention))


@pytest.mark.parametrize("choice", sorted(asdict(LingBotChoices())))
def test_every_value_of_a_choice_belongs_to_a_convention_and_is_documented(choice: str) -> None:
    values = set(typing.get_args(typing.get_type_hints(LingBotChoices)[choice]))
    assert {getattr(choices, choice) for choices in CONVENTIONS.values()} == values
    row = next(
        line
        for line in README.read_text().splitlines()
        if line.startswith("|") and f"`{choice}`" in line
    )
    assert {*re.findall(r"`(\w+)`", row)} >= values


def test_versions_differ_in_schedule() -> None:
    """v1 uses a shift of 10 with the indices 0, 179, 358 and 679. v2 uses a shift of 5 with the
    indices 0, 250, 500 and 750 (t = 625 at the last step).
    """
    v1, v2 = LingBotOptions.parse({}), LingBotOptions.parse({}, checkpoint_version="v2")
    assert v1.denoise_schedule().timesteps[3] == pytest.approx(825.404988, abs=1e-6)
    assert v2.denoise_schedule().timesteps[3] == pytest.approx(625.0, abs=1e-9)
    assert LingBotOptions.parse({"convention": "original"}).denoise_schedule().timesteps == (
        999.0,
        978.0,
        947.0,
        825.0,
    )
