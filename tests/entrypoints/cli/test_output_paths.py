# SPDX-License-Identifier: Apache-2.0
"""A path that cannot be written is refused in one line, before an engine or a server starts."""

import os
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.entrypoints.cli import demo
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.main import main
from vllm_omni.entrypoints.cli.output_paths import (
    check_directory,
    check_file,
    create_directory,
    new_directory,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory that contains the file `file`, the empty directory `read_only`, and the file
    `read_only_file`.
    """
    (tmp_path / "file").write_text("words")
    (tmp_path / "read_only_file").write_text("words")
    (tmp_path / "read_only").mkdir()
    return tmp_path


@pytest.fixture(autouse=True)
def _read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report paths whose names start with `read_only` as not writable. File modes would not do,
    because they do not restrict root.
    """
    access = os.access

    def limited(path: Any, mode: int) -> bool:
        forbidden = mode & os.W_OK and Path(path).name.startswith("read_only")
        return not forbidden and access(path, mode)

    monkeypatch.setattr(os, "access", limited)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("missing/walk.mp4", "/missing is not a directory; create it or name another file"),
        ("file/walk.mp4", "/file is not a directory; create it or name another file"),
        ("read_only", "read_only is a directory; name a file"),
        ("read_only/walk.mp4", "it cannot be written to; name another file"),
        ("read_only_file", "it cannot be written to; name another file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(path: str, complaint: str, folder: Path) -> None:
    with pytest.raises(CommandError) as caught:
        check_file("--out", folder / path)
    assert str(caught.value).startswith(f"--out {folder / path}")
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("file", "/file is not a directory; name another"),
        ("file/below", "/file is not a directory; name another"),
        ("read_only", "/read_only cannot be written to; name another"),
        ("read_only/a/b", "/read_only cannot be written to; name another"),
    ],
)
@pytest.mark.parametrize("check", [check_directory, create_directory])
def test_a_directory_that_cannot_be_written_is_refused(
    check: Any, path: str, complaint: str, folder: Path
) -> None:
    with pytest.raises(CommandError) as caught:
        check("--out", folder / path)
    assert str(caught.value).startswith(f"--out {folder / path}: ")
    assert complaint in str(caught.value)


def test_a_path_that_can_be_written_is_accepted_unchanged(folder: Path) -> None:
    """A check neither creates a file nor changes an existing one."""
    check_file("--out", folder / "new.mp4")
    check_file("--out", folder / "file")
    check_directory("--out", folder / "a" / "b")
    assert sorted(path.name for path in folder.iterdir()) == ["file", "read_only", "read_only_file"]
    assert (folder / "file").read_text() == "words"
    create_directory("--out", folder / "a" / "b")
    assert (folder / "a" / "b").is_dir()


def test_a_new_directory_must_be_writable(folder: Path) -> None:
    with pytest.raises(CommandError, match="Permission denied; name a directory you may write to"):
        new_directory(folder / "read_only")


@pytest.mark.parametrize(
    "argv",
    [
        ["demo", "--out", "{file}"],
        ["demo", "--out", "{file}/below"],
        ["demo", "--out", "{read_only}"],
        ["evaluate", "{read_only}"],
        ["evaluate", "{file}"],
        ["make-tiny", "null_world", "{read_only}"],
        ["make-world", "{read_only}"],
        ["make-world", "{file}/below"],
        ["download", "lingbot_world_v2_1_3b", "{read_only}", "--accept-license"],
    ],
)
def test_every_command_refuses_a_path_that_cannot_be_written(
    argv: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exit status is 2, as for other wrong arguments."""

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("the work was started")

    monkeypatch.setattr(demo, "server", never)
    monkeypatch.setattr(demo, "repair_installation", never)
    monkeypatch.setattr("vllm_omni.model_executor.checkpoint.hub.fetch", never)
    paths = {name: str(folder / name) for name in ("file", "read_only")}
    with pytest.raises(SystemExit) as ended:
        main([word.format(**paths) for word in argv])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-omni: error: ")
    assert error.count("\n") == 1


def test_the_demo_refuses_a_file_name_that_is_taken_by_a_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "demo.mp4").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["demo", "--out", str(tmp_path)])
    assert ended.value.code == 2
    assert "demo.mp4 is a directory; name a file" in capsys.readouterr().err


def test_a_benchmark_refuses_its_output_folder_before_it_runs(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "encoders", "--out", str(folder / "file")])
    assert ended.value.code == 2
    error = capfd.readouterr().err
    assert f"error: argument --out: the folder {folder / 'file'}: " in error
    assert "Traceback" not in error
