# SPDX-License-Identifier: Apache-2.0
"""Build a release: `make release`, or `python scripts/release.py [FOLDER]`.

The script writes these files to `dist/`:

    vllm_worlds-VERSION-py3-none-any.whl
    vllm_worlds-VERSION.tar.gz         sdist
    sbom.cdx.json                      CycloneDX bill of materials of this environment
    licences.md                        licence of each dependency of the package
    SHA256SUMS                         checksums of the files above, for `sha256sum --check`

The files are built from the committed files of HEAD, not from the working tree, and all times in
them are the time of that commit. The wheel and the sdist are therefore byte-identical on every
machine (tests/test_release.py). The script needs pip's package index for the build back end, but no
other network access, account or secret. The script does not publish the release.
"""

import argparse
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
EXTRAS = ("cpu", "cuda", "ray", "otel", "webrtc", "env")
"""Extras of the package that are intended for users. All other extras are for development."""
SBOM, LICENCES, SUMS = "sbom.cdx.json", "licences.md", "SHA256SUMS"
_PERMISSIVE = re.compile(
    r"MIT|BSD|Apache|ISC|PSF|Python Software|Unlicense|CC0|Zlib|HPND", re.IGNORECASE
)
_RECIPROCAL = re.compile(r"GPL|MPL|Mozilla|Proprietary", re.IGNORECASE)
_MODE = 0o644
_EXECUTABLE_MODE = 0o755


class ReleaseError(Exception):
    """The release cannot be built. The error message explains what to do."""


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        if changed := git("status", "--porcelain", "--untracked-files=no"):
            raise ReleaseError(f"commit or revert these changes first:\n{changed}")
        check_versions(REPO)
        for old in args.out.glob("*"):
            raise ReleaseError(f"{args.out} must be empty, but contains {old.name}")
        build(args.commit, args.out)
        write_sbom(args.out / SBOM)
        write_licences(args.out / LICENCES)
        write_sums(args.out)
    except ReleaseError as error:
        print(f"release failed: {error}", file=sys.stderr)
        return 1
    print((args.out / SUMS).read_text(), end="")
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Build wheel, sdist, SBOM and licence report.")
    parser.add_argument("out", nargs="?", type=Path, default=REPO / "dist", help="default: dist")
    parser.add_argument("--commit", default="HEAD", help="what to build (default: HEAD)")
    return parser


def check_versions(repo: Path) -> str:
    """Return the version in pyproject.toml, the only place that defines it.

    Raises:
        ReleaseError: CITATION.cff or the changelog states a different version.
    """
    version = str(tomllib.loads((repo / "pyproject.toml").read_text())["project"]["version"])
    cited = re.search(r"^version: (\S+)$", (repo / "CITATION.cff").read_text(), re.M)
    newest = re.search(r"^## \[(\d[^\]]*)\]", (repo / "CHANGELOG.md").read_text(), re.M)
    for name, found in (("CITATION.cff", cited), ("CHANGELOG.md", newest)):
        if found is None or found[1] != version:
            raise ReleaseError(
                f"{name} is about version {found and found[1]}, pyproject.toml about {version}"
            )
    return version


