# SPDX-License-Identifier: Apache-2.0
"""Any selection of test directories can be run together, in any order."""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
SHARED = {TESTS, TESTS / "helpers"}


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_names_of_test_files_and_helpers_are_unique() -> None:
    """pytest puts every directory on one path: of two modules of one name it would import the first for both."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_nobody_imports_a_conftest() -> None:
    """There are several, and which one `conftest` means depends on the directory that was named first."""
    assert [str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if "conftest" in imported(path)] == []


def test_what_several_folders_import_is_in_helpers() -> None:
    """Of pytest's folders a file finds its own and `tests`; the others are there only if they are collected too."""
    folders = {path.stem: path.parent for path in TESTS.rglob("*.py") if path.parent not in SHARED}
    foreign = {
        f"{path.relative_to(TESTS)} imports {name}"
        for path in TESTS.rglob("*.py")
        for name in imported(path)
        if folders.get(name, path.parent) != path.parent
    }
    assert foreign == set()
