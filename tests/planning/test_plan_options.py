# SPDX-License-Identifier: Apache-2.0
"""The options that `vllm-omni plan` prints are accepted by `vllm serve --omni`, and a server with
these options serves the planned model, from which the memory is computed.
"""

import argparse
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from vllm_omni.config import OmniConfig
from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.main import make_parser
from vllm_omni.entrypoints.cli.plan import LORA_RANKS
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.planning import report
from vllm_omni.planning.models import model_of
from vllm_omni.planning.report import WEIGHT_ITEMSIZES, plan_text
from vllm_omni.planning.stream_model import StreamModel
from vllm_omni.worlds.description import read_description, with_defaults

SIZE = ["--height", "96", "--width", "160"]
LORA = ["--max-loras", "2", "--max-lora-rank", "8"]
FP8 = ["--kv-cache-dtype", "fp8", "--quantization", "fp8"]
CASES = [
    ("lingbot_world", [*SIZE, "--window", "15", "--text-encoder", "host", *FP8, *LORA]),
    ("lingbot_world", ["--height", "96"]),
    ("lingbot_world", ["--latent-frames", "2", "--kv-cache-dtype", "fp8"]),
    ("lingbot_world", ["--preset", "small", "--text-encoder", "gpu"]),
    ("lingbot_world", ["--preset", "realtime", "--window", "18"]),
    ("causal_wan", [*SIZE, "--window", "12", "--text-encoder", "host"]),
    ("causal_wan", ["--window", "9", "--matched-steps", "3", "--chunks-in-flight", "2"]),
    ("causal_wan", ["--latent-frames", "1", "--video-input"]),
    ("matrix_game", [*SIZE, "--text-encoder", "host"]),
    ("waypoint", ["--text-encoder", "host", "--kv-cache-dtype", "fp8"]),
]


def run_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> tuple[StreamModel, list[str]]:
    """Run `vllm-omni plan`. Return the planned model and the options printed for one GPU."""
    planned: list[StreamModel] = []

    def recorded(model: StreamModel, *rest: Any) -> str:
        planned.append(model)
        return plan_text(model, *rest)

    monkeypatch.setattr(report, "plan_text", recorded)
    args = make_parser().parse_args(["plan", *argv])
    assert args.run(args) == 0
    rows = capsys.readouterr().out.splitlines()
    row = next(row for row in rows if row.startswith("1 GPU "))
    return planned[0], shlex.split(row.partition(" sessions")[2])


def served_model(name: str, directory: Path, args: argparse.Namespace) -> StreamModel:
    """Return the model that a server with the given arguments serves.

    Chunks, windows and preset values are read with the code that the server itself uses.
    """
    family = get_family(name)
    config = family.hf_config(directory)
    description = read_description(directory)
    omni = OmniConfig.from_additional_config(
        with_defaults(args.additional_config, description, family.size_of(config))
    )
    assert family.stream_info is not None and family.served_preset is not None
    info = family.stream_info(config, omni)
    preset = family.served_preset(config, omni).next_to(
        weights=args.quantization is not None, keys_and_values=args.kv_cache_dtype != "auto"
    )
    options = {**preset.model, **omni.model}
    defaults = model_of(str(directory), preset.name)
    window = info["window_frames"] or options.get("window_frames", defaults.window)
    fields = {
        "chunk": info["latent_frames_per_chunk"],
        "window": window,
        "denoise": min(model_of(str(directory)).denoise, options.get("max_steps", 64)),
        "text_on_cpu": options.get("text_encoder_device") == "cpu",
        "video_input": options.get("video_input", False),
        "noise_matched": options.get("cache") == "noise_matched",
        "in_flight": omni.chunks_in_flight,
        "weight_itemsize": WEIGHT_ITEMSIZES[args.quantization or preset.quantization or "auto"],
        "kv_itemsize": 1 if "fp8" in (args.kv_cache_dtype, preset.kv_cache_dtype) else 2,
        "adapters": args.max_loras if args.enable_lora else 0,
        "adapter_rank": args.max_lora_rank if args.enable_lora else 0,
    }
    if not defaults.grid_tokens:
        fields |= {"height": omni.height, "width": omni.width}
    return replace(defaults, **fields)


@pytest.mark.parametrize(("name", "argv"), CASES, ids=[f"{n} {' '.join(a)}" for n, a in CASES])
def test_the_printed_options_serve_the_planned_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    argv: list[str],
) -> None:
    """`vllm serve --omni` accepts the printed options, and serves the planned model with them."""
    directory, family = tmp_path / "model", get_family(name)
    family.make_tiny(directory, 0, family.layouts[0])
    planned, options = run_plan(capsys, monkeypatch, [str(directory), *argv])
    assert options, "the planned model differs from the defaults"
    # The tiny checkpoint is stored in fp32, and this machine may have no FP8 units: the FP8 of a
    # preset needs bf16 weights and such units.
    fp8 = ["--dtype", "bfloat16", "--additional-config.omni.model.fp8", "true"]
    device = fp8 if "--preset" in argv else []
    command = serve.plan([str(directory), *options, *device, "--port", "0"], {}, [], on_cpu=True)
    args = serve.serve_parser().parse_args(["serve", *command.argv])
    assert served_model(name, directory, args) == planned


def test_more_sessions_than_the_default_are_an_option(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server refuses sessions above `omni.max_sessions`, so a larger number is printed."""
    for sessions in (8, 9):
        argv = ["causal_wan_1_3b", "--sessions", str(sessions), "--kv-cache-dtype", "fp8"]
        _, options = run_plan(capsys, monkeypatch, argv)
        assert ("--additional-config.omni.max_sessions" in options) == (sessions > 8)


@pytest.mark.parametrize(
    ("argv", "note"),
    [
        (["--quantization", "nvfp4"], "stored in NVFP4"),
        (["--matched-steps", "6", "--chunks-in-flight", "1"], "omni.model.denoising_steps"),
    ],
)
def test_a_setting_without_an_option_is_noted(
    capsys: pytest.CaptureFixture[str], argv: list[str], note: str
) -> None:
    args = make_parser().parse_args(["plan", "causal_wan_1_3b", *argv])
    assert args.run(args) == 0
    (line,) = (row for row in capsys.readouterr().out.splitlines() if row.startswith("note: "))
    assert note in line


def test_adapters_have_the_ranks_of_vllm() -> None:
    from vllm.config.lora import MaxLoRARanks

    assert get_args(MaxLoRARanks) == LORA_RANKS


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lingbot_world", "--window", "6"], "leaves no room for chunks"),
        (["waypoint", "--height", "480"], "fixes the video size"),
        (["all", "--window", "9"], "leaves no room for chunks"),
    ],
)
def test_a_plan_that_no_server_accepts_is_refused(argv: list[str], words: str) -> None:
    args = make_parser().parse_args(["plan", *argv])
    with pytest.raises(CommandError, match=words):
        args.run(args)


def test_adapters_are_refused_for_a_model_without_them() -> None:
    """`vllm serve` refuses adapters for such a model, so `plan` prints no options for them."""
    with pytest.raises(ValueError, match="waypoint takes no adapters; drop --max-loras"):
        model_of("waypoint", adapters=2)
