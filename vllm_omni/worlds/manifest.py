# SPDX-License-Identifier: Apache-2.0
"""`manifest.json` of a checkpoint directory: size and SHA-256 of every file.

The worlds of this project have a manifest, and their files are verified before they are served. If
a file is missing or damaged, the error message is one line. Directories without a manifest are not
verified.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Final

import msgspec

MANIFEST: Final = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Expected content of a file."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    """Size of the file in bytes."""
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the file as hexadecimal digits."""


class ChecksumManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a `manifest.json`."""

    write_again: Annotated[str, msgspec.Meta(max_length=200)]
    """Command that recreates the directory."""
    files: dict[
        Annotated[str, msgspec.Meta(pattern=r"^(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_./-]*\Z")],
        FileEntry,
    ]
    """Expected files, keyed by path relative to the directory, with `/` as the separator."""


def write_manifest(folder: Path, write_again: str) -> ChecksumManifest:
    """Write a manifest of a directory's current files.

    Args:
        folder: Directory to write the manifest for.
        write_again: Command that recreates the directory; see `ChecksumManifest.write_again`.
    """
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST
    )
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in paths}
    manifest = ChecksumManifest(write_again, files)
    (folder / MANIFEST).write_text(json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> ChecksumManifest | None:
    """Return the manifest of a directory, or None if it has none.

    Raises:
        ValueError: The manifest is invalid. The message is one line.
    """
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=ChecksumManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def check_files(folder: Path, remedy: str | None = None) -> None:
    """Verify the files of a directory that has a manifest.

    Verifying 25 MB takes a few hundredths of a second.

    Args:
        folder: Directory to verify.
        remedy: Advice in the error message for a damaged file, or None for the command in the
            manifest.

    Raises:
        ValueError: A file is missing or differs from its manifest entry. The message names the
            first such file.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return
    remedy = remedy or f"write the directory again with `{manifest.write_again}`"
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            found_bytes = path.stat().st_size
            if found_bytes != expected.bytes:
                raise ValueError(
                    f"{path} is damaged ({found_bytes} bytes, {expected.bytes} expected); {remedy}"
                )
            if _entry(path) != expected:
                raise ValueError(f"{path} is damaged (its SHA-256 is not the manifest's); {remedy}")
        except OSError as error:
            raise ValueError(f"{path} is missing or cannot be read; {remedy}") from error


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
