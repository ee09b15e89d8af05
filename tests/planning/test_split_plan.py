# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni plan`: closed forms, errors against measured runs, the docs page, the command."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.main import make_parser
from vllm_omni.planning.cards import H200, SOURCES, Card
from vllm_omni.planning.cost import (
    Split,
    StreamModel,
    attention_tflop,
    cross_tflop,
    linear_tflop,
    predict,
    splits,
)
from vllm_omni.planning.models import NAMES, model_of
from vllm_omni.planning.report import candidates

MAX_ERROR = 0.20


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "plan_errors.py"
    spec = importlib.util.spec_from_file_location("plan_errors", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    args = make_parser().parse_args(["plan", *argv])
    assert args.run(args) == 0
    return capsys.readouterr().out


def test_every_measured_run_is_predicted_within_20_percent(script: ModuleType) -> None:
    """Chunk interval, time to first frame and peak memory of one GPU, Ulysses 2 and 4, PP 2, and causal Wan 1.3B."""
    rows = script.rows()
    assert {row.run for row in rows} >= {
        *("lingbot_world", "lingbot_world_ulysses2", "lingbot_world_ulysses4", "lingbot_world_pp2"),
        "streaming_wan_1_3b",
    }
    assert {f"{row.run}: {row.quantity}": row.error for row in rows if abs(row.error) > MAX_ERROR} == {}


def test_the_docs_page_is_what_the_script_makes(script: ModuleType) -> None:
    """`benchmarks/plan_errors.py --write` renews it."""
    page = script.PAGE.read_text()
    assert script.page(page) == page
    assert "| lingbot_world_ulysses4 |" in page


def test_every_constant_names_its_source() -> None:
    assert set(SOURCES) == set(Card.__dataclass_fields__) - {"name"}


@pytest.mark.parametrize(
    ("name", "window", "linear", "attention", "cross"),
    [
        ("causal_wan_1_3b", 9, 11.71, 12.11, 0.44),
        ("causal_wan_1_3b", 21, 11.71, 28.26, 0.44),
        ("causal_wan_14b", 9, 111.9, 53.8, 1.96),
        ("lingbot_world", 18, 111.9, 107.7, 1.96),
    ],
)
def test_flops_of_a_pass(name: str, window: int, linear: float, attention: float, cross: float) -> None:
    """TFLOP of one pass over three latent frames at 480x832."""
    model = model_of(name)
    assert linear_tflop(model, 3) == pytest.approx(linear, rel=2e-3)
    assert attention_tflop(model, 3, window) == pytest.approx(attention, rel=2e-3)
    assert cross_tflop(model, 3) == pytest.approx(cross, rel=6e-3)


def test_models_have_the_parameters_of_their_checkpoints() -> None:
    assert [model_of(name).parameters for name in NAMES] == [18_544_332_864, 1_418_996_800, 14_288_491_584]


def test_splits_are_those_that_can_be_served() -> None:
    """Ranks divide the heads; nothing uses more GPUs than there are; nothing is listed twice."""
    model = model_of("causal_wan_1_3b")
    found = splits(model, 8)
    assert len(set(found)) == len(found)
    assert all(split.gpus <= 8 and model.heads % split.ranks == 0 for split in found)
    assert {split.ranks for split in found} == {1, 2, 3, 4, 6}
    assert splits(model, 1) == [Split()]


def test_stages_help_several_sessions_and_never_one() -> None:
    """A strict session's passes follow one another."""
    model = model_of("lingbot_world")
    one, two = predict(model, H200, Split()), predict(model, H200, Split(1, 2))
    assert two.chunk_ms >= one.chunk_ms and two.memory_bytes < one.memory_bytes
    filled = predict(model, H200, Split(1, 2), sessions=2)
    assert filled.per_chunk_ms < 0.7 * one.per_chunk_ms
    assert candidates(model, H200, 4, 1)[0].split == Split(4)
    assert candidates(model, H200, 4, 4)[0].split.gpus == 4


def test_a_vae_stage_takes_the_decode_out_of_a_sessions_way() -> None:
    """The next chunk's steps run beside it; it is never faster than the decode alone."""
    model = model_of("causal_wan_1_3b", window=9)
    one, beside = predict(model, H200, Split()), predict(model, H200, Split(1, 2, vae_stage=True))
    assert beside.chunk_ms == pytest.approx(one.chunk_ms - one.decode_ms, rel=0.01)
    assert beside.memory_bytes < one.memory_bytes and beside.first_frame_ms >= one.first_frame_ms
    many = predict(model, H200, Split(6, 2, vae_stage=True), sessions=8)
    assert many.per_chunk_ms >= many.decode_ms
    assert str(Split(2, 3, vae_stage=True)) == "Ulysses 2 x PP 2 + VAE"


@pytest.mark.parametrize(
    "larger", [lambda model: replace(model, window=21), lambda model: replace(model, height=720, width=1280)]
)
def test_more_work_takes_longer_and_more_memory(larger: Callable[[StreamModel], StreamModel]) -> None:
    model = model_of("lingbot_world")
    before, after = predict(model, H200, Split()), predict(larger(model), H200, Split())
    assert after.chunk_ms > before.chunk_ms and after.memory_bytes > before.memory_bytes
    assert after.session_bytes > before.session_bytes and after.max_sessions <= before.max_sessions


def test_the_command_prints_the_best_split_and_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    output = plan(capsys, "lingbot_world", "--n", "4")
    assert "best: Ulysses 4 --tensor-parallel-size 4 --additional-config.omni.model.sequence_parallel true" in output
    flags = "--pipeline-parallel-size 2 --additional-config.omni.vae_stage true"
    assert f"best: 1 GPU + VAE {flags}" in plan(capsys, "causal_wan_1_3b", "--n", "2", "--window", "9")
    assert "FPS" in plan(capsys, "causal_wan_14b", "--gpu", "H200", "--n", "2", "--sessions", "2", "--window", "9")


def test_a_checkpoint_directory_can_be_planned(capsys: pytest.CaptureFixture[str], lingbot_world: Path) -> None:
    assert "lingbot_world: 480x832" in plan(capsys, str(lingbot_world), "--n", "2")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["lingbot_world", "--gpu", "A100"], "measured are H200"),
        (["lingbot_world", "--n", "0"], "from 1 to 64"),
        (["lingbot_world", "--height", "100"], "multiples of 16"),
        (["no_such_model"], "neither a checkpoint directory nor one of"),
        (["lingbot_world", "--sessions", "60"], "fit no split"),
    ],
)
def test_what_cannot_be_planned_is_refused(argv: list[str], words: str) -> None:
    args = make_parser().parse_args(["plan", *argv])
    with pytest.raises(CommandError, match=words):
        args.run(args)
