# SPDX-License-Identifier: Apache-2.0
"""Detects another project's `vllm_omni`, because the public index has one with the same names.

This module uses only the standard library: setup runs this file with the environment's Python,
where `import vllm_omni` may find the other package. This package has two marks: its distribution
registers `vllm_omni` as an endpoint plugin of vLLM, and its folder contains this file.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_MARK = Path("entrypoints", "cli", Path(__file__).name)
_PLUGINS = "vllm.endpoint_plugins"


def find_other_package(paths: Sequence[str]) -> list[str]:
    """Return one line for each foreign `vllm_omni` on a `sys.path`: its kind, location and
    removal.
    """
    return [*_distributions(paths), *_folders(paths)]


def _distributions(paths: Sequence[str]) -> Iterator[str]:
    for found in importlib.metadata.distributions(path=list(dict.fromkeys(paths))):
        name = found.metadata["Name"] or ""
        if re.sub(r"[-_.]+", "-", name).lower() != "vllm-omni":
            continue
        if any(
            entry.group == _PLUGINS and entry.name == "vllm_omni" for entry in found.entry_points
        ):
            continue
        where = Path(str(found.locate_file("")))
        yield (
            f"{name} {found.version} in {where} is another project's: pip uninstall {name}, then "
            "install this again"
        )


def _folders(paths: Sequence[str]) -> Iterator[str]:
    seen = set()
    for path in paths:
        folder = Path(path or ".").resolve() / "vllm_omni"
        if folder in seen or not (folder / "__init__.py").is_file() or (folder / _MARK).is_file():
            continue
        seen.add(folder)
        yield (
            f"{folder} is another project's, or an old copy: if pip uninstall vllm-omni leaves it, "
            "delete the folder"
        )


if __name__ == "__main__":
    other_package = find_other_package(sys.path[1:])  # without this file's own folder
    print("\n".join(other_package))
    sys.exit(1 if other_package else 0)
