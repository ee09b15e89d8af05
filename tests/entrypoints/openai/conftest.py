# SPDX-License-Identifier: Apache-2.0
"""Servers for the tests of the OpenAI routes: one for single images and videos, and one for a
world.

Each server is stopped after its test module, because a worker that receives more than one
statistics request per second never stops polling its queue.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.openai_server import Served, serve

from vllm_omni.model_executor.models.registry import get_family


@pytest.fixture(scope="module")
def image_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a server for single images and videos. The server runs one video job at a time and
    queues up to two more.
    """
    model = tmp_path_factory.mktemp("null_image")
    get_family("null_image").make_tiny(model, 0, "original")
    yield from serve(
        model,
        tmp_path_factory.mktemp("image_server") / "server.log",
        VLLM_OMNI_MAX_RUNNING_VIDEOS="1",
        VLLM_OMNI_MAX_QUEUED_VIDEOS="2",
        VLLM_OMNI_MAX_BODY_BYTES=str(4 << 20),
        VLLM_OMNI_MAX_IMAGE_PIXELS=str(512 * 512),
        VLLM_OMNI_STATS_INTERVAL_S="3",
    )


@pytest.fixture(scope="module")
def world_server(null_world: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Start a world model server with two API server processes."""
    yield from serve(
        null_world,
        tmp_path_factory.mktemp("world_server") / "server.log",
        ["--api-server-count", "2"],
        VLLM_OMNI_STATS_INTERVAL_S="3",
    )
