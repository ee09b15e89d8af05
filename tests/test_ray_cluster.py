# SPDX-License-Identifier: Apache-2.0
"""The tests' Ray cluster leaves nothing behind in the process that starts it."""

import os
import sys
from types import ModuleType
from typing import Any

import pytest
from helpers.ray_cluster import ENVIRON, TwoNodes


class Cluster:
    """Notes the environment that each node would inherit."""

    address = "127.0.0.1:6379"

    def __init__(self, **options: Any) -> None:
        self.inherited = [dict(os.environ)]

    def add_node(self, **slots: Any) -> str:
        self.inherited.append(dict(os.environ))
        return "node"

    def shutdown(self) -> None:
        pass


def test_only_nodes_get_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """`nobind` would give every engine that a later test of the same run starts a worker process
    of its own.
    """
    utils = ModuleType("ray.cluster_utils")
    utils.Cluster = Cluster  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.cluster_utils", utils)
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    before = dict(os.environ)
    with TwoNodes() as nodes:
        assert dict(os.environ) == before
        nodes.replace()
        assert len(nodes._cluster.inherited) == 3
        assert all(ENVIRON.items() <= inherited.items() for inherited in nodes._cluster.inherited)
        assert ENVIRON.items() <= nodes.environ.items()
    assert dict(os.environ) == before