def build(commit: str, out: Path) -> None:
    """Build a commit's sdist and wheel into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    made_at = int(git("log", "-1", "--format=%ct", commit))
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder) / "source", Path(folder) / "built"
        with tarfile.open(fileobj=io.BytesIO(git_bytes("archive", commit))) as archive:
            archive.extractall(source, filter="data")
        run_tool(
            [sys.executable, "-m", "build", "--outdir", str(built), str(source)],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(made_at)},
            umask=0o022,  # the wheel records the modes of files that setuptools generates
        )
        for path in sorted(built.iterdir()):
            if path.name.endswith(".tar.gz"):
                normalise_sdist(path, made_at)
            shutil.copy(path, out / path.name)


def normalise_sdist(path: Path, made_at: int) -> None:
    """Rewrite an sdist without the metadata that depends on the machine.

    For an sdist, but not for a wheel, setuptools copies times, owners and modes from the file
    system.

    Args:
        path: Path of the sdist, a `.tar.gz` file.
        made_at: Modification time to set for all members, in seconds since 1970.
    """
    packed = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid = made_at, 0, 0
            member.uname = member.gname = ""
            member.pax_headers = {}
            member.mode = _EXECUTABLE_MODE if member.isdir() or member.mode & 0o100 else _MODE
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=made_at))


def write_sbom(path: Path) -> None:
    """Write the packages of this environment, in which the tests ran, in the CycloneDX format."""
    run_tool(
        [
            *(sys.executable, "-m", "cyclonedx_py", "environment", sys.executable),
            *("--pyproject", str(REPO / "pyproject.toml"), "--mc-type", "library"),
            *("--output-reproducible", "--of", "JSON", "-o", str(path)),
        ]
    )


def write_licences(path: Path) -> None:
    """Write the licences of all installed dependencies, including those of `EXTRAS`, and list the
    shared libraries that these packages bundle.
    """
    name = str(tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["name"])
    packages = dependencies(name, EXTRAS)
    found = run_tool(
        [
            *(sys.executable, "-m", "piplicenses", "--from=mixed", "--format=json"),
            *("--with-urls", "--packages", *packages),
        ]
    )
    path.write_text(
        "# Licences of the dependencies\n\n"
        f"All installed packages that `{name}` with the extras {', '.join(EXTRAS)} depends on, as "
        "their metadata say. None is part of the wheel.\n\n"
        + licence_tables(json.loads(found))
        + library_table(bundled_libraries(packages))
    )


def licence_tables(packages: list[dict[str, str]]) -> str:
    """Return tables of packages: first those with licences that a person should read, and then
    those with permissive licences.

    Args:
        packages: Output of pip-licenses. Some packages give the full licence text as the licence's
            name.
    """
    rows: tuple[list[str], list[str]] = ([], [])
    for package in sorted(packages, key=lambda package: package["Name"].lower()):
        licence = next((line for line in package["License"].splitlines() if line.strip()), "")
        cells = package["Name"], package["Version"], licence.strip()[:80], package["URL"]
        is_permissive = _PERMISSIVE.search(licence) and not _RECIPROCAL.search(licence)
        rows[bool(is_permissive)].append("| " + " | ".join(cells) + " |\n")
    head = "| package | version | licence | address |\n|---|---|---|---|\n"
    others, permissive = ("".join(part) for part in rows)
    return f"## To be read\n\n{head}{others}\n## Permissive\n\n{head}{permissive}"


def bundled_libraries(packages: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the shared libraries that auditwheel has copied into each package's
    wheel.
    """
    found: dict[str, list[str]] = {}
    for name in packages:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        libraries = {
            re.sub(r"(-[0-9a-f]{8})?\.so.*", "", path.name)
            for path in files
            if path.parts[0].endswith(".libs")
        }
        if libraries:
            found[name] = sorted(libraries)
    return found


def library_table(libraries: dict[str, list[str]]) -> str:
    rows = "".join(f"| {name} | {', '.join(names)} |\n" for name, names in libraries.items())
    return (
        "\n## Libraries inside of these packages\n\nThe metadata do not state their licences. x264 "
        "and x265 are under the GPL, and FFmpeg (libavcodec and others) is too if it is built "
        "with them.\n\n| package | libraries |\n|---|---|\n" + rows
    )


def dependencies(name: str, extras: Iterable[str] = ()) -> list[str]:
    """Return the names of the installed distributions that `name` requires, directly or indirectly.

    Requirements that apply only to other platforms, and packages that are not installed, are left
    out.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    seen: dict[tuple[str, str], None] = {}
    todo = [(str(canonicalize_name(name)), extra) for extra in ("", *extras)]
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        try:
            required = importlib.metadata.distribution(one[0]).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        seen[one] = None
        for line in required:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": one[1]}):
                todo += [(str(canonicalize_name(need.name)), e) for e in ("", *need.extras)]
    return sorted({found for found, _ in seen} - {str(canonicalize_name(name))})


def write_sums(out: Path) -> None:
    names = sorted(path.name for path in out.iterdir())
    sums = [f"{hashlib.sha256((out / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (out / SUMS).write_text("".join(sums))


def git(*arguments: str) -> str:
    return git_bytes(*arguments).decode().strip()


def git_bytes(*arguments: str) -> bytes:
    result = subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, check=False)
    if result.returncode != 0:
        raise ReleaseError(f"git {arguments[0]}: {result.stderr.decode().strip()}")
    return result.stdout


def run_tool(command: list[str], **options: Any) -> str:
    """Run a tool of the `release` extra and return its output.

    Raises:
        ReleaseError: The tool failed.
    """
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if result.returncode != 0:
        raise ReleaseError(
            f"{' '.join(command[:4])} ended with {result.returncode}:\n"
            f"{(result.stdout + result.stderr)[-2000:]}"
        )
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
