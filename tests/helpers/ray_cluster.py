# SPDX-License-Identifier: Apache-2.0
"""A two-node Ray cluster on this machine, with no accelerators and one worker per node.

Each node is a real Ray node: it has a raylet, an object store and worker processes. `lose` kills
one node with SIGKILL. Ray is imported only when it is used. Without the [ray] extra, the tests can
therefore be collected, but they fail when run.
"""

import os
from typing import Any
from unittest import mock

SLOTS: dict[str, Any] = {
    "num_cpus": 1,
    "num_gpus": 1,
    "object_store_memory": 128 << 20,
    "include_dashboard": False,
}

ENVIRON = {
    "VLLM_OMNI_RAY_ON_CPU": "1",
    # Otherwise, vLLM would bind both nodes' workers to the same first core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # The monitor would kill workers when the machine's memory is nearly full.
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Environment variables for the nodes and for any process that starts an engine. Workers inherit
them from their node.
"""


class TwoNodes:
    """A context manager that runs the cluster. `environ` is the environment for a process that
    starts an engine.

    In the test process, `ENVIRON` is set only while the nodes start, so it does not affect engines
    that the test process starts without Ray.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        with mock.patch.dict(os.environ, ENVIRON):  # workers inherit their raylet's environment
            self._cluster = Cluster(initialize_head=True, head_node_args=SLOTS)
            self.other = self._cluster.add_node(**SLOTS)

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **ENVIRON, "RAY_ADDRESS": str(self._cluster.address)}

    def lose(self) -> None:
        """Kill the second node without a graceful shutdown."""
        self._cluster.remove_node(self.other, allow_graceful=False)

    def replace(self) -> None:
        with mock.patch.dict(os.environ, ENVIRON):
            self.other = self._cluster.add_node(**SLOTS)

    def __enter__(self) -> "TwoNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
