# SPDX-License-Identifier: Apache-2.0
"""Tests of the tiny world's trainer: two steps, saving the state, one more step, the log, and the
exported files.
"""

import json
from pathlib import Path

import pytest
import torch

from training.tiny_world import state_files, train_world
from training.tiny_world.state_files import read_parts, write_parts
from training.tiny_world.train_world import main
from training.tiny_world.transformer import Sizes
from training.tiny_world.world_data import write_synthetic_data
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer
from vllm_omni.model_executor.models.lingbot_world.weights import load_transformer

SIZES = Sizes(dim=48, layers=2, heads=2, ffn=64, grid=(4, 6), window=9)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_synthetic_data(tmp_path / "data", SIZES, ranks=2, clips=6, frames=12)
    return tmp_path / "data"


def _train(data: Path, out: Path, *more: str) -> list[dict]:
    sizes = "--dim 48 --layers 2 --heads 2 --ffn 64 --grid 4 6 --window 9"
    files = ["--data", str(data), "--prompts", str(data / "prompts.pt"), "--out", str(out)]
    main([*files, *f"{sizes} --batch 4 --log-steps 1 --seed 3".split(), *more])
    return [json.loads(line) for line in (out / "curve.jsonl").read_text().splitlines()]


def test_training_stops_resumes_and_exports(data: Path, tmp_path: Path) -> None:
    """Training runs two steps, saves its state, resumes for one more step of the same schedule, and
    exports a folder.

    The package's loader accepts the exported folder.
    """
    first = _train(data, tmp_path / "a", "--max-steps", "2")
    steps = [line for line in first if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert (
        0.5 < steps[0]["loss"] < 4
        and len(steps[0]["by_chunk"]) == 4
        and len(steps[0]["by_frame"]) == 12
    )
    held = next(line for line in first if "held" in line)
    assert set(held["held"]["by_sigma"]) == {"1", "0.9375", "0.8333", "0.625"}
    for chunk in ("rollout_3", "rollout_1"):
        assert held[chunk].keys() == {"1", "2", "4", "still"}
        assert all(len(scores["mse"]) == 1 for scores in held[chunk].values())

    second = _train(data, tmp_path / "b", "--max-steps", "1", "--resume", str(tmp_path / "a"))
    assert [line["step"] for line in second if "loss" in line] == [1, 2, 3]
    assert read_parts(tmp_path / "b")["step"] == 3
    files = sorted((tmp_path / "b").iterdir())
    assert len(files) <= 5 and all(path.stat().st_size <= 15 << 20 for path in files)

    main(
        [
            "--resume",
            str(tmp_path / "b"),
            "--export",
            str(tmp_path / "transformers"),
            "--chunk-frames",
            "1",
        ]
    )
    config = LingBotWorldConfig.from_checkpoint(
        json.loads((tmp_path / "transformers" / "config.json").read_text())
    )
    assert config.frames_per_chunk == 1
    served = LingBotTransformer(config)
    load_transformer(served, tmp_path / "transformers", config)
    retained = read_parts(tmp_path / "b")["ema"]["head.head.weight"].float()
    assert torch.equal(served.head.head.weight, retained) and retained.abs().max() > 0


def test_training_lowers_the_loss(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On repeated clips, 60 steps reduce the overall loss by more than a fifth, and the loss at
    every sigma decreases.
    """
    rates = ("--muon-lr", "0.02", "--adam-lr", "0.01", "--total-minutes", "0.01")
    monkeypatch.setattr(train_world, "_WARMUP_STEPS", 20)
    lines = _train(
        data, tmp_path / "a", "--max-steps", "60", "--log-steps", "10", "--decay-from", "1", *rates
    )
    first, *_, last = [line for line in lines if "loss" in line]
    assert last["loss"] < 0.8 * first["loss"]
    assert all(last["by_sigma"][sigma] < loss for sigma, loss in first["by_sigma"].items())


def test_a_large_state_is_cut_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state is split into several files, and leftover files from an older, larger state are
    deleted.
    """
    monkeypatch.setattr(state_files, "_PART_BYTES", 1000)
    state = {"numbers": torch.arange(1500.0)}
    assert len(write_parts(state, tmp_path)) >= 6
    assert torch.equal(read_parts(tmp_path)["numbers"], state["numbers"])
    fewer = write_parts({"numbers": torch.zeros(3)}, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(fewer)
    with pytest.raises(ValueError, match="to go on from"):
        read_parts(tmp_path / "nowhere")
