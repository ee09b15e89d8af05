# SPDX-License-Identifier: Apache-2.0
"""The suite in two processes (`pytest -n auto`, as `make test` does): what they may share and what they must not.

In one process the suite keeps one of two cores busy: it computed for about as many seconds as it took. A file's tests
stay in one process, and so do files that share an engine or a server (`TOGETHER`); files are handed out in order, so
those with engines come early and the end is even. On CUDA there is one process: engines count on most of a device.
"""

from typing import Any

import pytest
import torch

PROCESSES = 2

TOGETHER = {
    "tests/engine/test_engine.py": "null_engine",
    "tests/engine/test_reload_and_sleep.py": "null_engine",
    "tests/engine/test_vae_stage.py": "null_engine",
    "tests/entrypoints/realtime/test_floods_served.py": "served",
    "tests/entrypoints/realtime/test_live_served.py": "served",
    "tests/entrypoints/realtime/test_operators_served.py": "served",
    "tests/entrypoints/realtime/test_other_doors_served.py": "served",
    "tests/entrypoints/realtime/test_session_api.py": "served",
    "tests/entrypoints/realtime/test_world_camera_served.py": "served",
}
"""Files whose tests ask for one fixture of several files; whoever is missing here starts another one."""


def unit_of(nodeid: str) -> str:
    """What is handed to a process as a whole."""
    file = nodeid.split("::")[0]
    return TOGETHER.get(file, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return 0 if torch.version.cuda is not None else PROCESSES


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class InOrder(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid)

    config.option.loadscopereorder = False
    return InOrder(config, log)
