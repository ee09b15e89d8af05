# SPDX-License-Identifier: Apache-2.0
"""Checks of the files and directories that a subcommand is going to write.

A subcommand runs these checks before it starts an engine or a server, because results that cannot
be written would be noticed only after minutes of work. Only light modules are imported.
"""

import os
from pathlib import Path

from vllm_omni.entrypoints.cli.errors import CommandError


def check_file(name: str, path: str | Path) -> None:
    """Check that a file can be written. Its directory must exist.

    Args:
        name: Argument that names the file, for the error message.
        path: Path of the file, which may exist.

    Raises:
        CommandError: The file cannot be written.
    """
    if os.path.isdir(path):
        raise CommandError(f"{name} {path} is a directory; name a file")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise CommandError(
            f"{name} {path}: {folder} is not a directory; create it or name another file"
        )
    exists = os.path.exists(path)
    if not os.access(path if exists else folder, os.W_OK if exists else os.W_OK | os.X_OK):
        raise CommandError(f"{name} {path}: it cannot be written to; name another file")


def check_directory(name: str, path: str | Path) -> None:
    """Check that a directory can be written to, or can be created if it does not exist.

    Args:
        name: Argument or option that names the directory, for the error message.
        path: Path of the directory.

    Raises:
        CommandError: The directory cannot be written to or cannot be created.
    """
    existing = os.path.abspath(path)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise CommandError(f"{name} {path}: {existing} is not a directory; name another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CommandError(f"{name} {path}: {existing} cannot be written to; name another")


def create_directory(name: str, path: Path) -> None:
    """Create a directory with its parents, or accept an existing one that can be written to.

    Raises:
        CommandError: The directory cannot be written to or cannot be created.
    """
    check_directory(name, path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"{name} {path} cannot be created ({error.strerror}); name another"
        ) from error


def new_directory(out: Path) -> None:
    """Create a directory, or accept an existing one if it is empty and can be written to.

    Raises:
        CommandError: The directory is not empty, cannot be written to or cannot be created.
    """
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise CommandError(f"{out} exists and is not an empty directory; choose a new one")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"cannot write {out}: {error.strerror}; name a directory you may write to"
        ) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise CommandError(
            f"cannot write {out}: Permission denied; name a directory you may write to"
        )
