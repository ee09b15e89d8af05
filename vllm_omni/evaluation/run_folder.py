# SPDX-License-Identifier: Apache-2.0
"""`RunFolder`: the files of an evaluation, in the layout that VBench and WBench expect.

        run.json                    what was generated; sufficient to compute the measures again
        videos/PROMPT-INDEX.mp4     VBench's names; images are .png
        vbench_info.json            VBench's list of prompts with their dimensions and videos
        vbench_prompts.json         prompt of each file, for VBench's `--prompt_file`
        wbench/cases/case_ID.json   WBench's cases: the turns of each key program
        wbench/videos/case_ID_combined.mp4

The layouts are taken from these public repositories: VBench in github.com/Vchitect/VBench, commit
6b1f1347914b070235bd0d73b4944c65dc1cdf65 (vbench/__init__.py, prompts/README.md); WBench in
github.com/meituan-longcat/WBench, commit 0fd1f7427865d0f895e0a26ab278515b2116ab66 (main.py,
src/evaluate.py) and 0e4884f12eb8c29a5e329ea79f2f8a5953065c98 (src/models/navigation.py).
"""

import contextlib
import json
import re
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import msgspec

from vllm_omni.evaluation.steering import PROGRAMS, Controls
from vllm_worlds import DISTRIBUTION

RUN_FILE: Final = "run.json"
VIDEOS: Final = "videos"
SUFFIXES: Final = (".mp4", ".png")
_DIMENSIONS: Final = (
    "subject_consistency",
    "background_consistency",
    "motion_smoothness",
    "dynamic_degree",
    "aesthetic_quality",
    "imaging_quality",
)
"""VBench evaluation dimensions that can be used with any prompt."""
_WBENCH_ACTIONS: Final = {"": "stop", "w": "W", "s": "S", "a": "A", "d": "D", "j": "left"} | {
    "l": "right",
    "i": "up",
    "k": "down",
}
_LONGEST_NAME: Final = 180


class MadeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of the run's videos or images."""

    file: str
    """Path of the file relative to the run's folder."""
    prompt: str = ""
    """Text prompt that the file was generated from. Empty: the model takes no prompt."""
    program: str | None = None
    """Name of the key program, or None if the file was generated without keys or with the keys of a
    recording."""
    seed: int | None = None
    """Random seed for the noise, or None if the seed is unknown."""
    controls: Controls | None = None
    """Keys held during generation, or None if the model has no keys or the keys are unknown."""


class Run(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Contents of `run.json`."""

    model: str
    """Name of the model that generated the files."""
    package_version: str
    """Version of this package that generated the files. Empty: the version is unknown."""
    files: list[MadeFile] = msgspec.field(default_factory=list)
    """Generated files in creation order."""


class RunFolder:
    """The folder of an evaluation run.

    Args:
        path: Path of the folder, which must exist.
        run: Description of the run, as stored in `run.json`.
    """

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self.run = path, run

    @classmethod
    def create(cls, path: Path, model: str) -> "RunFolder":
        """Start a new run in an empty folder."""
        (path / VIDEOS).mkdir()
        return cls(path, Run(model=model, package_version=version(DISTRIBUTION)))

    @classmethod
    def read(cls, path: Path) -> "RunFolder":
        """Read a run's folder, or a folder that contains arbitrary videos and images.

        Raises:
            ValueError: The folder contains neither `run.json` nor videos or images, or `run.json`
                is invalid.
        """
        described = path / RUN_FILE
        if described.is_file():
            try:
                return cls(path, msgspec.json.decode(described.read_bytes(), type=Run))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{described} cannot be read: {error}") from error
        folder = path / VIDEOS if (path / VIDEOS).is_dir() else path
        names = sorted(file for file in folder.glob("*") if file.suffix in SUFFIXES)
        if not names:
            raise ValueError(
                f"{path} has neither {RUN_FILE} nor files that end in {' or '.join(SUFFIXES)}"
            )
        files = [MadeFile(file=str(name.relative_to(path)), prompt=name.stem) for name in names]
        return cls(path, Run(model="", package_version="", files=files))

    def next_path(self, prompt: str, suffix: str) -> Path:
        """Return the path for a prompt's next video or image.

        Files are named after the prompt, because VBench reads the prompt from the file name.
        Characters that are not allowed in file names are replaced, and long prompts are truncated.
        `vbench_prompts.json` contains the full prompts.
        """
        stem = re.sub(r"[/\\\x00-\x1f]", "_", prompt).strip() or "no prompt"
        stem = stem.encode()[:_LONGEST_NAME].decode(errors="ignore")
        index = 0
        while (path := self.path / VIDEOS / f"{stem}-{index}{suffix}").exists():
            index += 1
        return path

    def add(self, path: Path, **fields: Any) -> MadeFile:
        """Add a file to the run. The file must have been written to a path from `next_path`.
        `fields` are fields of `MadeFile`.
        """
        made = MadeFile(file=str(path.relative_to(self.path)), **fields)
        self.run.files.append(made)
        if made.program is not None:
            self._add_wbench_case(path, made.program)
        self._write(RUN_FILE, msgspec.to_builtins(self.run))
        self._write("vbench_info.json", self._vbench_info())
        self._write("vbench_prompts.json", {Path(m.file).name: m.prompt for m in self.run.files})
        return made

    def _vbench_info(self) -> list[dict[str, Any]]:
        videos: dict[str, list[str]] = {}
        for made in self.run.files:
            videos.setdefault(made.prompt, []).append(made.file)
        return [
            {"prompt_en": prompt, "dimension": list(_DIMENSIONS), "video_list": files}
            for prompt, files in videos.items()
        ]

    def _add_wbench_case(self, video: Path, program: str) -> None:
        cases, videos = self.path / "wbench" / "cases", self.path / "wbench" / "videos"
        for folder in (cases, videos):
            folder.mkdir(parents=True, exist_ok=True)
        case = f"{program}_{len(list(cases.iterdir()))}"
        turns = [{"type": "navigation", "action": _WBENCH_ACTIONS[k]} for k in PROGRAMS[program]]
        self._write(
            f"wbench/cases/case_{case}.json",
            {"id": case, "settings": {"perspective": "first_person"}, "interactions": turns},
        )
        combined = videos / f"case_{case}_combined.mp4"
        with contextlib.suppress(OSError):  # some file systems do not support links
            combined.hardlink_to(video)
            return
        shutil.copyfile(video, combined)

    def _write(self, name: str, content: Any) -> None:
        (self.path / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
