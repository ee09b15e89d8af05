# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters in the real engine: different adapters per session, switches between chunks,
snapshots and refusals.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import lora_files as files
from helpers.engine_client import EngineClient, running_engine
from safetensors.torch import load_file, save_file
from vllm.lora.request import LoRARequest

from vllm_omni.inputs import Lora
from vllm_omni.outputs import RequestFailed
from vllm_omni.session_files.snapshot_exchange import (
    package_version,
    restore_exchange,
    run_exchange_async,
    save_exchange,
)

CHUNKS = 3
OPTIONS = {"model": {"window_frames": 7, "sink_frames": 2}}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
INK, WOOL = [Lora(name="ink", scale=0.8)], [Lora(name="wool")]
TOLERANCE = 2e-4
"""Absolute tolerance for fp32 latents of order 1, required because several ranks sum in a different
order than one rank.
"""


@pytest.fixture(scope="module")
def adapters(causal_wan: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: files.write_causal_wan(causal_wan, folder / f"{name}.safetensors", seed, rank)
        for seed, (name, rank) in enumerate({"ink": 4, "wool": 8}.items())
    }


async def add(client: EngineClient, adapters: dict[str, Path]) -> None:
    for number, (name, path) in enumerate(adapters.items(), start=1):
        assert await client.engine.add_lora(LoRARequest(name, number, str(path)))


async def stream(
    client: EngineClient, session: str, choices: list[list[Lora] | None]
) -> list[torch.Tensor]:
    """Return the latents of a session. Each chunk is requested with its entry of `choices` as
    `lora`.
    """
    latents = []
    for index, lora in enumerate(choices):
        prompt = "a field" if index == 0 else None
        _, tensors = await client.send(
            session_id=session, prompt=prompt, output="latents", lora=lora
        )
        latents.append(tensors["latents"].clone())
    return latents


def equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_sessions_with_different_adapters_are_independent(
    causal_wan: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Sessions with different adapters are independent.

    One engine runs concurrent sessions with adapter switches, forks, snapshots, refusals and a
    reload.
    """

    async def scenario() -> None:
        async with running_engine(causal_wan, OPTIONS, dtype="float32", **LORA) as client:
            base = await stream(client, "base", [None] * CHUNKS)
            await add(client, adapters)
            alone = {
                "base": base,
                "ink": await stream(client, "ink-alone", [INK, None, None]),
                "wool": await stream(client, "wool-alone", [WOOL] * CHUNKS),
                "both": await stream(client, "both-alone", [[*INK, *WOOL]] * CHUNKS),
            }
            assert not any(equal(alone[name], base) for name in ("ink", "wool", "both"))
            await side_by_side(client, alone)
            await switching(client, alone)
            await continuing(client, tmp_path)
            await refusals(client, causal_wan, adapters, tmp_path, base)
            await reload(client, alone)

    asyncio.run(scenario())


async def side_by_side(client: EngineClient, alone: dict[str, list[torch.Tensor]]) -> None:
    choices = {"base": None, "ink": INK, "wool": WOOL, "both": [*INK, *WOOL]}
    streams = [stream(client, f"{name}-together", [choices[name]] * CHUNKS) for name in alone]
    for got, name in zip(await asyncio.gather(*streams), alone, strict=True):
        assert equal(got, alone[name]), name
    for name in alone:
        await client.send(session_id=f"{name}-together", op="close")


async def switching(client: EngineClient, alone: dict[str, list[torch.Tensor]]) -> None:
    """Check that a chunk uses its requested adapters from its first step, including for the
    prompt's K/V.

    An empty list removes all adapters.
    """
    switched = await stream(client, "switched", [INK, None, [], None])
    assert equal(switched[:2], alone["ink"][:2])
    same = await stream(client, "same", [INK, None, None, None])
    assert not torch.equal(switched[2], same[2])
    plain = await stream(client, "plain", [None, INK, [], []])
    assert torch.equal(plain[0], alone["base"][0]) and not torch.equal(plain[1], alone["base"][1])
    for name in ("switched", "same", "plain"):
        await client.send(session_id=name, op="close")


async def continuing(client: EngineClient, folder: Path) -> None:
    """Check that forked and restored sessions retain their adapters."""
    await stream(client, "walk", [INK, None])
    await client.send(session_id="walk", op="fork", fork_to="branch")
    path = folder / "walk.safetensors"

    async def send(call: Any) -> Any:
        return await client.engine.collective_rpc(call.method, args=call.args)

    await run_exchange_async(save_exchange("walk", path, package_version()), send)
    await run_exchange_async(restore_exchange("restored", path), send)
    expected = (await client.send(session_id="walk", output="latents"))[1]["latents"].clone()
    for name in ("branch", "restored"):
        assert torch.equal(
            (await client.send(session_id=name, output="latents"))[1]["latents"], expected
        ), name
    await client.engine.remove_lora(1)
    with pytest.raises(
        RequestFailed, match=r"adapter 'ink' \(scale 0.8, weights \w{32}\), not loaded here"
    ) as refusal:
        await run_exchange_async(restore_exchange("late", path), send)
    assert refusal.value.code == "foreign_snapshot"
    for name in ("walk", "branch", "restored"):
        await client.send(session_id=name, op="close")


async def refusals(
    client: EngineClient,
    checkpoint: Path,
    adapters: dict[str, Path],
    folder: Path,
    base: list[torch.Tensor],
) -> None:
    """Check that each invalid adapter is rejected with a one-line error and that the engine
    continues.
    """
    stranger = {
        f"diffusion_model.double_blocks.{n}.img_attn.proj.lora_A.weight": torch.zeros(4, 64)
        for n in range(5)
    }
    save_file(stranger, folder / "flux.safetensors")
    tensors = load_file(adapters["wool"])
    narrow = {
        name: tensor[..., :-1].contiguous() if "lora_down" in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(narrow, folder / "narrow.safetensors")
    files.write_causal_wan(checkpoint, folder / "high.safetensors", 3, rank=9)
    for name, words in {
        "flux": r"modules that this model lacks or keeps as they are: 5 \(.*img_attn.*, .*, .*, "
        r"\.\.\.\)",
        "narrow": r"misshapen: 40 \(.*\(8, 63\) instead of \(8, 64\), .*, .*, \.\.\.\)",
        "high": r"of a rank above --max-lora-rank 8: 40 \(blocks\.0\.cross_attn\.k 9, .*, .*, "
        r"\.\.\.\)",
        "absent": "does not exist",
    }.items():
        with pytest.raises(Exception, match=f"adapter '{name}': .*{words}"):
            await client.engine.add_lora(LoRARequest(name, 7, str(folder / f"{name}.safetensors")))
        with pytest.raises(RequestFailed, match=f"no adapter '{name}'; there are: wool"):
            await client.send(session_id="x", prompt="a field", lora=[Lora(name=name)])
    assert await client.engine.add_lora(LoRARequest("ink", 1, str(adapters["ink"])))
    assert await client.engine.add_lora(LoRARequest("third", 3, str(adapters["ink"])))
    three = [*INK, *WOOL, Lora(name="third")]
    with pytest.raises(RequestFailed, match="3 adapters at once; this server takes --max-loras 2"):
        await client.send(session_id="x", prompt="a field", lora=three)
    assert equal(await stream(client, "after", [None] * CHUNKS), base)
    await client.send(session_id="after", op="close")


async def reload(client: EngineClient, alone: dict[str, list[torch.Tensor]]) -> None:
    """Check that adapters still apply after a reload of the weights."""
    await client.engine.collective_rpc("reload_weights")
    assert equal(await stream(client, "ink-again", [INK] * CHUNKS), alone["ink"])
    assert equal(await stream(client, "base-again", [None] * CHUNKS), alone["base"])


SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "tensor": ({}, {"tensor_parallel_size": 2}),
    "sequence": (
        {"model": {**OPTIONS["model"], "sequence_parallel": True}},
        {"tensor_parallel_size": 2},
    ),
    "stages": ({}, {"pipeline_parallel_size": 2}),
    "a VAE stage": ({"vae_stage": True}, {"pipeline_parallel_size": 2}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("split", SPLITS)
def test_two_ranks_with_adapters_agree_with_one(
    split: str, causal_wan: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Two ranks with adapters agree with one rank, even after every rank has rejected an
    adapter.
    """
    omni, engine_args = SPLITS[split]
    choices: list[list[Lora] | None] = [[*INK, *WOOL], None, []]
    save_file({"blocks.0.nowhere.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "bad.safetensors")

    async def run(omni: dict[str, Any], **engine_args: Any) -> list[torch.Tensor]:
        async with running_engine(
            causal_wan, {**OPTIONS, **omni}, dtype="float32", **LORA, **engine_args
        ) as client:
            with pytest.raises(Exception, match="does not fit this model"):
                await client.engine.add_lora(
                    LoRARequest("bad", 9, str(tmp_path / "bad.safetensors"))
                )
            await add(client, adapters)
            with pytest.raises(RequestFailed, match="no adapter 'bad'"):
                await client.send(session_id="x", prompt="a field", lora=[Lora(name="bad")])
            return await stream(client, "a", choices)

    async def scenario() -> None:
        alone = await run({})
        for got, expected in zip(await run(omni, **engine_args), alone, strict=True):
            torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)

    asyncio.run(scenario())
