# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster of two nodes on this machine, without accelerators: each node has one slot for one
worker.

Nodes are real: a raylet, an object store and worker processes each, found by address. `lose` kills
one with SIGKILL. Ray is imported by whoever needs it: without the extra [ray] tests can be
collected, and fail when they are run.
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
    # stock vLLM would bind both nodes' workers to the same first core
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # it kills workers when the machine is nearly full, whoever fills it
    "RAY_memory_monitor_refresh_ms": "0",
}
"""For the nodes (their workers inherit it) and for whoever starts an engine on them."""


class TwoNodes:
    """`environ`: what an engine's process needs to find the cluster. Use as a context manager.

    Only nodes get the variables: an engine without Ray that this process starts meanwhile, or
    later, is as ever.
    """

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        with mock.patch.dict(os.environ, ENVIRON):  # raylets pass their environment on to workers
            self._cluster = Cluster(initialize_head=True, head_node_args=SLOTS)
            self.other = self._cluster.add_node(**SLOTS)

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, **ENVIRON, "RAY_ADDRESS": str(self._cluster.address)}

    def lose(self) -> None:
        """Kill the second node, without a word to anybody."""
        self._cluster.remove_node(self.other, allow_graceful=False)

    def replace(self) -> None:
        with mock.patch.dict(os.environ, ENVIRON):
            self.other = self._cluster.add_node(**SLOTS)

    def __enter__(self) -> "TwoNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.shutdown()
