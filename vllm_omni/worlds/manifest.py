# SPDX-License-Identifier: Apache-2.0
"""`manifest.json` of a checkpoint directory: size and SHA-256 of every file, and how to write the directory again.

Written with a world that this project made, checked before it is served: a file that is missing or damaged is one line.
A directory without a manifest is not checked. Held by tests/worlds/test_manifest.py.
"""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Final

import msgspec

MANIFEST: Final = "manifest.json"


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """write_again: the command that writes the directory; files: by path relative to it, `/` between folders."""

    write_again: Annotated[str, msgspec.Meta(max_length=200)]
    files: dict[Annotated[str, msgspec.Meta(pattern=r"^(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_./-]*\Z")], FileEntry]


def write_manifest(folder: Path, write_again: str) -> Manifest:
    """Describe every file below `folder` as it is now in its `manifest.json`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    files = {path.relative_to(folder).as_posix(): _entry(path) for path in paths}
    manifest = Manifest(write_again, files)
    (folder / MANIFEST).write_text(json.dumps(msgspec.to_builtins(manifest), indent=1) + "\n")
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a directory, None if it has none. Raises ValueError in one line."""
    path = folder / MANIFEST
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def check_files(folder: Path, remedy: str | None = None) -> None:
    """Compare the files of a directory with its manifest, if it has one (25 MB take some hundredths of a second).

    remedy: advice for a damaged file; None = the manifest's own command. Raises ValueError naming the first file
    that is missing or differs.
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
                raise ValueError(f"{path} is damaged ({found_bytes} bytes, {expected.bytes} expected); {remedy}")
            if _entry(path) != expected:
                raise ValueError(f"{path} is damaged (its SHA-256 is not the manifest's); {remedy}")
        except OSError as error:
            raise ValueError(f"{path} is missing or cannot be read; {remedy}") from error


def _entry(path: Path) -> FileEntry:
    with path.open("rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())
