# SPDX-License-Identifier: Apache-2.0
"""If another project's `vllm_omni` is installed, it is detected, and every entry point refuses to
run.

The other project is recognised by its metadata, or by the absence of this project's marker.
"""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from helpers.waits import seconds

import vllm_worlds
from vllm_omni.entrypoints.cli import doctor

REPO = Path(__file__).parents[1]
OURS = "[vllm.endpoint_plugins]\nvllm_omni = vllm_omni.entrypoints.plugin:create_plugin\n"
THEIRS = "[console_scripts]\nvllm-omni = vllm_omni.entrypoints.cli.main:main\n"


def install(
    site_packages: Path,
    name: str,
    version: str,
    entry_points: str,
    *,
    folder: bool = True,
    mark: bool = False,
) -> None:
    """Write a distribution's metadata and package folder as pip would install them."""
    info = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)
    (info / "RECORD").write_text("")
    if folder:
        cli = site_packages / "vllm_omni" / "entrypoints" / "cli"
        cli.mkdir(parents=True)
        (site_packages / "vllm_omni" / "__init__.py").write_text(
            "raise AssertionError('the other project was imported')"
        )
        if mark:
            (cli / "doctor.py").write_text("")


@pytest.mark.parametrize("name", ["vllm-omni", "vllm_omni", "vLLM.Omni"])
def test_the_public_package_is_reported(tmp_path: Path, name: str) -> None:
    """The report about the other package contains its version, the path of its metadata, and its
    folder.
    """
    install(tmp_path, name, "0.30.0", THEIRS)
    assert vllm_worlds.find_other_package([str(tmp_path)]) == [
        f"{name} 0.30.0 in {tmp_path} is another project's.",
        f"The folder {tmp_path / 'vllm_omni'} is another project's, or left from an old "
        "installation.",
    ]


def test_this_project_is_not_reported(tmp_path: Path) -> None:
    """This project itself is not reported, either in this environment or as an installed copy that
    is on the path several times.
    """
    install(tmp_path, "vllm-worlds", "0.1.0", OURS, mark=True)
    install(tmp_path, "vllm-omni-tools", "1.0", THEIRS, folder=False)
    assert vllm_worlds.find_other_package([*sys.path, str(tmp_path), str(tmp_path)]) == []


def test_metadata_or_folder_is_enough(tmp_path: Path) -> None:
    """Either the metadata or the folder suffices to detect the other package.

    For example, an uninstall may have left the folder behind, or the other package's metadata may
    have replaced this project's metadata.
    """
    install(tmp_path / "a", "other", "1.0", "")
    install(tmp_path / "b", "vllm-omni", "0.30.0", THEIRS, folder=False)
    assert len(vllm_worlds.find_other_package([str(tmp_path / "a")])) == 1
    assert len(vllm_worlds.find_other_package([str(tmp_path / "b")])) == 1


def test_doctor_names_the_package_to_remove(tmp_path: Path) -> None:
    install(tmp_path, "vllm-omni", "0.30.0", THEIRS)
    finding = doctor.check_name([str(tmp_path)])
    assert finding.status == "fail" and "pip uninstall vllm-omni vllm-worlds" in finding.advice
    assert doctor.check_name(sys.path).status == "ok"


def test_the_former_name_of_this_project_is_a_warning(tmp_path: Path) -> None:
    """Metadata under this project's former name causes only a warning, because old environments
    contain such metadata.

    A directory left behind by a build does not count as an installed package.
    """
    install(tmp_path / "a", "vllm-omni", "0.1.0", OURS, mark=True)
    finding = doctor.check_name([str(tmp_path / "a")])
    assert finding.status == "warn" and "vllm-omni 0.1.0, its former name" in finding.detail
    assert finding.advice.startswith("pip uninstall vllm-omni, then install vllm-worlds again")
    build = tmp_path / "b" / "vllm_omni.egg-info"
    build.mkdir(parents=True)
    (build / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.1.0\n")
    (build / "entry_points.txt").write_text(OURS)
    assert doctor.check_name([str(tmp_path / "b")]).status == "ok"


@pytest.mark.parametrize("call", ["main", "register"])
@pytest.mark.parametrize("mark", [False, True], ids=["theirs", "mixed"])
def test_entry_points_refuse_without_importing_the_other_package(
    tmp_path: Path, call: str, mark: bool
) -> None:
    """A command or a vLLM process stops with an error that states the remedy, even if the files of
    both projects are mixed.

    The other package is not imported. The fake package in `tmp_path` would raise an exception on
    import.
    """
    install(tmp_path, "vllm-omni", "0.30.0", THEIRS, mark=mark)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport vllm_worlds\n"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}vllm_worlds.{call}()"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=seconds(60),
        check=False,
    )
    assert result.returncode == (2 if call == "main" else 1)
    assert "vllm-omni 0.30.0 in" in result.stderr
    assert "pip uninstall vllm-omni vllm-worlds" in result.stderr
    assert "was imported" not in result.stderr


@pytest.mark.parametrize(("entry_points", "mark", "status"), [(THEIRS, False, 1), (OURS, True, 0)])
def test_the_file_runs_alone(tmp_path: Path, entry_points: str, mark: bool, status: int) -> None:
    """The file runs as a standalone script, because `scripts/setup_env.py` runs it without this
    package on the path.
    """
    install(tmp_path, "vllm-omni", "0.30.0", entry_points, mark=mark)
    command = [sys.executable, "-S", vllm_worlds.__file__]
    result = subprocess.run(
        command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == status, result.stderr
    assert ("another project's" in result.stderr) == bool(status)


def test_the_distribution_has_the_name_that_its_module_says() -> None:
    """pyproject.toml, the installed distribution and its commands use the distribution name that
    the module states.
    """
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["name"] == vllm_worlds.DISTRIBUTION
    installed = importlib.metadata.distribution(vllm_worlds.DISTRIBUTION)
    commands = {e.name: e.value for e in installed.entry_points if e.group == "console_scripts"}
    assert commands == dict.fromkeys(("vllm-omni", "vllm-worlds"), "vllm_worlds:main")
    [general] = [e for e in installed.entry_points if e.group == "vllm.general_plugins"]
    assert (general.name, general.value) == ("vllm_omni", "vllm_worlds:register")
