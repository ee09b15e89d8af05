# SPDX-License-Identifier: Apache-2.0
"""Tests of how `config.yaml` is parsed and of the controls that each model has."""

from pathlib import Path
from typing import Any

import pytest

from vllm_omni.actions import ActionFrame, read_actions
from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.realtime.connection.stream_info import StreamInfo
from vllm_omni.model_executor.models.waypoint.checkpoint import read_config
from vllm_omni.model_executor.models.waypoint.config import (
    WaypointConfig,
    action_space,
    control_vectors,
    read_stream,
)
from vllm_omni.model_executor.models.waypoint.family import FAMILY

RELEASED: dict[str, Any] = {
    "model_type": "waypoint-1.5",
    "d_model": 2048,
    "n_layers": 24,
    "n_heads": 32,
    "n_kv_heads": 16,
    "mlp_ratio": 4,
    "channels": 32,
    "patch": [2, 2],
    "height": 16,
    "width": 32,
    "tokens_per_frame": 512,
    "local_window": 16,
    "global_window": 128,
    "global_pinned_dilation": 8,
    "global_attn_period": 4,
    "global_attn_offset": -1,
    "value_residual": True,
    "ctrl_conditioning": "mlp_fusion",
    "ctrl_conditioning_period": 3,
    "scheduler_sigmas": [1.0, 0.9, 0.75, 0.3, 0.0],
    "base_fps": 15,
    "inference_fps": 60,
    "temporal_compression": 4,
}


def test_the_released_config_has_its_sizes() -> None:
    config = WaypointConfig.from_checkpoint(RELEASED)
    assert (
        config.latent_shape == (32, 32, 64)
        and config.codec_size == (512, 1024)
        and config.time_step == 1
    )
    assert [layer for layer in range(24) if config.is_global(layer)] == [3, 7, 11, 15, 19, 23]
    assert [layer for layer in range(24) if config.controlled(layer)] == list(range(0, 24, 3))
    assert config.scheduler_sigmas == (1.0, 0.9, 0.75, 0.3, 0.0)
    first = WaypointConfig.from_checkpoint(
        {**RELEASED, "global_attn_offset": 0, "inference_fps": 30}
    )
    assert (
        first.is_global(0)
        and first.is_global(4)
        and not first.is_global(3)
        and first.time_step == 2
    )


def test_missing_keys_have_their_defaults() -> None:
    values = {
        key: RELEASED[key]
        for key in RELEASED
        if key not in ("n_kv_heads", "patch", "inference_fps")
    }
    config = WaypointConfig.from_checkpoint(
        {**values, "temporal_compression": 1, "value_residual": None}
    )
    assert (config.n_kv_heads, config.patch, config.inference_fps) == (32, (1, 1), 15)
    assert not config.value_residual and not config.prompted and config.rope_nyquist_frac == 0.8


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"d_model": None}, "missing required field `d_model`"),
        ({"moe": True}, "moe = True; this model implements"),
        ({"model_type": "waypoint-2"}, "model_type = 'waypoint-2'"),
        ({"tokens_per_frame": 500}, "tokens_per_frame is 500, height x width is 512"),
        ({"n_layers": "24"}, r"Expected `int`, got `str` - at `\$\.n_layers`"),
        ({"n_layers": 0}, "Expected `int` >= 1"),
        ({"n_kv_heads": 5}, "32 heads do not divide over 5"),
        ({"scheduler_sigmas": [1.0, 0.5]}, "must fall to 0"),
        ({"global_window": 100}, "no multiple of the dilation 8"),
        ({"prompt_conditioning": "cross_attention"}, "prompt_embedding_dim None"),
    ],
)
def test_unsupported_waypoint_configs_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WaypointConfig.from_checkpoint({**RELEASED, **changed})


def test_yaml_is_read_as_data_only(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("d_model: 64\nrope_theta: 10000.0\n")
    assert read_config(tmp_path) == {"d_model": 64, "rope_theta": 10000.0}
    file.write_text("model:\n  d_model: 64\n")
    assert read_config(tmp_path) == {"d_model": 64}
    for text in ("- 1", "a: !!python/object/apply:os.getpid []", "a: [", "1: 2"):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"config\.yaml"):
            read_config(tmp_path)


def test_controls_are_mouse_then_buttons_then_wheel() -> None:
    space = action_space(WaypointConfig.from_checkpoint(RELEASED))
    assert len(space.buttons) == 256 and len(set(space.button_names)) == 256
    assert space.prompt == "none" and space.image == "optional" and space.button_names[0x57] == "w"
    entries = [
        ActionFrame(buttons=("w", "mouse_left"), axes={"dx": 3.5, "dy": -1.0}, scroll=-120.0),
        ["space"],
    ]
    rows = read_actions(space, entries, {}, 2)
    assert rows is not None
    vectors = control_vectors(rows)
    assert vectors.shape == (2, 259)
    assert vectors[0, :2].tolist() == [3.5, -1.0] and vectors[0, -1] == -1
    assert vectors[0, 2:-1].nonzero().flatten().tolist() == [0x01, 0x57]
    assert vectors[1].nonzero().flatten().tolist() == [2 + 0x20]


def test_options_for_values_that_the_checkpoint_fixes_are_refused() -> None:
    checkpoint = {"transformer": RELEASED}
    assert read_stream(checkpoint, OmniConfig(model={"cuda_graphs": True})).options.cuda_graphs
    fixed = {
        "window_frames": 4,
        "decoder": "tiny",
        "sequence_parallel": True,
        "first_chunk_steps": 1,
    }
    for name, value in fixed.items():
        with pytest.raises(
            ValueError,
            match=f"remove {name}: this model's checkpoint fixes latent_frames",
        ):
            read_stream(checkpoint, OmniConfig(model={name: value}))


def test_a_chunk_is_one_latent_frame(checkpoints: dict[str, Path]) -> None:
    """Every chunk, including the first, has four video frames in Waypoint-1.5 and one video frame
    in Waypoint-1. Endpoints read this number from the model family.
    """
    for layout, each in (("v1_5", 4), ("v1", 1)):
        checkpoint = FAMILY.hf_config(checkpoints[layout])
        assert FAMILY.stream_info is not None and FAMILY.action_space is not None
        info = StreamInfo(**FAMILY.stream_info(checkpoint, OmniConfig()))
        assert (info.first_chunk_frames, info.chunk_frames, info.latent_frames(each), info.fps) == (
            each,
            each,
            1,
            60,
        )
        assert info.split(3 * each, True) == ([each] * 3, 0)
        plan = WaypointConfig.from_checkpoint(checkpoint["waypoint"]["transformer"]).plan
        assert [plan.pixel_frames(index) for index in range(2)] == [
            range(each),
            range(each, 2 * each),
        ]
        assert FAMILY.action_space(checkpoint, OmniConfig()).prompt == (
            "optional" if layout == "v1" else "none"
        )


def test_videos_may_start_without_an_image_at_the_sizes_of_the_model(
    checkpoints: dict[str, Path],
) -> None:
    """`/v1/videos` accepts the frame sizes that the family's capabilities allow. For example, it
    accepts 640x360, although 360 is not a multiple of 16.
    """
    assert FAMILY.capabilities is not None
    taken = FAMILY.capabilities(FAMILY.hf_config(checkpoints["v1_5"]), OmniConfig())
    assert {"world", "text_to_video", "image_to_video"} == set(
        taken.tasks
    ) and taken.size_multiple == (8, 8)
