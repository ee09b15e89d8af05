# SPDX-License-Identifier: Apache-2.0
"""Measures a run's files, and writes `report.json`, `report.md` and `frames.png`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, UnidentifiedImageError

from vllm_omni.entrypoints.media.mp4 import contact_sheet, decode_mp4
from vllm_omni.evaluation.measures import appearance, likeness_of_frames
from vllm_omni.evaluation.run_folder import MadeFile, RunFolder
from vllm_omni.evaluation.steering import steering

_SHEET_COLUMNS: Final = 6
_SHEET_WIDTH: Final = 240


@dataclass(frozen=True)
class Measure:
    """A column of the report, and the usual range of its values for good videos."""

    name: str
    """Measure name."""
    title: str
    """Column heading."""
    meaning: str
    """Explanation of the measure for the report's readers."""
    low: float = -math.inf
    """Smallest usual value of the measure."""
    high: float = math.inf
    """Largest usual value of the measure."""
    too_low: str = ""
    """Interpretation of a value below the usual range."""
    too_high: str = ""
    """Interpretation of a value above the usual range."""

    def usual(self) -> str:
        """Return the measure's usual range as text."""
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"{self.low:g} to {self.high:g}"
        if math.isfinite(self.low):
            return f"{self.low:g} or more"
        return f"{self.high:g} or less" if math.isfinite(self.high) else ""


PICTURE: Final = (
    Measure("sharpness", "sharpness", "mean difference of neighbouring pixels, in levels of 255"),
    Measure(
        "sharpness_ratio",
        "end / start",
        "sharpness of the last tenth of the frames over that of the first",
        0.7,
        1.5,
        "the frames grow soft",
        "the frames grow noisy",
    ),
    Measure(
        "contrast",
        "contrast",
        "standard deviation of the brightness, in levels",
        5,
        120,
        "the frames are nearly uniform",
        "the frames are little but black and white",
    ),
    Measure(
        "contrast_ratio",
        "end / start",
        "contrast of the last tenth over that of the first",
        0.7,
        1.5,
        "the frames grow flat",
        "the frames grow harsh",
    ),
    Measure(
        "colour_drift",
        "colour drift",
        "change of the mean colour from the first tenth to the last, in levels",
        high=20,
        too_high="the colours change over the video",
    ),
    Measure(
        "flicker",
        "flicker",
        "distance of a frame's brightness from the mean of its neighbours', in levels",
        high=3,
        too_high="the brightness jumps from frame to frame",
    ),
    Measure(
        "frame_difference",
        "frame difference",
        "mean difference of consecutive frames, in levels: small without motion",
    ),
)
"""Measures computed for every video."""

STEERING: Final = (
    Measure("turn_degrees", "turn, degrees", "median turn of a latent frame with a look key"),
    Measure(
        "turn_ratio",
        "turn / command",
        "the same over the turn that the key commands; only for models that define it",
        0.7,
        1.3,
        "turns are smaller than commanded",
        "turns are larger than commanded",
    ),
    Measure(
        "turn_missed",
        "turns missed",
        "share of latent frames with a look key that do not turn in its direction",
        high=0.2,
        too_high="turns that were commanded do not happen",
    ),
    Measure(
        "step_growth",
        "step",
        "median enlargement of the centre by a step ahead; its inverse for a step back",
    ),
    Measure(
        "step_missed",
        "steps missed",
        "share of latent frames with a step whose centre does not grow (or shrink)",
        high=0.2,
        too_high="steps that were commanded do not happen",
    ),
    Measure(
        "return_psnr",
        "return, dB",
        "PSNR in dB of the last frame with the first, whose view it should show",
    ),
    Measure(
        "return_ssim", "return SSIM", "SSIM of these two frames: 1 if equal, near 0 if unrelated"
    ),
    Measure(
        "return_gain",
        "gain, dB",
        "return PSNR minus the PSNR of the frame that is farthest away, in dB",
        low=3,
        too_low="the camera does not leave the first view, or does not come back to it",
    ),
)
"""Measures computed for videos that were steered with keys."""


_KEYS_NOTE: Final = (
    "`rest` holds no key; `walk_and_back` walks ahead and back; `left_and_back` and "
    "`right_and_back` turn away and back; `loop` turns right, walks, walks back and turns back. An "
    "empty return means that the camera should not be at its start again, for example because a "
    "wall of the world stopped a walk."
)


@dataclass
class MeasuredFile:
    """A file and its measured values."""

    made: MadeFile
    """The measured file."""
    size: tuple[int, int]
    """Frame width and height in pixels."""
    frames: int
    """Number of frames, 1 for an image."""
    fps: float
    """Video frame rate in frames per second. 0: the file is an image."""
    measures: dict[str, float]
    """Measured values by measure name."""
    reference: dict[str, list[float]] = field(default_factory=dict)
    """`psnr` and `ssim` of each frame that has a reference frame."""

    def findings(self) -> list[str]:
        """Return one line of text for each measure that is outside its usual range."""
        return [
            f"{measure.name} {value:.2f}, usually {measure.usual()}: "
            f"{measure.too_low if value < measure.low else measure.too_high}"
            for measure in (*PICTURE, *STEERING)
            if (value := self.measures.get(measure.name)) is not None
            and not measure.low <= value <= measure.high
        ]


