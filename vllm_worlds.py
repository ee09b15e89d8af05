# SPDX-License-Identifier: Apache-2.0
"""Entry points of the `vllm-worlds` distribution. They refuse to run if another project's
`vllm_omni` is installed.

PyPI contains another project, `vllm-omni`, whose package is also called `vllm_omni`. pip
installs both projects into the same environment without a warning. The files of the two packages
then overwrite each other, and Python imports a mixture of both. The checks are in this module
rather than in `vllm_omni`, because importing a module from that package runs the package's
`__init__`, which may belong to the other project.

The setup script runs this file with the environment's Python, so it uses only the standard library.
This project's package is recognised by two properties: its distribution registers `vllm_omni` as a
vLLM endpoint plugin, and its folder contains `entrypoints/cli/doctor.py`.
"""

import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DISTRIBUTION = "vllm-worlds"
"""Distribution name of this project, as used by pip. The project's package is imported as
`vllm_omni`.
"""
OTHER_DISTRIBUTION = "vllm-omni"
"""Name of the other project. This project formerly had the same name but was never published under
that name.
"""
_MARK = Path("entrypoints", "cli", "doctor.py")
_PLUGINS = "vllm.endpoint_plugins"


class OtherPackageError(RuntimeError):
    """Another project's `vllm_omni` is in this environment. The error message explains what to
    do.
    """


def main() -> None:
    """Run the `vllm-omni` command, which is also installed as `vllm-worlds`.

    Exits with status 2 if another project's `vllm_omni` is in the environment.
    """
    try:
        refuse_other_package()
    except OtherPackageError as error:
        print(f"{DISTRIBUTION}: error: {error}", file=sys.stderr)
        sys.exit(2)
    from vllm_omni.entrypoints.cli.main import main as run_command

    run_command()


def register() -> None:
    """Register this package with vLLM, which calls this function in every process.

    Raises:
        OtherPackageError: Another project's `vllm_omni` is in the environment.
    """
    refuse_other_package()
    from vllm_omni import register as register_package

    register_package()


def refuse_other_package(paths: Sequence[str] | None = None) -> None:
    """Check that no other project's `vllm_omni` is in the environment.

    Args:
        paths: Folders to search for packages. Default: `sys.path`.

    Raises:
        OtherPackageError: Another project's `vllm_omni` is in one of the folders.
    """
    if other := find_other_package(sys.path if paths is None else paths):
        raise OtherPackageError("\n".join([*other, remedy()]))


def find_other_package(paths: Sequence[str]) -> list[str]:
    """Return one line for each `vllm_omni` of another project on `paths`, with its kind and
    location.
    """
    return [*_distributions(paths), *_folders(paths)]


def find_former_name(paths: Sequence[str]) -> str | None:
    """Return the version of this project that is installed under its former name, if any.

    A checkout may still contain the `vllm_omni.egg-info` folder, which is not an installation.
    """
    for found in _named(paths):
        if _is_ours(found) and found.read_text("RECORD") is not None:
            return found.version
    return None


def remedy() -> str:
    """Return instructions for removing another project's `vllm_omni`."""
    return (
        f"Both projects import `vllm_omni`, so each needs an environment of its own. To keep this "
        f"one here: pip uninstall {OTHER_DISTRIBUTION} {DISTRIBUTION}, delete a folder `vllm_omni` "
        f"that remains, then install {DISTRIBUTION} again (the first step also removes files of "
        "this project)."
    )


def _named(paths: Sequence[str]) -> Iterator[importlib.metadata.Distribution]:
    """Yield the distributions that have the other project's name, in any spelling."""
    yield from importlib.metadata.distributions(
        name=OTHER_DISTRIBUTION, path=list(dict.fromkeys(paths))
    )


def _is_ours(found: importlib.metadata.Distribution) -> bool:
    return any(
        entry.group == _PLUGINS and entry.name == "vllm_omni" for entry in found.entry_points
    )


def _distributions(paths: Sequence[str]) -> Iterator[str]:
    for found in _named(paths):
        if not _is_ours(found):
            where = Path(str(found.locate_file("")))
            yield f"{found.metadata['Name']} {found.version} in {where} is another project's."


def _folders(paths: Sequence[str]) -> Iterator[str]:
    seen = set()
    for path in paths:
        folder = Path(path or ".").resolve() / "vllm_omni"
        if folder in seen or not (folder / "__init__.py").is_file() or (folder / _MARK).is_file():
            continue
        seen.add(folder)
        yield f"The folder {folder} is another project's, or left from an old installation."


if __name__ == "__main__":
    try:
        refuse_other_package(sys.path[1:])  # without this file's own folder
    except OtherPackageError as refused:
        sys.exit(str(refused))
