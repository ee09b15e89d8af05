# SPDX-License-Identifier: Apache-2.0
"""Checks that run before startup, for socket files, directories and optional packages.

Without these checks, vLLM would fail with a traceback after half a minute. Each check imports only
light modules. If it fails, it raises `CommandError` with one line that names the remedy.
"""

import importlib.util
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.entrypoints.cli.output_paths import check_directory

SOCKET_DIRECTORY: Final = "VLLM_RPC_BASE_PATH"
"""Environment variable that sets the directory of vLLM's socket files. Default: the system's
temporary directory.
"""

_SOCKET_PATH_BYTES: Final = 107
"""Maximum length in bytes of a socket file path on Linux (`sun_path` without NUL)."""
_SOCKET_NAME_BYTES: Final = 37
"""Number of bytes that vLLM appends to the directory path to name a socket file: a slash and a
UUID.
"""
_OMNI_DIRECTORIES: Final = ("snapshot_dir", "record_dir", "drain_snapshot_dir")
_MEDIA_DIRECTORY: Final = "VLLM_OMNI_MEDIA_DIR"
_READ_FILES: Final = ("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "log-config-file")


@dataclass(frozen=True)
class _Optional:
    """An optional package required by one value of a flag."""

    flags: tuple[str, ...]
    """Names of the flag, including its aliases."""
    value: str
    """Value of the flag that requires the package."""
    module: str
    """The package's module, which must be importable."""
    install: str
    """Arguments for the `pip install` command that installs the package."""
    ar_only: bool = True
    """Whether the value is accepted only for language models. Default: True."""


_RAY: Final = "'.[ray]' in the checkout"
_OPTIONAL: Final = (
    _Optional(("distributed-executor-backend",), "ray", "ray", _RAY, ar_only=False),
    _Optional(("data-parallel-backend", "dpb"), "ray", "ray", _RAY, ar_only=False),
    _Optional(("load-format",), "tensorizer", "tensorizer", "tensorizer"),
    _Optional(("load-format",), "runai_streamer", "runai_model_streamer", "runai-model-streamer"),
    _Optional(
        ("load-format",), "runai_streamer_sharded", "runai_model_streamer", "runai-model-streamer"
    ),
    _Optional(("load-format",), "instanttensor", "instanttensor", "instanttensor"),
    _Optional(("load-format",), "modelexpress", "modelexpress", "modelexpress"),
    _Optional(("load-format", "quantization", "q"), "bitsandbytes", "bitsandbytes", "bitsandbytes"),
    _Optional(("quantization", "q"), "torchao", "torchao", "torchao"),
)


def check_start(
    flags: Mapping[str, str],
    omni: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    is_language_model: bool,
) -> None:
    """Run all checks in this module.

    Args:
        flags: `vllm serve` flags without leading dashes, with their values.
        omni: The `omni` object of `--additional-config`.
        environ: Environment variables.
        is_language_model: Whether the server uses vLLM's own model runner, which supports all of
            vLLM's load formats.

    Raises:
        CommandError: A check failed.
    """
    if (trouble := socket_directory_trouble(environ)) is not None:
        raise CommandError(trouble)
    if "uds" in flags:
        _check_socket_file(flags["uds"])
    for name in _OMNI_DIRECTORIES:
        if isinstance(omni.get(name), str):
            check_directory(f"omni.{name}", omni[name])
    if environ.get(_MEDIA_DIRECTORY):
        check_directory(_MEDIA_DIRECTORY, environ[_MEDIA_DIRECTORY])
    for name in _READ_FILES:
        if name in flags and not os.access(flags[name], os.R_OK):
            raise CommandError(f"--{name} {flags[name]} does not exist or cannot be read")
    for row in _OPTIONAL:
        if is_language_model or not row.ar_only:
            _check_package(row, flags)


def socket_directory_trouble(environ: Mapping[str, str]) -> str | None:
    """Return the reason why vLLM cannot create its socket files, together with the remedy, or None
    if it can create them.
    """
    variable = SOCKET_DIRECTORY if environ.get(SOCKET_DIRECTORY) else "TMPDIR"
    try:
        directory = environ.get(SOCKET_DIRECTORY) or tempfile.gettempdir()
    except FileNotFoundError:
        return "there is no directory for temporary files: set TMPDIR to a writable one"
    most = _SOCKET_PATH_BYTES - _SOCKET_NAME_BYTES
    if (length := len(os.fsencode(directory))) > most:
        return (
            f"{variable} {directory} has {length} bytes, and vLLM's socket files in it may have at "
            f"most {_SOCKET_PATH_BYTES} with their names: set {SOCKET_DIRECTORY} to a directory of "
            f"at most {most} bytes, for example {SOCKET_DIRECTORY}=/tmp"
        )
    if not os.path.isdir(directory):
        return (
            f"{variable} {directory} is not a directory, but vLLM creates socket files there: set "
            "it to another"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        return (
            f"{variable} {directory} is not writable, but vLLM creates socket files there: set it "
            "to another"
        )
    return None


def _check_socket_file(path: str) -> None:
    """Check that vLLM can create the socket file for `--uds`."""
    if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
        raise CommandError(
            f"--uds {path} has {len(os.fsencode(path))} bytes; the path of a socket file has at "
            f"most {_SOCKET_PATH_BYTES}: pass a shorter one"
        )
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise CommandError(
            f"--uds {path}: {folder} is not a directory; create it or pass another path"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CommandError(f"--uds {path}: {folder} cannot be written to; pass another path")
    if os.path.lexists(path):
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
        what = (
            "a socket file, of a server that runs or has ended"
            if is_socket
            else "a file that is no socket"
        )
        raise CommandError(f"--uds {path} exists ({what}): remove it or pass another path")


def _check_package(row: _Optional, flags: Mapping[str, str]) -> None:
    for flag in row.flags:
        if flags.get(flag) == row.value and importlib.util.find_spec(row.module) is None:
            raise CommandError(
                f"{'-' if len(flag) == 1 or flag == 'dpb' else '--'}{flag} {row.value} needs the "
                f"package {row.module}, which is not installed: pip install {row.install}, or drop "
                "the flag"
            )