def read_frames(path: Path) -> tuple[np.ndarray, float]:
    """Read a video or an image.

    Returns:
        Frames, uint8 RGB [T, H, W, 3], and frames per second (0 for an image).

    Raises:
        ValueError: The file is missing or cannot be read.
    """
    try:
        if path.suffix == ".png":
            with Image.open(path) as image:
                return np.array(image.convert("RGB"))[None], 0.0
        return decode_mp4(path.read_bytes())
    except (OSError, ValueError, UnidentifiedImageError) as error:
        raise ValueError(f"{path} cannot be measured: {error}") from error


def measure_run(folder: RunFolder, references: Path | None = None) -> list[MeasuredFile]:
    """Measure all of a run's files, and write the report into the run's folder.

    Args:
        folder: The run's folder.
        references: Folder that contains reference frames (`reference_frames`), or None if the files
            are not compared with references.

    Raises:
        ValueError: There are no files, a file cannot be measured, or references are given but none
            belongs to a file.
    """
    if not folder.run.files:
        raise ValueError(f"{folder.path} has no videos or images: nothing was generated")
    measured: list[MeasuredFile] = []
    strips: list[np.ndarray] = []
    for made in folder.run.files:
        path = folder.path / made.file
        frames_THWC, fps = read_frames(path)
        count, height, width, _ = frames_THWC.shape
        measures = appearance(frames_THWC)
        if made.controls is not None:
            try:
                measures |= steering(frames_THWC, made.controls)
            except ValueError as error:
                raise ValueError(f"{path} cannot be measured: {error}") from error
        result = MeasuredFile(made, (width, height), count, fps, measures)
        if references is not None:
            result.reference = _compared(frames_THWC, reference_frames(references, path.stem))
        measured.append(result)
        strips.append(_strip(frames_THWC, measured[0].size))
    if references is not None and not any(result.reference for result in measured):
        raise ValueError(
            f"{references} has no reference for any video: name them like the videos, "
            f"{Path(measured[0].made.file).stem}.mp4 or .npy, or with a frame number, .0.png"
        )
    _write_report(folder, measured)
    sheet = contact_sheet(np.concatenate(strips), columns=_SHEET_COLUMNS)
    sheet.save(folder.path / "frames.png")
    return measured


def reference_frames(folder: Path, stem: str) -> dict[int, np.ndarray]:
    """Return a video's reference frames by frame index, uint8 RGB [H, W, 3].

    `STEM.mp4`, `STEM.png` and `STEM.npy` ([T, H, W, 3]) contain consecutive frames, starting with
    the first frame of the video. `STEM.N.png` and `STEM.N.npy` contain frame N, where -1 is the
    last frame.

    Raises:
        ValueError: A file cannot be read.
    """
    found: dict[int, np.ndarray] = {}
    for path in sorted(folder.iterdir()):
        name, _, number = path.stem.rpartition(".")
        index = number.removeprefix("-").isdecimal() and name == stem
        if not (index or path.stem == stem) or path.suffix not in (".mp4", ".png", ".npy"):
            continue
        frames_THWC = _array_frames(path) if path.suffix == ".npy" else read_frames(path)[0]
        start = int(number) if index else 0
        found |= {start + n: frame_HWC for n, frame_HWC in enumerate(frames_THWC)}
    return found


def uint8_frame(array: np.ndarray) -> np.ndarray:
    """Return a frame as uint8 [H, W, 3].

    Args:
        array: Frame of shape [H, W, 3] or [3, H, W], with or without axes of length 1. The values
            are uint8, or floats in [-1, 1].

    Raises:
        ValueError: The array is not a frame.
    """
    frame = array.squeeze()
    if frame.ndim != 3 or 3 not in (frame.shape[0], frame.shape[-1]):
        raise ValueError(f"an array of shape {array.shape} is no frame")
    frame_HWC = frame if frame.shape[-1] == 3 else np.moveaxis(frame, 0, -1)
    if frame_HWC.dtype == np.uint8:
        return frame_HWC
    if not np.abs(frame_HWC).max() <= 1.01:  # also rejects NaN
        raise ValueError("floats of a frame must be in [-1, 1]")
    return np.clip(np.round((frame_HWC.astype(float) + 1) * 127.5), 0, 255).astype(np.uint8)


def _array_frames(path: Path) -> list[np.ndarray]:
    try:
        array = np.load(path, allow_pickle=False)
        return [uint8_frame(frame) for frame in (array if array.ndim == 4 else array[None])]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as frames: {error}") from error


