# SPDX-License-Identifier: Apache-2.0
"""A wheel that is installed into a fresh environment works without the checkout."""

import os
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
    """Python of a new environment with the wheel. The dependencies are those of this environment,
    behind the new one's on the path, so that nothing is downloaded twice.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(REPO)])
    [wheel] = folder.glob("vllm_worlds-*.whl")
    run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
    python = folder / "venv" / "bin" / "python"
    run([*pip, "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)])
    [packages] = (folder / "venv").glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(command: list[str], cwd: Path = REPO, limit_s: float = 600) -> str:
    # a checkout on PYTHONPATH would hide the wheel
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
    """The demo of the wheel writes its video, and its server uses the wheel's code."""
    command = [str(python.with_name("vllm-omni")), "demo", "--once", "--chunks", "2", "--port", "0"]
    run(command, tmp_path)
    assert (tmp_path / "demo.mp4").stat().st_size > 0
    # the dependencies may be in an environment inside of the checkout
    assert f"{REPO}/vllm_omni" not in (tmp_path / "demo_server.log").read_text()
