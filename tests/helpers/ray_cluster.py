# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, without accelerators and with one worker per node.

Each node is real: it has a raylet, an object store and worker processes. `lose` kills one node with
SIGKILL. Ray is imported only when it is used, so without the extra [ray] the tests can be
collected, but they fail when they run.
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
    # vLLM would otherwise bind the workers of both nodes to the same first core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # the monitor would kill workers when the memory of the machine is nearly full
    "RAY_memory_monitor_refresh_ms": "0",
}
"""Environment variables for the nodes, from which workers inherit them, and for a process that
starts an engine.
"""


class TwoNodes:
    """A context manager for the cluster. `environ` is the environment for a process that starts an
    engine.

    In the test process, `ENVIRON` is set only while the nodes start, so it does not affect engines
    that the process starts without Ray.
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
