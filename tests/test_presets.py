# SPDX-License-Identifier: Apache-2.0
"""Tests of `omni.model.preset`: the options that a preset sets, what overrides these options, and
when a preset is rejected.

tests/worker/test_degradations.py runs models with the `realtime` preset.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from vllm_omni import registration
from vllm_omni.config import OmniConfig
from vllm_omni.engine_arguments.refusals import check_preset_precision
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.serve import ServeFlags, check
from vllm_omni.model_executor.models.causal_wan.config import CausalWanOptions
from vllm_omni.model_executor.models.lingbot_world.config import LingBotOptions
from vllm_omni.model_executor.models.registry import family_names, get_family
from vllm_omni.model_executor.presets import FP8_CHANNELS, ServedPreset, served_preset
from vllm_omni.worlds.description import read_description, with_defaults

VILLAGE = Path(__file__).parents[1] / "vllm_omni" / "worlds" / "village"


def configure(model: Path, options: dict[str, Any], **arguments: Any) -> VllmConfig:
    """Create the engine configuration as a server or `LLM` does."""
    return EngineArgs(
        model=str(model),
        config_format="omni",
        skip_tokenizer_init=True,
        enforce_eager=True,
        additional_config={"omni": {"height": 32, "width": 48, "model": options}},
        **arguments,
    ).create_engine_config()


def resolved(name: str, options: dict[str, Any], channels: int = 5120) -> ServedPreset:
    presets, fp8 = get_family("lingbot_world").presets, options.pop("fp8", None)
    return served_preset(presets, name, options, channels=channels, fp8=fp8)  # type: ignore[arg-type]


def test_an_option_that_is_set_overrides_the_preset() -> None:
    parsed = LingBotOptions.parse({"preset": "realtime", "window_frames": 12})
    assert (parsed.window_frames, parsed.sink_frames, parsed.decoder) == (12, 3, "tiny")
    assert parsed.denoise_schedule().num_steps == 2
    own_steps = {"preset": "realtime", "denoise_indices": [0, 250, 500]}
    assert LingBotOptions.parse(own_steps).denoise_schedule().num_steps == 3
    assert LingBotOptions.parse({}) == LingBotOptions.parse({"preset": "reference"})


def test_a_preset_overrides_the_release_and_keeps_its_noise_levels() -> None:
    """A preset overrides a released model's number of steps but keeps the model's noise levels.

    CausVid was trained with three steps. The preset keeps the first and last of them.
    """
    checkpoint = {"release": "causvid"}
    release = CausalWanOptions.of_checkpoint(checkpoint, {})
    fast = CausalWanOptions.of_checkpoint(checkpoint, {"preset": "realtime"})
    every, kept = release.text_schedule().timesteps, fast.text_schedule().timesteps
    assert len(every) == 3 and kept == (every[0], every[2])


def test_a_world_description_overrides_the_preset() -> None:
    """A world description overrides the preset. The village was trained for one step, and its
    description sets one step.
    """
    description = read_description(VILLAGE)
    given = {"omni": {"model": {"preset": "realtime", "decoder": "wan"}}}
    omni = OmniConfig.from_additional_config(with_defaults(given, description))
    parsed = LingBotOptions.parse(omni.model)
    assert parsed.denoise_schedule().num_steps == 1 and parsed.window_frames == 15
    assert parsed.decoder == "wan", "the user's option is above both"
    assert resolved("realtime", omni.model).replaced == ("max_steps", "decoder")


@pytest.mark.parametrize(
    ("name", "options", "channels", "expected"),
    [
        ("reference", {}, 5120, (None, None)),
        ("balanced", {}, FP8_CHANNELS, ("fp8", "fp8")),
        ("balanced", {}, FP8_CHANNELS - 1, (None, "fp8")),
        ("small", {}, 1536, ("fp8", "fp8")),
        ("realtime", {"fp8": False}, 5120, (None, None)),
        ("realtime", {"fp8": True}, 5120, ("fp8", "fp8")),
    ],
)
def test_weights_are_quantized_where_it_saves_time_or_memory(
    name: str, options: dict[str, Any], channels: int, expected: tuple[str | None, str | None]
) -> None:
    preset = resolved(name, options, channels)
    assert (preset.quantization, preset.kv_cache_dtype) == expected


def test_the_precision_reaches_the_engine_unless_the_user_sets_it(
    lingbot_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the user sets no precision, the engine uses the preset's precision. At startup, one log
    line states the preset.
    """
    small = {"preset": "small", "fp8": True}
    lines: list[str] = []
    monkeypatch.setattr(
        registration.logger, "info", lambda text, *values: lines.append(text % values)
    )
    config = configure(lingbot_world, small, dtype="bfloat16")
    assert config.model_config.quantization == "fp8_per_channel"
    assert config.cache_config.cache_dtype == "fp8"
    assert lines == [
        "preset small: decoder tiny, text_encoder_device cpu, --quantization fp8, "
        "--kv-cache-dtype fp8; speed: not measured; quality: not measured"
    ]
    own = {"dtype": "bfloat16", "quantization": "fp8_per_block", "kv_cache_dtype": "fp8_e4m3"}
    config = configure(lingbot_world, small, **own)
    assert config.model_config.quantization == "fp8_per_block"
    assert config.cache_config.cache_dtype == "fp8_e4m3"
    config = configure(lingbot_world, {"preset": "small", "fp8": False})
    assert (config.model_config.quantization, config.cache_config.cache_dtype) == (None, "auto")


