# SPDX-License-Identifier: Apache-2.0
"""`scripts/try_vllm.py`: what is taken of a wheel, what is installed, what is run; nothing is
downloaded here.
"""

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script

SCRIPT = Path(__file__).parent.parent / "scripts" / "try_vllm.py"
LINUX = {
    "platform_machine": "x86_64",
    "platform_system": "Linux",
    "python_version": "3.11",
    "sys_platform": "linux",
}


@pytest.fixture(scope="module")
def try_vllm() -> ModuleType:
    return load_script(SCRIPT)


def test_arguments(try_vllm: ModuleType) -> None:
    """What follows the version is pytest's, untouched; without any, the suite of every commit."""
    split = try_vllm.split_arguments
    assert split(["0.33.0"]) == ("0.33.0", [], ["-m", "not nightly"])
    assert split(["0.33.0", "-q", "tests/worker", "-k", "a or b"])[2] == [
        "-q",
        "tests/worker",
        "-k",
        "a or b",
    ]
    assert split(["0.34.0rc1", "--exec", "python", "-V"]) == ("0.34.0rc1", ["python", "-V"], [])
    with pytest.raises(try_vllm.TryError, match="not a version"):
        split(["tests/worker"])
    with pytest.raises(try_vllm.TryError, match="needs a command"):
        split(["0.33.0", "--exec"])


def test_a_mistake_is_one_line(try_vllm: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, exit status 2."""
    assert try_vllm.main(["latest"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("try_vllm: 'latest' is not a version") and err.count("\n") == 1


def test_without_a_cpu_environment_it_says_which_is_needed(
    try_vllm: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is downloaded."""
    monkeypatch.setattr(try_vllm.sys, "prefix", sys.base_prefix)
    assert try_vllm.main(["0.33.0"]) == 2
    assert "run it with the project's environment" in capsys.readouterr().err


def test_only_python_files_of_the_package_are_taken(try_vllm: ModuleType) -> None:
    """Libraries would be CUDA's, metadata is written anew, folders are no files."""
    names = [
        "vllm/__init__.py",
        "vllm/v1/",
        "vllm/model_executor/layers/configs/a.json",
        "vllm/_C_stable_libtorch.abi3.so",
        "vllm/lib.so.13",
        "vllm-0.33.0.dist-info/METADATA",
    ]
    assert try_vllm.python_files(names) == [
        "vllm/__init__.py",
        "vllm/model_executor/layers/configs/a.json",
    ]


def test_metadata_says_cpu(try_vllm: ModuleType) -> None:
    """vLLM takes "cpu" in its distribution's version as the sign of a CPU build; requirements
    stay.
    """
    metadata = (
        "Name: vllm\nVersion: 0.33.0\nRequires-Dist: orjson>=3.11.6\n\nVersion: of a description\n"
    )
    assert try_vllm.cpu_metadata(metadata, "0.33.0") == metadata.replace(
        "Version: 0.33.0", "Version: 0.33.0+cpu"
    )


def test_what_is_installed(try_vllm: ModuleType) -> None:
    """Missing packages, and those present in a version that is refused; nothing of CUDA, no
    extras, no markers.
    """
    required = [
        "orjson>=3.11.6",
        "certifi>=2026.10.19",
        "Pillow>=13",
        "torch==2.14.0",
        "nvidia-cutlass-dsl[cu13]==4.8.0",
        "flashinfer-python==0.7.2",
        "protobuf==7.36.1; platform_machine == 's390x'",
        "six>=1.16; python_version > '3.10'",
        "tensorizer==2.10.1; extra == 'tensorizer'",
    ]
    installed = {"certifi": "2026.10.18", "pillow": "13.0.1", "torch": "2.13.0+cpu"}
    assert try_vllm.to_install(required, installed, LINUX) == (
        ["orjson>=3.11.6", "six>=1.16"],
        ["certifi>=2026.10.19"],
    )
    with pytest.raises(try_vllm.TryError, match="cannot be read"):
        try_vllm.to_install(["???"], {}, LINUX)


def test_commands_run_on_the_other_interpreter(try_vllm: ModuleType, tmp_path: Path) -> None:
    """`vllm` and `pytest` must import the overlay; programs of other interpreters and binaries
    stay out.
    """
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    mine = f"#!{tmp_path}/link/python3\nimport sys\n".encode()
    own = try_vllm.own_script(mine, tmp_path / "real", Path("/new/bin/python"))
    assert own == b"#!/new/bin/python\nimport sys\n"
    assert (
        try_vllm.own_script(b"#!/usr/bin/python3\nx", tmp_path / "real", Path("/new/bin/python"))
        is None
    )
    assert try_vllm.own_script(b"\x7fELF\xff", tmp_path / "real", Path("/new/bin/python")) is None


def test_an_overlay_that_was_moved_is_built_again(try_vllm: ModuleType, tmp_path: Path) -> None:
    """Its programs name the interpreter of the old place: "No such file or directory" when one
    is started.
    """
    first, second = tmp_path / "first" / "9.9.9", tmp_path / "second" / "9.9.9"
    assert try_vllm.environment_key(first) == try_vllm.environment_key(first)
    assert try_vllm.environment_key(first) != try_vllm.environment_key(second)


def test_an_overlay_in_use_is_not_built_anew(
    try_vllm: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A package that was installed meanwhile would take the files away under the tests of a run
    that has not ended.
    """
    packages, built = ["first"], []

    def build(version: str, venv: Path, key: str) -> None:
        built.append(key)
        venv.mkdir(exist_ok=True)
        (venv / try_vllm.STAMP).write_text(key)

    monkeypatch.setattr(try_vllm, "CACHE", tmp_path)
    monkeypatch.setattr(try_vllm, "check_environment", lambda: None)
    monkeypatch.setattr(try_vllm, "environment_key", lambda venv: packages[-1])
    monkeypatch.setattr(try_vllm, "build", build)
    with try_vllm.prepared("9.9.9"):
        assert try_vllm.main(["9.9.9", "--exec", "true"]) == 0  # a second run beside the first
        packages.append("second")
        assert try_vllm.main(["9.9.9", "--exec", "true"]) == 2
        assert "another run uses it" in capsys.readouterr().err
    assert try_vllm.main(["9.9.9", "--exec", "true"]) == 0
    assert built == ["first", "second"]


def test_the_overlay_wins_over_the_environment(
    try_vllm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel laid over is what its interpreter imports, with the CPU build's libraries beside
    it and pytest there.
    """
    wheel = tmp_path / "vllm-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "__version__ = '9.9.9'\n")
        archive.writestr("vllm/_C_stable_libtorch.abi3.so", "CUDA")
        archive.writestr(
            "vllm-9.9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9.9\n"
        )
        archive.writestr(
            "vllm-9.9.9.dist-info/entry_points.txt", "[console_scripts]\nvllm = vllm:main\n"
        )
    venv = tmp_path / "9.9.9"
    try_vllm.make_environment(venv)
    try_vllm.lay_over(wheel, "9.9.9", venv)
    code = (
        "import importlib.metadata as m, pathlib, pytest, vllm; folder = "
        "pathlib.Path(vllm.__file__).parent\n"
        "print(vllm.__version__, m.version('vllm'), *sorted(path.name for path in "
        "folder.rglob('*.so')))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [venv / "bin" / "python", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    version, metadata, *libraries = result.stdout.split()
    assert (version, metadata) == ("9.9.9", "9.9.9+cpu")
    assert "_C.abi3.so" in libraries and "_C_stable_libtorch.abi3.so" not in libraries
    assert (venv / "bin" / "vllm").read_text().startswith(f"#!{venv}/bin/python\n")
