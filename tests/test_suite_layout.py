# SPDX-License-Identifier: Apache-2.0
"""Any selection of test folders can be run together and in any order."""

import ast
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

TESTS = Path(__file__).parent
SHARED = {TESTS, TESTS / "helpers"}
VIRTUAL_TIME = "import run_in_virtual_time"
"""Import that identifies test files that use a virtual clock. In these files, sleeps take no
time.
"""


@dataclass(frozen=True)
class Facts:
    """The modules that a test file imports (not only at its top), and the line numbers of its bare
    sleeps.
    """

    imported: frozenset[str]
    bare_sleeps: tuple[int, ...]


@cache
def info(path: Path) -> Facts:
    found: set[str] = set()
    sleeps = []
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Call) and is_bare_sleep(node):
            sleeps.append(node.lineno)
    return Facts(frozenset(found), () if VIRTUAL_TIME in text else tuple(sleeps))


def is_bare_sleep(call: ast.Call) -> bool:
    """Return whether a call is a sleep whose duration contains a literal number, unless the
    duration is just 0.
    """
    if (
        ast.unparse(call.func) not in ("time.sleep", "asyncio.sleep", "sleep")
        or len(call.args) != 1
    ):
        return False
    has_number = any(isinstance(part, ast.Constant) for part in ast.walk(call.args[0]))
    return has_number and ast.unparse(call.args[0]) != "0"


def imports_at_the_top(path: Path) -> set[str]:
    """Return the modules that are imported together with this file, including each name of a
    `from` import, which may be a module.
    """
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imported(path: Path) -> frozenset[str]:
    return info(path).imported


def test_names_of_test_files_and_helpers_are_unique() -> None:
    """No two test files or helpers have the same name.

    pytest adds every folder to the same import path, so a second module with the same name would
    never be imported.
    """
    names = Counter(path.name for path in TESTS.rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_no_one_imports_a_conftest() -> None:
    """No file imports `conftest`. Several modules have this name, so which of them is imported
    would depend on the folder order.
    """
    assert [
        str(path.relative_to(TESTS)) for path in TESTS.rglob("*.py") if "conftest" in imported(path)
    ] == []


def test_what_several_folders_import_is_in_helpers() -> None:
    """Modules that files in several folders import must be in tests/helpers.

    A test file may import only from its own folder, `tests` and `tests/helpers`.
    """
    folders = {path.stem: path.parent for path in TESTS.rglob("*.py") if path.parent not in SHARED}
    other_package = {
        f"{path.relative_to(TESTS)} imports {name}"
        for path in TESTS.rglob("*.py")
        for name in imported(path)
        if folders.get(name, path.parent) != path.parent
    }
    assert other_package == set()


def test_tests_contain_no_bare_sleeps() -> None:
    """Tests contain no bare sleeps, because these are too short on slow machines and longer than
    necessary on fast machines.

    Use tests/helpers/waits.py instead.
    """
    files = [path for path in TESTS.rglob("*.py") if path != TESTS / "helpers" / "waits.py"]
    found = [
        f"{path.relative_to(TESTS)}:{line}" for path in files for line in info(path).bare_sleeps
    ]
    assert found == []


def test_no_test_file_imports_the_cpu_worker_at_its_top() -> None:
    """Collecting the tests does not import vLLM's CPU worker, which replaces `torch.cuda`'s streams
    and events.
    """
    assert [
        f"{path.relative_to(TESTS)} imports {name}"
        for path in TESTS.rglob("*.py")
        for name in imports_at_the_top(path)
        if name.endswith(".cpu_worker") or name.startswith("vllm.v1.worker.cpu.")
    ] == []


def test_parallel_runs_keep_files_whole() -> None:
    """Parallel runs assign whole test files to processes, because otherwise every process would
    start the engines of every file.

    By default, pytest-xdist distributes the tests in a file across several processes. With pytest
    9.2, it does so even if xdist groups are used.
    """
    runs = [line for line in (TESTS.parent / "Makefile").read_text().splitlines() if " -n " in line]
    parallel = [line for line in runs if "-m pytest" in line]
    assert len(parallel) == 4
    assert all("--dist loadfile --no-loadscope-reorder" in line for line in parallel)
