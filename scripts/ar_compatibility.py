# SPDX-License-Identifier: Apache-2.0
"""Write the table in docs/architecture/ar_compatibility.md from test outcomes.

The table shows which vLLM features work with the AR worker on each of vLLM's model runners (V1 and
V2).

    python scripts/ar_compatibility.py           # run every marked test that this machine can run
    python scripts/ar_compatibility.py -m cuda   # any arguments of pytest, here: GPU tests only
    python scripts/ar_compatibility.py --render  # write the table from the stored outcomes

Tests marked with `@feature` (tests/helpers/ar_compatibility.py) verify the rows. The outcomes are
stored next to the table, so a CPU machine and a GPU machine can each add their own outcomes. A
skipped test does not change its stored outcome. tests/docs/test_ar_compatibility.py verifies the
committed table.
"""

import ast
import fcntl
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
OUTCOMES = REPO / "docs" / "architecture" / "ar_compatibility.json"
TABLE = REPO / "docs" / "architecture" / "ar_compatibility.md"
FOLDERS = ("tests/engine", "tests/worker")
COLUMNS = {"V1": "V1 runner (CPU, older CUDA configurations)", "V2": "V2 runner (CUDA default)"}

HEAD = """# Features of vLLM that work with the AR worker

`scripts/ar_compatibility.py` writes this page from the outcomes of the tests in the last column; do not edit it. Each
cell states how the feature was tested. **Real engine**: an engine returned the same hidden states as a forward pass of
Hugging Face Transformers. **Mocked**: the installed vLLM's model runner received handwritten scheduler outputs, because
the feature needs other hardware. **Not run**: the test has not run yet, because it needs other hardware.

"""  # noqa: E501


def main(arguments: list[str]) -> int:
    status = 0
    if arguments != ["--render"]:
        import pytest

        plugin = Outcomes(keep)
        files = sorted({mark["test"].split("::")[0] for mark in marks()})
        status = int(
            pytest.main([*[str(REPO / file) for file in files], "-q", *arguments], plugins=[plugin])
        )
    TABLE.write_text(render(read()))
    return status


class Outcomes:
    """A pytest plugin that collects one outcome per marked test, across all of its parameters.

    Args:
        keep: Function called with a test's outcome as soon as it is known, so an interrupted run
            does not lose outcomes.
    """

    def __init__(self, keep: Callable[[dict[str, str]], None]) -> None:
        self._keep = keep
        self._to_come: Counter[str] = Counter()
        self._seen: dict[str, set[str]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.get_closest_marker("ar_feature")]

    def pytest_collection_finish(self, session: Any) -> None:
        self._to_come = Counter(_name(item.nodeid) for item in session.items)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = _name(report.nodeid)
        seen = self._seen.setdefault(name, set())
        if report.failed:
            seen.add("failed")
        elif report.when == "call" and report.passed:
            seen.add("passed")
        if report.when == "teardown":
            self._to_come[name] -= 1
        if "failed" in seen:
            self._keep({name: "failed"})
        elif self._to_come[name] == 0 and "passed" in seen:
            self._keep({name: "passed"})


def _name(nodeid: str) -> str:
    return nodeid.split("[")[0]


def read() -> dict[str, str]:
    """Return the stored outcomes: test name -> `passed` or `failed`."""
    text = OUTCOMES.read_text() if OUTCOMES.exists() else ""
    return json.loads(text or "{}")


def keep(outcomes: dict[str, str]) -> None:
    """Add outcomes to the stored ones. Several processes may call this function at the same
    time.
    """
    with OUTCOMES.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        retained = {**read(), **outcomes}
        file.truncate(0)
        file.write(json.dumps(dict(sorted(retained.items())), indent=2) + "\n")


def marks() -> Iterator[dict[str, str]]:
    """Yield the name, runner, kind, note and test of every `@feature` mark in the tests."""
    for folder in FOLDERS:
        for path in sorted((REPO / folder).glob("test_*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else []:
                    if (
                        isinstance(decorator, ast.Call)
                        and getattr(decorator.func, "id", "") == "feature"
                    ):
                        values = [ast.literal_eval(argument) for argument in decorator.args]
                        fields = dict(zip(("name", "runner", "how", "note"), values, strict=False))
                        fields |= {
                            keyword.arg or "": ast.literal_eval(keyword.value)
                            for keyword in decorator.keywords
                        }
                        test = f"{path.relative_to(REPO)}::{node.name}"
                        yield {"runner": "V1", "how": "engine", "note": "", **fields, "test": test}


def render(outcomes: dict[str, str]) -> str:
    rows: dict[str, list[dict[str, str]]] = {}
    for mark in marks():
        rows.setdefault(mark["name"], []).append(mark)
    lines = [
        "| feature | " + " | ".join(COLUMNS.values()) + " | tests |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    for name, found in sorted(rows.items(), key=lambda item: item[0].lower()):
        cells = [
            cell([mark for mark in found if mark["runner"] == runner], outcomes)
            for runner in COLUMNS
        ]
        tests = ", ".join(dict.fromkeys(f"`{Path(mark['test']).name}`" for mark in found))
        note = "; ".join(dict.fromkeys(mark["note"] for mark in found if mark["note"]))
        lines.append(f"| {name}{f' ({note})' if note else ''} | {' | '.join(cells)} | {tests} |")
    return HEAD + "\n".join(lines) + "\n"


def cell(found: list[dict[str, str]], outcomes: dict[str, str]) -> str:
    """Return the content of a cell: a failure if there is one, otherwise success in a real engine,
    otherwise success with mocks, and otherwise `not run`.
    """
    if not found:
        return "no test"
    known = [(mark["how"], outcomes.get(mark["test"])) for mark in found]
    if any(outcome == "failed" for _, outcome in known):
        return "**fails**"
    if any(how == "engine" and outcome == "passed" for how, outcome in known):
        return "yes, real engine"
    if any(outcome == "passed" for _, outcome in known):
        waiting = any(how == "engine" for how, _ in known)
        return "mocked" + (" (engine test not run)" if waiting else "")
    return "not run"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