@pytest.mark.parametrize(
    ("options", "dtype", "reason"),
    [
        ({"preset": "balanced"}, "bfloat16", r"'balanced' has keys and values in FP8.*\(cpu\)"),
        ({"preset": "small"}, "bfloat16", r"weights and keys and values in FP8.*fp8 to false"),
        ({"preset": "small", "fp8": True}, "float32", r"float32: pass --dtype bfloat16, or set"),
        ({"preset": "fastest"}, "auto", r"allowed values: 'balanced', 'realtime', 'reference'"),
    ],
)
def test_a_preset_that_cannot_work_is_refused(
    lingbot_world: Path, options: dict[str, Any], dtype: str, reason: str
) -> None:
    """A preset that cannot work is rejected when the engine configuration is created, and
    `vllm serve --omni` prints the error in one line.
    """
    with pytest.raises(ValueError, match=reason):
        configure(lingbot_world, options, dtype=dtype)
    flags = [f"--additional-config.omni.model.{name} {value}" for name, value in options.items()]
    command = f"{lingbot_world} --dtype {dtype} {' '.join(flags)}".replace("True", "true")
    with pytest.raises(CommandError, match=reason) as caught:
        check(ServeFlags.scan(command.split()))
    assert "\n" not in str(caught.value)


def test_a_gpu_without_fp8_is_refused_unless_the_user_insists() -> None:
    preset = resolved("realtime", {})
    with pytest.raises(ValueError, match=r"NVIDIA A100.*no FP8 units"):
        check_preset_precision(preset, "bfloat16", has_fp8=False, device="NVIDIA A100")
    check_preset_precision(preset, "bfloat16", has_fp8=True, device="NVIDIA H100")
    forced = resolved("realtime", {"fp8": True})
    check_preset_precision(forced, "bfloat16", has_fp8=False, device="NVIDIA A100")


def test_a_missing_tiny_decoder_is_refused_before_anything_starts(
    lingbot_world: Path, tmp_path: Path
) -> None:
    """A missing tiny decoder is an error before any process starts, unless the weights are
    random.
    """
    world = tmp_path / "world"
    shutil.copytree(lingbot_world, world)
    (world / "taew2_1.pth").unlink()
    options = {"preset": "realtime", "fp8": False}
    reason = r"lacks taew2_1.pth, which omni.model.decoder 'tiny' \(preset 'realtime'\) needs"
    with pytest.raises(ValueError, match=reason):
        configure(world, options)
    configure(world, options, load_format="dummy")
    configure(world, {**options, "decoder": "wan"})


def test_families_offer_the_presets_that_make_sense(tmp_path: Path) -> None:
    offered = {name: tuple(get_family(name).presets) for name in family_names()}
    assert {name: presets for name, presets in offered.items() if presets} == {
        "lingbot_world": ("reference", "balanced", "realtime", "small"),
        "causal_wan": ("reference", "balanced", "realtime", "small"),
        "matrix_game": ("reference", "realtime", "small"),
        "abot_world": ("reference", "balanced", "realtime", "small"),
        "dreamx_world": ("reference", "balanced", "realtime", "small"),
        "waypoint": ("reference", "small"),
    }
    waypoint = get_family("waypoint")
    waypoint.make_tiny(tmp_path, 0, waypoint.layouts[0])
    with pytest.raises(ValueError, match="no preset 'realtime'; allowed: reference, small"):
        configure(tmp_path, {"preset": "realtime"})
