# SPDX-License-Identifier: Apache-2.0
"""Tests of the files in an evaluation run: the VBench and WBench layouts, and the report."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from test_steering import TURN_LATENTS, controls, film

from vllm_omni.entrypoints.media.mp4 import encode_mp4
from vllm_omni.evaluation.report import measure_run, read_frames, reference_frames, uint8_frame
from vllm_omni.evaluation.run_folder import RunFolder
from vllm_omni.evaluation.steering import PROGRAMS


def add(folder: RunFolder, prompt: str, frames: np.ndarray, **fields: Any) -> Path:
    path = folder.next_path(prompt, ".mp4")
    path.write_bytes(encode_mp4(frames, 16))
    folder.add(path, prompt=prompt, **fields)
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Return an evaluation run with two key programs. Its videos move as the keys specify."""
    folder = RunFolder.create(tmp_path, "my_world")
    for seed, program in enumerate(("left_and_back", "walk_and_back")):
        held = controls(program)
        add(folder, "a soft wall", film(program), program=program, controls=held, seed=seed)
    return folder


def report(folder: RunFolder) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder.path / "report.json").read_text())
    return document


def test_names_are_those_of_vbench(run: RunFolder) -> None:
    """A run uses the file names that VBench reads: `PROMPT-INDEX.mp4`, prompt lists, and a map from
    files to prompts.
    """
    names = ["a soft wall-0.mp4", "a soft wall-1.mp4"]
    assert sorted(path.name for path in (run.path / "videos").iterdir()) == names
    (info,) = json.loads((run.path / "vbench_info.json").read_text())
    assert info["prompt_en"] == "a soft wall" and "imaging_quality" in info["dimension"]
    assert info["video_list"] == [f"videos/{name}" for name in names]
    prompts = json.loads((run.path / "vbench_prompts.json").read_text())
    assert prompts == dict.fromkeys(names, "a soft wall")


def test_cases_are_those_of_wbench(run: RunFolder) -> None:
    """Each WBench case has a video named after it, and all turns of a case have the same length."""
    cases, videos = run.path / "wbench" / "cases", run.path / "wbench" / "videos"
    for path in cases.iterdir():
        case = json.loads(path.read_text())
        assert path.stem == f"case_{case['id']}"
        assert (videos / f"case_{case['id']}_combined.mp4").is_file()
        assert {turn["type"] for turn in case["interactions"]} == {"navigation"}
    case = json.loads((cases / "case_left_and_back_0.json").read_text())
    assert [turn["action"] for turn in case["interactions"]] == ["left", "right"]
    frames, _ = read_frames(videos / "case_left_and_back_0_combined.mp4")
    assert len(frames) == 1 + 2 * TURN_LATENTS * len(PROGRAMS["left_and_back"])


@pytest.mark.parametrize("prompt", ["a/b\\c\nd", "x" * 500, "ü" * 300, ""])
def test_any_prompt_gets_a_file(prompt: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "m")
    first, second = (add(folder, prompt, film("rest")) for _ in range(2))
    assert first.parent == second.parent == tmp_path / "videos" and first != second
    assert json.loads((tmp_path / "vbench_prompts.json").read_text())[first.name] == prompt


def test_a_good_run_has_no_findings(run: RunFolder) -> None:
    measure_run(run)
    assert [video["findings"] for video in report(run)["videos"]] == [[], []]
    text = (run.path / "report.md").read_text()
    assert "my_world" in text and "Every measure lies in its usual range" in text
    with Image.open(run.path / "frames.png") as sheet:
        assert sheet.width > 6 * 240 and sheet.height > 2 * 180


Break = Callable[[np.ndarray], np.ndarray]


def flickers(frames: np.ndarray) -> np.ndarray:
    sign = np.where(np.arange(len(frames)) % 2, 1, -1)[:, None, None, None]
    return (frames + 12.0 * sign).clip(0, 255).astype(np.uint8)


def fades(frames: np.ndarray) -> np.ndarray:
    share = np.linspace(1, 0.4, len(frames))[:, None, None, None]
    return (frames * share).astype(np.uint8)


@pytest.mark.parametrize(
    ("damage", "measures"),
    [
        (flickers, {"flicker"}),
        (fades, {"contrast_ratio", "colour_drift", "sharpness_ratio"}),
        (lambda frames: frames[:, :, ::-1], {"turn_ratio", "turn_missed"}),
        (lambda frames: frames[[0] * len(frames)], {"turn_ratio", "turn_missed", "return_gain"}),
        (lambda frames: np.full_like(frames, 90), {"contrast", "turn_missed", "return_gain"}),
    ],
)
def test_a_broken_video_is_named(damage: Break, measures: set[str], tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "m")
    frames = np.ascontiguousarray(damage(film("left_and_back")))
    add(folder, "p", frames, program="left_and_back", controls=controls("left_and_back"))
    (result,) = measure_run(folder)
    assert measures <= {finding.split()[0] for finding in result.findings()}
    assert f"videos/{Path(result.made.file).name}" in (tmp_path / "report.md").read_text()


