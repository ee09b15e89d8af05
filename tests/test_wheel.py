# SPDX-License-Identifier: Apache-2.0
"""A wheel installed into a fresh environment works without the checkout."""

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from helpers.waits import seconds

REPO = Path(__file__).parents[1]

pytestmark = [pytest.mark.nightly, pytest.mark.engine]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python interpreter of a new environment in which the wheel is installed.

    All other packages are links to the current environment's packages, so nothing is downloaded
    again. As after a normal installation, vLLM's CPU build has no metadata under the name `vllm`
    yet.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(REPO)])
    [wheel] = folder.glob("vllm_worlds-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
    python = folder / "venv" / "bin" / "python"
    run([*pip, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)])
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"vllm-|vllm_worlds|__editable__|pip(-|$)", path.name):
            with contextlib.suppress(FileExistsError):
                (packages / path.name).symlink_to(path)
    return python


def run(command: list[str], cwd: Path = REPO, limit_s: float = 600) -> str:
    # A checkout on PYTHONPATH would hide the wheel.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=seconds(limit_s),
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_package_is_read_from_the_wheel(python: Path, tmp_path: Path) -> None:
    code = "import vllm_omni, vllm_worlds; print(vllm_omni.__file__, vllm_worlds.__file__)"
    files = run([str(python), "-c", code], tmp_path).split()
    assert all(Path(file).is_relative_to(python.parents[1]) for file in files)


def test_both_commands_start(python: Path, tmp_path: Path) -> None:
    for name in ("vllm-omni", "vllm-worlds"):
        version = run([str(python.with_name(name)), "--version"], tmp_path)
        assert version.startswith("vllm-worlds 0.")


def test_the_demo_walks(python: Path, tmp_path: Path) -> None:
    """The demo in the wheel repairs the installation and writes its video, and its server runs the
    wheel's code.
    """
    [packages] = python.parents[1].glob("lib/python*/site-packages")
    assert not [*packages.glob("vllm-*.dist-info")]
    command = [str(python.with_name("vllm-omni")), "demo", "--once", "--chunks", "2", "--port", "0"]
    assert "running `vllm-omni doctor --fix`" in run(command, tmp_path)
    assert [*packages.glob("vllm-*+cpu.dist-info")]
    assert (tmp_path / "demo.mp4").stat().st_size > 0
    # The dependencies may be in an environment inside the checkout.
    assert f"{REPO}/vllm_omni" not in (tmp_path / "demo_server.log").read_text()
