# SPDX-License-Identifier: Apache-2.0
"""Which tests start an engine, a server with one, or a browser: `make check` leaves out what is so
marked.

A test gets the marker `engine` if it is in `tests/engine`, if it asks for a fixture of `FIXTURES`,
if its file imports a name of `STARTERS`, or if it is marked by hand (elsewhere, scripts that start
one in a process of their own); the marker `browser` if it asks for one, by whatever fixture. Where
engine tests are left out, a test that starts one all the same fails. Held by test_engine_tests.py.
"""

import multiprocessing.process
from pathlib import Path
from typing import Any

import pytest

FOLDER = "tests/engine/"
FIXTURES = frozenset({"null_engine", "served", "image_server", "world_server"})
STARTERS = frozenset({"running_engine", "shared_engine", "AsyncLLM", "LLM", "Served"})
BROWSER = "browser"
LEFT_OUT = "not engine"
_ENGINE_PROCESSES = ("EngineCore", "DPCoordinator")


def starts_an_engine(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    names: frozenset[str] = frozenset() if module is None else frozenset(vars(module.obj))
    if item.nodeid.startswith(FOLDER):
        return True
    return bool(FIXTURES.intersection(getattr(item, "fixturenames", ())) or STARTERS & names)


def pytest_configure(config: pytest.Config) -> None:
    if LEFT_OUT in config.option.markexpr:
        refuse_engines()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where engine tests are left out, what their folder imports is not imported either."""
    is_left_out = LEFT_OUT in config.option.markexpr and collection_path == config.rootpath / FOLDER
    return True if is_left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if starts_an_engine(item):
            item.add_marker("engine")
        if BROWSER in getattr(item, "fixturenames", ()):
            item.add_marker(BROWSER)


def refuse_engines() -> None:
    """Let no process of vLLM's engine begin, here or in a process that is forked from this one."""
    start = multiprocessing.process.BaseProcess.start

    def checked_start(process: multiprocessing.process.BaseProcess) -> Any:
        if process.name.startswith(_ENGINE_PROCESSES):
            raise AssertionError(
                f"{process.name} was started by a test without the marker `engine`"
            )
        return start(process)

    multiprocessing.process.BaseProcess.start = checked_start  # type: ignore[method-assign]
