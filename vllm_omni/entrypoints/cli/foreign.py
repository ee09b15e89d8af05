# SPDX-License-Identifier: Apache-2.0
"""Finds another project's `vllm_omni`: a package of the same name, and of the same import name, is on the public index.

Standard library only: set-up runs this file with the environment's own Python, since it may be the other package that
`import vllm_omni` finds there. Ours is known by two marks: its distribution registers `vllm_omni` among vLLM's endpoint
plugins, and its folder has this file. Held by tests/entrypoints/cli/test_foreign.py.
"""

import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_MARK = Path("entrypoints", "cli", Path(__file__).name)
_PLUGINS = "vllm.endpoint_plugins"


def find_foreign(paths: Sequence[str]) -> list[str]:
    """One line for each foreign `vllm_omni` on `paths` (a `sys.path`): its kind and place, and how to remove it."""
    return [*_distributions(paths), *_folders(paths)]


def _distributions(paths: Sequence[str]) -> Iterator[str]:
    for found in importlib.metadata.distributions(path=list(dict.fromkeys(paths))):
        name = found.metadata["Name"] or ""
        if re.sub(r"[-_.]+", "-", name).lower() != "vllm-omni":
            continue
        if any(entry.group == _PLUGINS and entry.name == "vllm_omni" for entry in found.entry_points):
            continue
        where = Path(str(found.locate_file("")))
        yield f"{name} {found.version} in {where} is another project's: pip uninstall {name}, then install this again"


def _folders(paths: Sequence[str]) -> Iterator[str]:
    seen = set()
    for path in paths:
        folder = Path(path or ".").resolve() / "vllm_omni"
        if folder in seen or not (folder / "__init__.py").is_file() or (folder / _MARK).is_file():
            continue
        seen.add(folder)
        yield f"{folder} is another project's, or an old copy: if pip uninstall vllm-omni leaves it, delete the folder"


if __name__ == "__main__":
    foreign = find_foreign(sys.path[1:])  # without this file's own folder
    print("\n".join(foreign))
    sys.exit(1 if foreign else 0)
