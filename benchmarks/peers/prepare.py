# SPDX-License-Identifier: Apache-2.0
"""Downloads each peer's packages into a separate folder, and packs the folders for another host."""

import fnmatch
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from benchmarks.peers.parts import PACKAGES

REQUIREMENTS = Path(__file__).parent / "requirements"
GLIBC_MINORS = (17, 24, 26, 27, 28, 31, 34, 35)
"""Minor versions of glibc 2 for which wheels are accepted. Every version must be listed separately,
because pip accepts only listed versions.
"""
PLATFORMS = (
    *("linux_x86_64", "manylinux1_x86_64", "manylinux2014_x86_64"),
    *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS),
)


def prepare(names: list[str], folder: Path, python_version: str) -> None:
    """Put the wheels of `common` and of the named peers into `folder`, with one Python path per
    name.

    Existing paths are not modified. To prepare a path again, delete it first.
    """
    for name in ["common", *names]:
        target = folder / name
        if target.exists():
            print(f"{name}: {target} exists")
            continue
        wheels = folder / "wheels" / name
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--implementation", "cp"]
        command += ["--python-version", python_version, "--dest", str(wheels)]
        command += [word for platform in PLATFORMS for word in ("--platform", platform)]
        subprocess.run([*command, "-r", str(REQUIREMENTS / f"{name}.txt")], check=True)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack_wheel(wheel, target, PACKAGES[name].left_out)
        size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        print(f"{name}: {len(list(wheels.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB")
        if PACKAGES[name].source:
            print(f"{name}: put {PACKAGES[name].source} into {target}")


def unpack_wheel(wheel: Path, target: Path, left_out: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not any(fnmatch.fnmatch(name, pattern) for pattern in left_out):
                archive.extract(name, target)
    if wheel.name.startswith("fa3_fwd"):  # fa3_fwd imports its configuration under another name
        content = (target / "fa3_fwd_config.py").read_bytes()
        (target / "flash_attn_config.py").write_bytes(content)


def pack(names: list[str], folder: Path, limit_mib: int) -> None:
    """Write `common` and the named peers to one archive, split into `packs/N/piece-N-of-M`
    files.
    """
    packs = folder / "packs"
    packs.mkdir(parents=True, exist_ok=True)
    archive = packs / "all.tar.xz"
    with tarfile.open(archive, "w:xz", preset=2) as tar:
        for name in ["common", *names]:
            tar.add(folder / name, arcname=name)
    limit = limit_mib * 2**20
    total = -(-archive.stat().st_size // limit)
    with archive.open("rb") as source:
        for number in range(1, total + 1):
            piece = packs / str(number) / f"piece-{number}-of-{total}"
            piece.parent.mkdir(exist_ok=True)
            piece.write_bytes(source.read(limit))
    archive.unlink()
    print(f"{total} pieces of at most {limit_mib} MiB in {packs}")


def unpack(folder: Path) -> None:
    """Join the files in `folder/packs` and unpack the archive into `folder`.

    Raises:
        SystemExit: Files of the archive are missing.
    """
    pieces = {int(re.split("-", p.name)[1]): p for p in (folder / "packs").glob("*/piece-*-of-*")}
    total = int(next(iter(pieces.values())).name.rsplit("-", 1)[1]) if pieces else 0
    missing = sorted(set(range(1, total + 1)) - set(pieces))
    if missing or not pieces:
        raise SystemExit(f"{folder}/packs lacks pieces {missing or ''} of {total}: copy them too")
    archive = folder / "packs" / "all.tar.xz"
    archive.write_bytes(b"".join(pieces[number].read_bytes() for number in sorted(pieces)))
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
