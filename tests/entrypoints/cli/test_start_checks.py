# SPDX-License-Identifier: Apache-2.0
"""The requirements for starting a server are checked before anything is loaded, and each error is
one line with the remedy.
"""

import importlib.util
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.start_checks import check_start


def check(
    flags: dict[str, str] | None = None,
    omni: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    *,
    is_language_model: bool = False,
) -> None:
    check_start(flags or {}, omni or {}, environ or {}, is_language_model=is_language_model)


def test_a_complete_start_is_not_refused(tmp_path: Path) -> None:
    """A configuration that meets all requirements is accepted. Missing directories are not errors,
    because the server creates them itself.
    """
    missing = tmp_path / "a" / "b"
    check(
        {"uds": "omni.sock", "distributed-executor-backend": "mp", "load-format": "auto"},
        {"snapshot_dir": str(missing), "record_dir": str(tmp_path), "drain_snapshot_dir": None},
        {"VLLM_OMNI_MEDIA_DIR": str(missing)},
    )
    assert not missing.exists()


def test_a_long_temporary_directory_is_refused(
    null_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's socket files are in the temporary directory, and their paths may be at most 107 bytes
    long. The error names the environment variable that selects another directory for the socket
    files.
    """
    monkeypatch.setattr(tempfile, "tempdir", "/" + "t" * 70)
    with pytest.raises(
        CommandError, match=r"TMPDIR /t+ has 71 bytes.*VLLM_RPC_BASE_PATH=/tmp$"
    ) as refused:
        serve.plan([str(null_world), "--port", "0"], {}, [])
    assert "\n" not in str(refused.value)
    check(environ={"VLLM_RPC_BASE_PATH": "/tmp"})


def test_the_longest_allowed_directory_holds_a_socket_of_vllm() -> None:
    """The longest allowed directory path is 70 bytes long, because vLLM appends 37 bytes (a slash
    and a UUID) and the system limits the length of the whole path.
    """
    from vllm.utils.network_utils import get_open_zmq_ipc_path

    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        base = parent + "/" + "s" * (70 - len(parent) - 1)
        os.mkdir(base)
        check(environ={"VLLM_RPC_BASE_PATH": base})
        name = os.path.basename(get_open_zmq_ipc_path())
        with socket.socket(socket.AF_UNIX) as fits, socket.socket(socket.AF_UNIX) as too_long:
            fits.bind(f"{base}/{name}")
            with pytest.raises(OSError, match="too long"):
                too_long.bind(f"{base}/{name}s")


@pytest.mark.parametrize("directory", ["/nowhere/at/all", "/etc/hostname"])
def test_a_missing_socket_directory_is_refused(directory: str) -> None:
    """A missing socket directory is rejected. It can only result from vLLM's environment variable,
    because Python ignores a TMPDIR that does not exist.
    """
    with pytest.raises(CommandError, match=rf"VLLM_RPC_BASE_PATH {directory} is not a directory"):
        check(environ={"VLLM_RPC_BASE_PATH": directory})


def test_an_impossible_socket_file_is_refused(tmp_path: Path) -> None:
    """The path given to `--uds` must be short, unused, and in an existing directory."""
    with pytest.raises(CommandError, match="at most 107: pass a shorter one"):
        check({"uds": "/tmp/" + "u" * 103})
    with pytest.raises(CommandError, match=r"nowhere is not a directory; create it"):
        check({"uds": "/tmp/nowhere/omni.sock"})
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match=r"exists \(a file that is no socket\)"):
        check({"uds": os.path.relpath(tmp_path / "file")})
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as left:
        left.bind(f"{folder}/omni.sock")
        with pytest.raises(CommandError, match=r"exists \(a socket file, .*\): remove it"):
            check({"uds": f"{folder}/omni.sock"})


@pytest.mark.parametrize("name", ["snapshot_dir", "record_dir", "drain_snapshot_dir"])
def test_a_directory_below_a_file_is_refused(name: str, tmp_path: Path) -> None:
    """A directory path that passes through a regular file is rejected, because the directory cannot
    be created.
    """
    (tmp_path / "file").touch()
    with pytest.raises(
        CommandError, match=rf"^omni.{name} .*file is not a directory; name another$"
    ):
        check(omni={name: str(tmp_path / "file" / "below")})
    with pytest.raises(CommandError, match=r"^VLLM_OMNI_MEDIA_DIR .*file is not a directory"):
        check(environ={"VLLM_OMNI_MEDIA_DIR": str(tmp_path / "file")})


@pytest.mark.parametrize("flag", ["ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "log-config-file"])
def test_a_missing_file_is_named(flag: str) -> None:
    """The error for a missing file names the flag that refers to the file."""
    with pytest.raises(
        CommandError, match=rf"^--{flag} /nowhere.pem does not exist or cannot be read$"
    ):
        check({flag: "/nowhere.pem"})


@pytest.mark.parametrize(
    ("flag", "value", "remedy"),
    [
        ("distributed-executor-backend", "ray", r"pip install '\.\[ray\]' in the checkout"),
        ("data-parallel-backend", "ray", r"pip install '\.\[ray\]' in the checkout"),
        ("dpb", "ray", r"^-dpb ray .*pip install '\.\[ray\]' in the checkout"),
        ("load-format", "tensorizer", "pip install tensorizer"),
        ("quantization", "bitsandbytes", "pip install bitsandbytes"),
    ],
)
def test_a_missing_optional_package_is_named(
    flag: str, value: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error for a missing optional package contains the command that installs it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=remedy):
        check({flag: value}, is_language_model=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    check({flag: value}, is_language_model=True)


def test_load_formats_that_the_diffusion_worker_refuses_need_no_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a load format that the diffusion worker rejects, the check does not require the format's
    package, because installing that package would not help.
    """
    requested: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", requested.append)
    check({"load-format": "tensorizer"})
    assert requested == []
