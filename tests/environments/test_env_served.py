# SPDX-License-Identifier: Apache-2.0
"""Tests of environments served by a real `vllm serve`: the API key and in-place weight reloading.

The tests call `reload_weights` through vLLM's own `/collective_rpc` route, which exists only with
`VLLM_SERVER_DEV_MODE=1`.
"""

import json
import urllib.request
from pathlib import Path
from typing import Any

import helpers.needs_gymnasium  # noqa: F401
import numpy as np
import pytest
from helpers.served import AUTHORIZED, HEIGHT, KEY, WIDTH, Served
from helpers.waits import seconds

from vllm_omni.environments.world import WorldVectorEnv
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed

IMAGE = np.zeros((HEIGHT, WIDTH, 3), np.uint8)


def reload(server: Served, checkpoint: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/collective_rpc",
        json.dumps(body).encode(),
        {**AUTHORIZED, "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=seconds(60)) as reply:
        assert reply.status == 200


@pytest.mark.engine
def test_replacing_weights_ends_the_episodes_of_environments(
    null_world: Path, tmp_path: Path
) -> None:
    """When weights are replaced, no episode continues with keys and values computed with the old
    weights.

    The frames of new episodes are generated with the new weights.
    """
    other = tmp_path / "other"
    get_family("null_world").make_tiny(other, 1, "original")
    server = Served(null_world, tmp_path, environ={"VLLM_SERVER_DEV_MODE": "1"})
    try:
        server.wait_until_healthy()
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(RequestFailed, match=r"unauthorized: .*needs an API key"):
            WorldVectorEnv.connect(url, 1)
        world: dict[str, Any] = {"api_key": KEY, "prompt": "a field", "image": IMAGE}
        env = WorldVectorEnv.connect(url, 2, **world, latents=False)
        first = env.reset(seed=1)[0]
        still = env.action_space.sample()
        env.step(still)
        reload(server, other)
        with pytest.raises(RequestFailed, match="session_evicted: the engine has closed"):
            env.step(still)
        changed = env.reset(seed=1)[0]
        assert not np.array_equal(changed, first)
        env.step(still)
        reload(server, null_world)
        assert np.array_equal(env.reset(seed=1)[0], first)
        with pytest.raises(RequestFailed, match="trajectory requires a streaming model"):
            WorldVectorEnv.connect(url, 1, **world, trajectory=True).reset()
        env.close()
    finally:
        server.stop()
