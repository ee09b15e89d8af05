# SPDX-License-Identifier: Apache-2.0
"""A manifest detects damage in a checkpoint directory.

The one-line error names the command that rewrites the directory.
"""

import json
from pathlib import Path

import pytest

from vllm_omni.worlds.manifest import check_files, read_manifest, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "a.bin").write_bytes(bytes(range(200)))
    (tmp_path / "b.txt").write_text("b")
    write_manifest(tmp_path, "make it DIR")
    return tmp_path


def test_a_whole_directory_passes(folder: Path) -> None:
    """A complete directory passes the check. The manifest lists every file except itself, and
    additional files are ignored.
    """
    manifest = read_manifest(folder)
    assert manifest is not None
    assert sorted(manifest.files) == ["b.txt", "weights/a.bin"]
    (folder / "more").write_text("x")
    check_files(folder)


def test_a_directory_without_manifest_is_not_checked(tmp_path: Path) -> None:
    """A directory without a manifest is not checked, because other projects' checkpoints have
    none.
    """
    assert read_manifest(tmp_path) is None
    check_files(tmp_path)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda path: path.unlink(), "is missing or cannot be read"),
        (lambda path: path.write_bytes(b"short"), r"is damaged \(5 bytes, 200 expected\)"),
        (
            lambda path: path.write_bytes(bytes(200)),
            r"is damaged \(its SHA-256 is not the manifest's\)",
        ),
        (lambda path: (path.unlink(), path.mkdir()), "is damaged|cannot be read"),
    ],
)
def test_a_damaged_file_is_one_line(folder: Path, damage: object, what: str) -> None:
    """The error for a damaged file is one line that names the file, the damage and the command that
    rewrites the directory.
    """
    assert callable(damage)
    damage(folder / "weights" / "a.bin")
    with pytest.raises(ValueError, match=what) as caught:
        check_files(folder)
    text = str(caught.value)
    assert "a.bin" in text
    assert text.endswith("write the directory again with `make it DIR`")
    assert "\n" not in text
    with pytest.raises(ValueError, match=r"; ask somebody$"):
        check_files(folder, "ask somebody")


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"write_again": "x"}',
        json.dumps({"write_again": "x", "files": {"../secret": {"bytes": 1, "sha256": "0" * 64}}}),
        json.dumps(
            {"write_again": "x", "files": {"/etc/passwd": {"bytes": 1, "sha256": "0" * 64}}}
        ),
        json.dumps({"write_again": "x", "files": {"a": {"bytes": -1, "sha256": "0" * 64}}}),
        json.dumps({"write_again": "x", "files": {"a": {"bytes": 1, "sha256": "0"}}}),
    ],
)
def test_a_broken_manifest_is_refused(tmp_path: Path, content: str) -> None:
    """A broken manifest is refused, and so is a manifest that names files outside its directory."""
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json cannot be read: "):
        check_files(tmp_path)
