# SPDX-License-Identifier: Apache-2.0
"""Tests of causal Wan's configs in both key styles, its options and chunk plans, and the stream
metadata for endpoints.
"""

from pathlib import Path
from typing import Any

import pytest

from vllm_omni.actions import ActionSpace
from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.models.causal_wan.config import (
    CausalWanConfig,
    CausalWanOptions,
    resolve_plan,
)
from vllm_omni.model_executor.models.registry import get_family


def test_both_key_styles_give_the_same_architecture() -> None:
    original = {
        "model_type": "t2v",
        "dim": 5120,
        "ffn_dim": 13824,
        "num_heads": 40,
        "num_layers": 40,
        "in_dim": 16,
    }
    diffusers = {
        "attention_head_dim": 128,
        "ffn_dim": 13824,
        "num_attention_heads": 40,
        "num_layers": 40,
    }
    assert CausalWanConfig.from_checkpoint(original) == CausalWanConfig.from_checkpoint(diffusers)
    assert CausalWanConfig.from_checkpoint({}) == CausalWanConfig()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dims": 3}, "unknown keys"),
        ({"model_type": "i2v"}, "model_type = 'i2v'"),
        ({"in_dim": 36}, "text-to-video"),
        ({"qk_norm": False}, "qk_norm"),
        ({"dim": 64, "attention_head_dim": 128}, "contradicts"),
        ({"independent_first_frame": True}, "independent_first_frame"),
    ],
)
def test_unsupported_configs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalWanConfig.from_checkpoint(values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache": "fuzzy"}, "cache"),
        ({"windows": 3}, "windows"),
        ({"window_frames": 0}, "window_frames must be"),
        ({"denoising_steps": [500, 1000]}, "increasing"),
        ({"denoising_steps": [999.5]}, "whole numbers"),
        ({"cache": "noise_matched", "video_denoising_steps": [700, 500]}, "equally long"),
        ({"cache": "noise_matched", "first_chunk_steps": 2}, "a window for every step"),
        ({"video_denoising_steps": [700, 690, 400]}, "not above the second"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalWanOptions.parse(options)


def test_the_self_forcing_schedule() -> None:
    schedule = CausalWanOptions.parse({}).text_schedule()
    assert schedule.timesteps == pytest.approx((1000, 937.5, 833.3333, 625), abs=1e-3)
    assert schedule.sigmas_x0 == pytest.approx((1, 0.9375, 0.8333333, 0.625), abs=1e-6)


def test_the_stream_diffusion_schedule() -> None:
    schedule = CausalWanOptions.parse({}).video_schedule(690.0)
    assert schedule.timesteps == (690.0, 500.0, 400.0, 200.0)
    assert schedule.sigmas_x0[1:] == pytest.approx((0.49972, 0.40026, 0.19835), abs=1e-4)


@pytest.mark.parametrize(
    ("config", "options", "plan"),
    [
        ({}, {}, (3, 3, 21, 3)),
        ({}, {"window_frames": 9, "sink_frames": 0}, (3, 3, 9, 0)),
        ({"local_attn_size": 12, "sink_size": 3, "num_frame_per_block": 1}, {}, (1, 1, 12, 3)),
        ({"local_attn_size": -1, "sink_size": 0}, {}, (3, 3, 21, 3)),
        (
            {"sliding_window_num_frames": 15},
            {"latent_frames_per_chunk": 1, "first_chunk_latent_frames": 2},
            (2, 1, 15, 3),
        ),
        ({}, {"window_frames": -1}, (3, 3, 21, 21)),
    ],
)
def test_options_win_over_the_checkpoint(
    config: dict[str, Any], options: dict[str, Any], plan: tuple[int, ...]
) -> None:
    found = resolve_plan(CausalWanConfig.from_checkpoint(config), CausalWanOptions.parse(options))
    assert (
        found.first_chunk_frames,
        found.chunk_frames,
        found.window_frames,
        found.sink_frames,
    ) == plan


@pytest.mark.parametrize(
    "options",
    [
        {"window_frames": 5, "sink_frames": 3},
        {"first_chunk_latent_frames": 22},
        {"sink_refresh_threshold": 0.2},
        {"sink_refresh_threshold": 0.2, "latent_frames_per_chunk": 1, "sink_frames": 0},
    ],
)
def test_plans_that_do_not_fit_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"latent|window"):
        resolve_plan(CausalWanConfig(), CausalWanOptions.parse(options))


def test_the_family_describes_the_stream_to_endpoints(tmp_path: Path) -> None:
    family = get_family("causal_wan")
    family.make_tiny(tmp_path, 0, "original")
    config = family.hf_config(tmp_path)
    assert (
        family.stream_info is not None
        and family.check_options is not None
        and family.capabilities is not None
    )
    omni = OmniConfig(
        height=32, width=48, model={"latent_frames_per_chunk": 1, "first_chunk_latent_frames": 2}
    )
    info = family.stream_info(config, omni)
    assert family.action_space is not None
    assert family.action_space(config, omni) == ActionSpace(prompt="required", image="none")
    assert (info["latent_frames_per_chunk"], info["first_chunk_latent_frames"]) == (1, 2)
    assert family.capabilities(config, omni).tasks == ("world", "text_to_video", "image_to_video")
    with pytest.raises(ValueError, match="multiples of 16"):
        family.check_options(config, OmniConfig(height=40, width=48))
