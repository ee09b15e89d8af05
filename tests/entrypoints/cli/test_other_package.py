# SPDX-License-Identifier: Apache-2.0
"""Another project's `vllm_omni` is recognised by metadata, place and missing mark; this
project's own never is.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_omni.entrypoints.cli import doctor, other_package

OURS = "[vllm.endpoint_plugins]\nvllm_omni = vllm_omni.entrypoints.plugin:create_plugin\n"
THEIRS = "[console_scripts]\nvllm-omni = vllm_omni.entrypoints.cli.main:main\n"


def install(
    layer: Path,
    name: str,
    version: str,
    entry_points: str,
    *,
    folder: bool = True,
    mark: bool = False,
) -> None:
    """A distribution as pip leaves it: metadata, and the package's folder."""
    info = layer / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    if folder:
        (layer / "vllm_omni" / "entrypoints" / "cli").mkdir(parents=True)
        (layer / "vllm_omni" / "__init__.py").write_text("")
    if mark:
        (layer / "vllm_omni" / "entrypoints" / "cli" / "other_package.py").write_text("")


@pytest.mark.parametrize("name", ["vllm-omni", "vllm_omni", "vLLM.Omni"])
def test_the_public_package_is_other(tmp_path: Path, name: str) -> None:
    """Name, version, place and what to do, of its metadata and of its folder."""
    install(tmp_path, name, "0.30.0", THEIRS)
    metadata, folder = other_package.find_other_package([str(tmp_path)])
    assert metadata.startswith(
        f"{name} 0.30.0 in {tmp_path} is another project's: pip uninstall {name}"
    )
    assert (
        folder.startswith(f"{tmp_path / 'vllm_omni'} is another project's")
        and "delete the folder" in folder
    )


def test_this_project_is_not(tmp_path: Path) -> None:
    """Neither this environment nor an installed copy, however often it is on the path."""
    install(tmp_path, "vllm-omni", "0.1.0", OURS, mark=True)
    install(tmp_path, "vllm-omni-tools", "1.0", THEIRS, folder=False)
    assert other_package.find_other_package([*sys.path, str(tmp_path), str(tmp_path)]) == []


def test_each_sign_is_enough(tmp_path: Path) -> None:
    """A folder left behind by an uninstall; metadata that overwrote ours while the checkout
    stayed.
    """
    install(tmp_path / "a", "other", "1.0", "")
    install(tmp_path / "b", "vllm-omni", "0.30.0", THEIRS, folder=False)
    assert len(other_package.find_other_package([str(tmp_path / "a")])) == 1
    assert len(other_package.find_other_package([str(tmp_path / "b")])) == 1


def test_doctor_fails_and_says_what_to_remove(tmp_path: Path) -> None:
    install(tmp_path, "vllm-omni", "0.30.0", THEIRS)
    finding = doctor.check_name([str(tmp_path)])
    assert finding.status == "fail" and "pip uninstall vllm-omni" in finding.detail
    assert doctor.check_name(sys.path).status == "ok"


@pytest.mark.parametrize(("entry_points", "mark", "status"), [(THEIRS, False, 1), (OURS, True, 0)])
def test_the_file_runs_alone(tmp_path: Path, entry_points: str, mark: bool, status: int) -> None:
    """As set-up runs it: without this package on the path."""
    install(tmp_path, "vllm-omni", "0.30.0", entry_points, mark=mark)
    command = [sys.executable, "-S", other_package.__file__]
    result = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == status, result.stderr
    assert ("another project's" in result.stdout) == bool(status)
