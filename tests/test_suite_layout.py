# SPDX-License-Identifier: Apache-2.0
"""Any selection of test directories can be run together, in any order."""

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent


def test_names_of_test_files_and_helpers_are_unique() -> None:
    """pytest puts every directory on one path: of two modules of one name it would import the first for both."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_nobody_imports_a_conftest() -> None:
    """There are several, and which one `conftest` means depends on the directory that was named first."""
    imported = {
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and node.module == "conftest")
        or (isinstance(node, ast.Import) and any(alias.name == "conftest" for alias in node.names))
    }
    assert imported == set()
