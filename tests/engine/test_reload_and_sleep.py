# SPDX-License-Identifier: Apache-2.0
"""vLLM's weight API (reload in place, sleep and wake-up), and its effect on live sessions."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import SharedEngine, running_engine

from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import RequestFailed


def test_weights_reload_from_another_checkpoint_and_back(
    null_engine: SharedEngine, null_world: Path, tmp_path: Path
) -> None:
    """`collective_rpc("reload_weights")` loads another checkpoint, and later the original one. An
    invalid file is rejected.
    """
    other, broken = tmp_path / "other", tmp_path / "broken"
    get_family("null_world").make_tiny(other, 1, "original")
    get_family("null_world").make_tiny(broken, 1, "original")
    (broken / "model.safetensors").write_bytes(b"not a checkpoint")

    client = null_engine.client

    async def scenario() -> None:
        first = await client.chunks("a", 1, seed=1)
        await client.engine.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        changed = await client.chunks("b", 1, seed=1)
        assert not torch.equal(first[0], changed[0])
        with pytest.raises(Exception, match=r"."):
            await client.engine.collective_rpc(
                "reload_weights", kwargs={"weights_path": str(broken)}
            )
        await client.engine.collective_rpc(
            "reload_weights", kwargs={"weights_path": str(null_world)}
        )
        assert torch.equal((await client.chunks("c", 1, seed=1))[0], first[0])

    null_engine.run(scenario())


@pytest.mark.nightly
def test_two_ranks_replace_their_weights_alike(causal_wan: Path, tmp_path: Path) -> None:
    """After a reload, two tensor-parallel ranks return latents that are bit-identical to those of
    an engine that started with the new weights.

    Sessions started with the old weights no longer exist on either rank.
    """
    other = tmp_path / "other"
    get_family("causal_wan").make_tiny(other, 1, "original")
    omni = {"height": 32, "width": 48, "model": {"window_frames": 7, "sink_frames": 2}}
    start = {"chunk_index": 0, "prompt": "a field", "seed": 1, "output": "latents"}

    async def chunks(client: Any, name: str) -> list[torch.Tensor]:
        sent = [start, {"chunk_index": 1, "output": "latents"}]
        return [(await client.send(session_id=name, **one))[1]["latents"].clone() for one in sent]

    async def run(model: Path, reloaded: Path | None) -> list[list[torch.Tensor]]:
        async with running_engine(model, omni, dtype="float32", tensor_parallel_size=2) as client:
            seen = [await chunks(client, "a")]
            if reloaded is not None:
                await client.engine.collective_rpc(
                    "reload_weights", kwargs={"weights_path": str(reloaded)}
                )
                with pytest.raises(RequestFailed, match="unknown_session"):
                    await client.send(session_id="a", chunk_index=2, output="latents")
                seen.append(await chunks(client, "a"))
            return seen

    async def scenario() -> None:
        before, after = await run(causal_wan, other)
        [expected] = await run(other, None)
        for old, new, wanted in zip(before, after, expected, strict=True):
            assert torch.equal(new, wanted) and not torch.equal(new, old)

    asyncio.run(scenario())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's sleep mode needs a CUDA device")
def test_sleep_level_1_keeps_sessions_and_level_2_drops_them(lingbot_world: Path) -> None:
    """After sleep level 1, a session's next chunk is bit-identical to the chunk generated without
    sleep. After level 2, the session no longer exists.
    """
    image = {"image": torch.arange(32 * 48 * 3).reshape(32, 48, 3).to(torch.uint8)}
    first = {"chunk_index": 0, "prompt": "a field", "actions": [["w"]] * 3, "output": "latents"}
    second = {"chunk_index": 1, "actions": [["l"]] * 3, "output": "latents"}

    async def scenario() -> None:
        async with running_engine(lingbot_world, dtype="float32", enable_sleep_mode=True) as client:
            await client.send(image, session_id="awake", **first)
            expected = (await client.send(session_id="awake", **second))[1]["latents"]
            await client.send(image, session_id="s", **first)
            memory = [(await client.engine.collective_rpc("device_memory"))[0]["used"]]
            await client.engine.sleep(level=1)
            memory.append((await client.engine.collective_rpc("device_memory"))[0]["used"])
            await client.engine.wake_up()
            assert memory[1] < memory[0]
            assert torch.equal(
                (await client.send(session_id="s", **second))[1]["latents"], expected
            )

            await client.engine.sleep(level=2)
            await client.engine.wake_up()
            await client.engine.collective_rpc("reload_weights")
            with pytest.raises(RequestFailed, match=r"out_of_order|invalid_request"):
                await client.send(session_id="s", **second)
            await client.send(image, session_id="new", **first)
            again = (await client.send(session_id="new", **second))[1]["latents"]
            assert torch.equal(again, expected)

    asyncio.run(scenario())
