# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni evaluate` runs models on real servers and reports invalid input in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.quick_programs import run_python
from PIL import Image
from test_replay import record

from vllm_omni.actions import CAMERA_SPACE, ActionSpace, Axis, Button
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.evaluation.generate import entries
from vllm_omni.evaluation.run_folder import RunFolder
from vllm_omni.model_executor.models.registry import get_family


def refusal(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """Return the error line of a command that ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", *map(str, arguments)])
    shown = capsys.readouterr().err.strip()
    assert ended.value.code == 2 and shown.count("\n") == 0
    return shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nowhere"], "nowhere is not a directory"),
        (["--model", "{empty}"], "is no checkpoint of"),
        (["--model", "{speech}"], "generates no videos or images"),
        (["--program", "dance"], "--program dance: allowed: rest, "),
        (["--samples", "0"], "--samples must be from 1 to 1000, got 0"),
        (["--size", "64"], "--size must be WIDTHxHEIGHT in pixels, 832x480, got 64"),
        (["--turn", "65"], "--turn must be from 1 to 64, got 65"),
        (["--image", "nowhere.png"], "nowhere.png"),
        (["--image", "{words}"], "cannot identify image file"),
        (["--prompts", "{blank}"], "has no prompt"),
        (["--prompt", "x" * 20_000], "a prompt has 20000 characters; at most 16384"),
        (["--image", "{picture}", "--image", "{picture}"], "2 times --image for 0 prompts"),
        (["--server", "127.0.0.1:8000"], "pass its address, http://HOST:PORT"),
        (["--server", "http://127.0.0.1:9"], "does not answer"),
        (["--recordings", "nowhere.recording"], "nowhere.recording is not a file"),
        (["--recordings", "{words}"], "is not a recording"),
        (["--measure"], "neither run.json nor files"),
        (["--measure", "--reference", "nowhere"], "--reference nowhere is not a directory"),
    ],
)
def test_wrong_input_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    qwen2_5_omni: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    files = {name: tmp_path / name for name in ("empty", "words", "blank", "picture")}
    files["empty"].mkdir()
    files["words"].write_text("words")
    files["blank"].write_text("\n \n")
    Image.new("RGB", (8, 8)).save(files["picture"], "PNG")
    given = [text.format(**files, speech=qwen2_5_omni) for text in arguments]
    run = tmp_path / "run"
    assert message in refusal(capsys, run, *given)
    assert not any(path.is_file() for path in run.rglob("*"))


def test_a_folder_with_files_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("words")
    assert "exists and is not an empty directory" in refusal(capsys, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_corrupt_video_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.mp4").write_bytes(encode_mp4(np.zeros((4, 16, 16, 3), np.uint8), 16))
    (tmp_path / "torn.mp4").write_bytes((tmp_path / "good.mp4").read_bytes()[:200])
    assert "torn.mp4 cannot be measured" in refusal(capsys, tmp_path, "--measure")


# -- keys as a model's controls --------------------------------------------------------------------

MOUSE = ActionSpace(
    buttons=(Button("key_w", "W", ("KeyW",)), Button("key_j", "J", ("KeyJ",))),
    axes=(Axis(name="dx", title="mouse right", unit="pixels", mouse="x", scale=0.5),),
)


def test_keys_become_the_controls_of_the_model() -> None:
    """If a model has no look keys, turns become mouse motion. The letter j may be a different
    button in that model, so a turn does not press it.
    """
    assert entries(CAMERA_SPACE, ["", "w", "j"]) == [[], ["w"], ["j"]]
    assert entries(MOUSE, ["w", "j"]) == [["key_w"], {"axes": {"dx": -10.0}}]
    assert entries(MOUSE, ["w", "s"]) is None


# -- real servers ----------------------------------------------------------------------------------


def evaluate(*arguments: Any) -> dict[str, Any]:
    """Run the command and return its report."""
    command = ("-m", "vllm_omni.entrypoints.cli.main", "evaluate", *arguments)
    result = run_python(*command, limit_s=800, environ={"VLLM_CPU_KVCACHE_SPACE": "1"})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    report: dict[str, Any] = json.loads((Path(arguments[0]) / "report.json").read_text())
    return report


@pytest.mark.nightly
def test_the_village_is_evaluated(tmp_path: Path) -> None:
    """The view of the village turns as commanded, and returns to the first view once the camera has
    turned back.
    """
    out = tmp_path / "run"
    videos = evaluate(out, "--program", "rest", "left_and_back", "walk_and_back", "--turn", 6)[
        "videos"
    ]
    assert [video["program"] for video in videos] == ["rest", "left_and_back", "walk_and_back"]
    assert {(video["frames"], *video["size"]) for video in videos} == {(49, 160, 96)}
    rest, turn, walk = (video["measures"] for video in videos)
    assert turn["turn_ratio"] == pytest.approx(1, abs=0.1) and turn["turn_missed"] == 0
    assert turn["return_psnr"] > 18 and turn["return_gain"] > 3
    assert walk["step_growth"] > 1.02 and walk["step_missed"] <= 0.2
    assert rest["frame_difference"] < turn["frame_difference"] / 2
    assert (out / "wbench" / "videos" / "case_left_and_back_1_combined.mp4").is_file()
    assert len(list((out / "videos").iterdir())) == 3
    assert evaluate(out, "--measure")["videos"] == videos


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "options", "suffix", "frames"),
    [
        ("wan2_2", ["--num-frames", 9, "--size", "64x64"], ".mp4", 9),
        ("diffusers_pipeline", ["--size", "64x64"], ".png", 1),
    ],
)
def test_a_model_without_controls_is_evaluated(
    family: str, options: list[Any], suffix: str, frames: int, tmp_path: Path
) -> None:
    """To evaluate a model without controls, the command generates two clips with different seeds
    for each prompt, or two images if the model does not generate video.
    """
    get_family(family).make_tiny(tmp_path / "model", 0, get_family(family).layouts[0])
    out = tmp_path / "run"
    more = ["--model", tmp_path / "model", "--prompt", "A red fox", "--samples", 2, *options]
    videos = evaluate(out, *more)["videos"]
    assert [Path(video["file"]).name for video in videos] == [
        f"A red fox-{n}{suffix}" for n in range(2)
    ]
    assert [video["seed"] for video in videos] == [0, 1]
    assert {video["frames"] for video in videos} == {frames}
    assert all(video["measures"]["sharpness"] > 0 for video in videos)
    assert not (out / "wbench").exists()


@pytest.mark.nightly
def test_a_recording_is_evaluated(null_world: Path, make_runner: Any, tmp_path: Path) -> None:
    """To evaluate a recording, its chunks are generated again with the keys of the recorded
    requests.
    """
    path = record(tmp_path / "walk.recording", make_runner(null_world), "null_world", null_world)
    (video,) = evaluate(tmp_path / "run", "--recordings", path)["videos"]
    assert (video["frames"], video["prompt"], video["seed"]) == (33, "a harbour", 3)
    (made,) = RunFolder.read(tmp_path / "run").run.files
    assert made.controls is not None
    assert made.controls.keys == ["w", "jw", ""] * 3
    assert made.controls.num_frames == 33 and made.controls.turn_degrees == 6
