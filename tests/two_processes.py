# SPDX-License-Identifier: Apache-2.0
"""The suite in two processes (`pytest -n auto`, as `make test` does): what they may share and what
they must not.

In one process the suite keeps one of two cores busy: it computed for about as many seconds as it
took. A file's tests stay in one process, and so do files that share an engine or a server
(`TOGETHER`). The longest of these units begin first, by the seconds in `suite_seconds.json`, so
that both processes end together. On CUDA there is one process: engines count on most of a device.

To measure again: `make test PYTEST_ARGS="--times FILE"`, then `python tests/two_processes.py FILE`.
Held by test_two_processes.py.
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

PROCESSES = 2
SECONDS_FILE = Path(__file__).with_name("suite_seconds.json")
UNKNOWN_S = 10.0
"""What a file counts that nobody has measured: early enough if it starts an engine."""

TOGETHER = {
    "tests/engine/test_benchmarks_without_gpu.py": "null_engine",
    "tests/engine/test_engine.py": "null_engine",
    "tests/engine/test_reload_and_sleep.py": "null_engine",
    "tests/engine/test_vae_stage.py": "null_engine",
    "tests/entrypoints/realtime/test_floods_served.py": "served",
    "tests/entrypoints/realtime/test_live_served.py": "served",
    "tests/entrypoints/realtime/test_operators_served.py": "served",
    "tests/entrypoints/realtime/test_session_api.py": "served",
    "tests/entrypoints/realtime/test_world_camera_served.py": "served",
}
"""Files whose tests ask for one fixture of several files.

Whoever is missing starts another engine.
"""


def unit_of(nodeid: str) -> str:
    """What is handed to a process as a whole."""
    file = nodeid.split("::")[0]
    if file.endswith("_cuda.py") and (runner := re.search(r"\[(V1|V2)\b", nodeid)):
        return f"{file}[{runner[1]}]"  # an engine of its own
    return TOGETHER.get(file, file)


def longest_first(nodeids: Iterable[str], seconds: Mapping[str, float]) -> list[str]:
    """The units of `nodeids`, by the seconds of their files; equal ones, and the tests of each,
    keep their order.
    """
    files: dict[str, set[str]] = defaultdict(set)
    for nodeid in nodeids:
        files[unit_of(nodeid)].add(nodeid.split("::")[0])
    total_s = {
        unit: sum(seconds.get(file, UNKNOWN_S) for file in names) for unit, names in files.items()
    }
    return sorted(total_s, key=lambda unit: -total_s[unit])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes, which all sort alike
        units = longest_first((item.nodeid for item in items), json.loads(SECONDS_FILE.read_text()))
        position = {unit: index for index, unit in enumerate(units)}
        items.sort(key=lambda item: position[unit_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    import torch  # a pytest that a test starts with this plugin does without

    return 0 if torch.version.cuda is not None else PROCESSES


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class InOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return InOrder(config, log)


def update(files: Iterable[Path]) -> None:
    """Take over the seconds of whole files, by the clock; a file that is in none of `files`
    stays as it is.
    """
    measured: dict[str, float] = defaultdict(float)
    for file in files:
        for name, (wall_s, _) in json.loads(file.read_text()).items():
            measured[name.split("::")[0]] += wall_s
    root = Path(__file__).parents[1]
    seconds = json.loads(SECONDS_FILE.read_text()) if SECONDS_FILE.exists() else {}
    seconds |= {name: round(wall_s, 1) for name, wall_s in measured.items()}
    retained = {name: wall_s for name, wall_s in seconds.items() if (root / name).is_file()}
    SECONDS_FILE.write_text(json.dumps(retained, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    update(map(Path, sys.argv[1:]))