def test_a_run_is_measured_again_from_its_files(run: RunFolder) -> None:
    measure_run(run)
    first = report(run)
    measure_run(RunFolder.read(run.path))
    assert report(run) == first


def test_any_videos_and_images_are_measured(tmp_path: Path) -> None:
    """A folder without a run description can be measured too. In this test, the folder contains a
    clip and an image of a different shape.
    """
    (tmp_path / "clip.mp4").write_bytes(encode_mp4(film("rest"), 16))
    Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")
    measured = measure_run(RunFolder.read(tmp_path))
    assert [(result.frames, result.size) for result in measured] == [(17, (64, 48)), (1, (40, 40))]
    assert set(measured[1].measures) == {"sharpness", "contrast"}


@pytest.mark.parametrize("content", [b"", b"no video", b"\0\0\0 ftypisom" + bytes(64)])
def test_a_corrupt_video_is_refused_by_name(content: bytes, run: RunFolder) -> None:
    (run.path / "videos" / "a soft wall-1.mp4").write_bytes(content)
    with pytest.raises(ValueError, match=r"a soft wall-1\.mp4 cannot be measured"):
        measure_run(run)


def test_a_missing_video_is_refused_by_name(run: RunFolder) -> None:
    (run.path / "videos" / "a soft wall-0.mp4").unlink()
    with pytest.raises(ValueError, match=r"a soft wall-0\.mp4 cannot be measured"):
        measure_run(run)


def test_a_video_cut_short_is_refused_by_name(run: RunFolder) -> None:
    path = run.path / "videos" / "a soft wall-0.mp4"
    path.write_bytes(encode_mp4(read_frames(path)[0][:5], 16))
    with pytest.raises(ValueError, match=r"a soft wall-0\.mp4 cannot be .* the video has 5 frames"):
        measure_run(run)


@pytest.mark.parametrize("content", ["{", '{"model": 3}', "\udcff"])
def test_a_damaged_description_is_refused(content: str, run: RunFolder) -> None:
    (run.path / "run.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        RunFolder.read(run.path)


def test_a_run_without_videos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was generated"):
        measure_run(RunFolder.create(tmp_path, "m"))


def test_a_folder_without_videos_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither run\.json nor files that end in \.mp4 or \.png"):
        RunFolder.read(tmp_path)


# -- reference frames ------------------------------------------------------------------------------


def test_reference_frames_are_compared_one_by_one(run: RunFolder, tmp_path_factory: Any) -> None:
    """Reference frames are compared one by one. For the first video, the reference is the identical
    video. For the second, the references are two single frames, one of which has inverted pixels.
    """
    folder = tmp_path_factory.mktemp("references")
    first, second = (run.path / "videos" / f"a soft wall-{n}.mp4" for n in range(2))
    (folder / first.name).write_bytes(first.read_bytes())
    frames = read_frames(second)[0]
    Image.fromarray(frames[0]).save(folder / "a soft wall-1.0.png")
    np.save(folder / "a soft wall-1.-1.npy", 255 - frames[-1])
    whole, single = (result.reference for result in measure_run(run, folder))
    assert whole["psnr"] == [100.0] * 17 and min(whole["ssim"]) == pytest.approx(1)
    assert max(single["psnr"]) == 100 and min(single["psnr"]) < 20 and len(single["ssim"]) == 2
    assert "Reference frames" in (run.path / "report.md").read_text()


def test_references_of_another_size_or_name_are_refused(run: RunFolder, tmp_path: Path) -> None:
    folder = tmp_path / "references"
    folder.mkdir()
    with pytest.raises(ValueError, match="has no reference for any video"):
        measure_run(run, folder)
    Image.new("RGB", (8, 8)).save(folder / "a soft wall-0.0.png")
    with pytest.raises(ValueError, match="must have the size of the video, 64x48"):
        measure_run(run, folder)
    (folder / "a soft wall-0.0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="cannot be measured"):
        reference_frames(folder, "a soft wall-0")


def test_frames_of_other_programs_are_read() -> None:
    """Frames written by other programs are accepted, even if they have the channels first, have an
    additional axis of length 1, or are floats in [-1, 1].
    """
    frame = np.random.default_rng(0).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    floats = np.moveaxis(frame / 127.5 - 1, -1, 0)[None]
    assert (uint8_frame(floats) == frame).all() and (uint8_frame(frame) == frame).all()
    for bad in (np.zeros((4, 4)), np.full((4, 4, 3), 7.0), np.full((4, 4, 3), np.nan)):
        with pytest.raises(ValueError, match="frame"):
            uint8_frame(bad)


def test_controls_survive_the_file(run: RunFolder) -> None:
    read = RunFolder.read(run.path).run
    assert msgspec.to_builtins(read) == msgspec.to_builtins(run.run)