def _compared(
    frames_THWC: np.ndarray, references: Mapping[int, np.ndarray]
) -> dict[str, list[float]]:
    if not references:
        return {}
    indices = [index for index in sorted(references) if -len(frames_THWC) <= index]
    indices = [index for index in indices if index < len(frames_THWC)]
    others = [references[index] for index in indices]
    if not others or any(other.shape != frames_THWC.shape[1:] for other in others):
        raise ValueError(
            f"reference frames must have the size of the video, {frames_THWC.shape[2]}x"
            f"{frames_THWC.shape[1]}, and indices below {len(frames_THWC)}"
        )
    return likeness_of_frames(frames_THWC[indices], np.stack(others))


def _strip(frames_THWC: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return one file's row in the overview image: the image itself, or evenly spaced frames of the
    video.

    Args:
        frames_THWC: Frames, uint8 RGB.
        size: The first file's width and height. All frames in the overview are resized to this
            aspect ratio.
    """
    count = _SHEET_COLUMNS if len(frames_THWC) > 1 else 1
    shown = np.linspace(0, len(frames_THWC) - 1, count).round().astype(int)
    small = _SHEET_WIDTH, round(_SHEET_WIDTH * size[1] / size[0])
    return np.stack([np.asarray(Image.fromarray(frames_THWC[n]).resize(small)) for n in shown])


def _write_report(folder: RunFolder, measured: list[MeasuredFile]) -> None:
    rows = [
        {
            **{name: value for name, value in asdict(result).items() if name != "made"},
            "file": result.made.file,
            "prompt": result.made.prompt,
            "program": result.made.program,
            "seed": result.made.seed,
            "findings": result.findings(),
        }
        for result in measured
    ]
    run = folder.run
    document = {"model": run.model, "package_version": run.package_version, "videos": rows}
    (folder.path / "report.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder.path / "report.md").write_text(_markdown(folder, measured))


def _markdown(folder: RunFolder, measured: list[MeasuredFile]) -> str:
    run = folder.run
    made = f"`{run.model}`" if run.model else f"the files in `{folder.path.name}`"
    findings = [
        f"- `{result.made.file}`: {text}" for result in measured for text in result.findings()
    ]
    parts = [
        f"# Evaluation of {made}",
        "Look at `frames.png` first: each row shows six frames of a video, from the first to the "
        "last, in the order of the table.",
        _table(measured, PICTURE),
    ]
    if any(result.made.controls for result in measured):
        parts += ["## Keys", _KEYS_NOTE, _table(measured, STEERING)]
    if any(result.reference for result in measured):
        parts += ["## Reference frames", _reference_table(measured)]
    parts += [
        "## Worth a look",
        "\n".join(findings)
        or "Every measure lies in its usual range. The measures do not see what the videos show, "
        "so watch some of them.",
        "## What the numbers mean",
        "The usual ranges are rules of thumb. Random weights and abstract videos leave them.",
        _meanings(measured),
        "## Other benchmarks",
        "`videos` has the names of VBench: `vbench evaluate --videos_path videos --mode "
        "custom_input --dimension imaging_quality`. "
        + (
            "`wbench` has cases and videos of WBench: copy `wbench/videos` to "
            "`work_dirs/MODEL/videos` and `wbench/cases` to `data/cases` of a clone. "
            if (folder.path / "wbench").is_dir()
            else ""
        )
        + "Both download networks of their own.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(measured: list[MeasuredFile], columns: Sequence[Measure]) -> str:
    """Return a table with one row for each file that has a value in at least one column. Columns
    without values are omitted.
    """
    shown = [c for c in columns if any(c.name in result.measures for result in measured)]
    rows = [["video", "keys", *(column.title for column in shown)]]
    for result in measured:
        values = [result.measures.get(column.name) for column in shown]
        texts = ["" if value is None else f"{value:.2f}" for value in values]
        if any(texts):
            name = f"`{Path(result.made.file).name}`"
            rows.append([name, result.made.program or "none", *texts])
    return _rows(rows)


def _reference_table(measured: list[MeasuredFile]) -> str:
    rows = [["video", "frames", "PSNR mean", "lowest", "SSIM mean", "lowest"]]
    for result in measured:
        if psnr := result.reference.get("psnr"):
            ssim = result.reference["ssim"]
            numbers = (np.mean(psnr), min(psnr), np.mean(ssim), min(ssim))
            name = f"`{Path(result.made.file).name}`"
            rows.append([name, str(len(psnr)), *(f"{number:.3f}" for number in numbers)])
    return _rows(rows)


def _meanings(measured: list[MeasuredFile]) -> str:
    shown = [
        measure
        for measure in (*PICTURE, *STEERING)
        if any(measure.name in result.measures for result in measured)
    ]
    rows = [[f"`{m.name}`", m.title, m.meaning, m.usual()] for m in shown]
    return _rows([["name in report.json", "column", "meaning", "usual"], *rows])


def _rows(rows: list[list[str]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])
