# SPDX-License-Identifier: Apache-2.0
"""One text encoder serves all ranks of an engine, so every rank with layers starts a chunk with the
same embeddings.

The tests are nightly because each split needs an engine with several ranks.
tests/worker/test_shared_text.py covers the messages between any number of ranks.
"""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine
from text_recording_worker import FOLDER

pytestmark = pytest.mark.nightly

IMAGE = {"image": torch.arange(32 * 48 * 3).reshape(32, 48, 3).to(torch.uint8)}
PROMPTS = {
    "a": ["a field", None, "at night"],
    "b": ["a field", "in the rain", None],
    "c": ["a much longer prompt", None, None],
}
ULYSSES = {"model": {"sequence_parallel": True}}
SPLITS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "one rank": ({}, {}),
    "tensor": ({}, {"tensor_parallel_size": 2}),
    "sequence": (ULYSSES, {"tensor_parallel_size": 2}),
    "stages": ({}, {"pipeline_parallel_size": 2}),
    "stages of ranks": (ULYSSES, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "a VAE stage": ({"vae_stage": True}, {"pipeline_parallel_size": 3}),
}


async def walk(client: EngineClient, session: str) -> list[torch.Tensor]:
    latents = []
    for index, prompt in enumerate(PROMPTS[session]):
        fields: dict[str, Any] = {
            "chunk_index": index,
            "actions": [["w"]] * 3,
            "output": "latents",
            "seed": 1,
        }
        _, tensors = await client.send(
            IMAGE if index == 0 else None, session_id=session, prompt=prompt, **fields
        )
        latents.append(tensors["latents"].clone())
    return latents


def walks(
    model: Path, folder: Path, split: str
) -> tuple[list[list[torch.Tensor]], list[list[Any]], list[int]]:
    """Run three concurrent sessions and return their latents, embeddings and encoder sizes.

    The embeddings are one sorted list of (session, chunk, embeddings) per rank. The encoder sizes
    are one parameter count per rank.
    """
    omni, sizes = SPLITS[split]
    folder.mkdir()
    os.environ[FOLDER] = str(folder)

    async def scenario() -> list[list[torch.Tensor]]:
        worker = {"worker_cls": "text_recording_worker.TextRecordingWorker"}
        async with running_engine(model, omni, dtype="float32", **worker, **sizes) as client:
            return await asyncio.gather(*(walk(client, session) for session in PROMPTS))

    latents = asyncio.run(scenario())
    lines = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(folder.iterdir())
    ]
    return latents, [sorted(rank[1:]) for rank in lines], [rank[0] for rank in lines]


@pytest.fixture(scope="module")
def alone(
    lingbot_world: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[list[torch.Tensor]], list[list[Any]], list[int]]:
    return walks(lingbot_world, tmp_path_factory.mktemp("texts") / "alone", "one rank")


@pytest.mark.parametrize("split", [name for name in SPLITS if name != "one rank"])
def test_every_rank_has_the_text_embeddings_of_the_encoding_rank(
    split: str,
    alone: tuple[list[list[torch.Tensor]], list[list[Any]], list[int]],
    lingbot_world: Path,
    tmp_path: Path,
) -> None:
    """Every rank with layers has the text embeddings of the encoding rank, even when prompts change
    between chunks.

    With pipeline stages, the latents are bit-identical to those of one rank.
    """
    expected, (embeddings,), (encoder,) = alone
    assert len([1 for session, *_ in embeddings if session in PROMPTS]) == 5 and encoder
    latents, ranks, encoders = walks(lingbot_world, tmp_path / "texts", split)
    assert encoders == [encoder, *[0] * (len(encoders) - 1)]
    with_layers = ranks[:-1] if split == "a VAE stage" else ranks
    assert all(rank == embeddings for rank in with_layers)
    for got, one in zip(latents, expected, strict=True):
        for mine, theirs in zip(got, one, strict=True):
            if split in ("stages", "a VAE stage"):
                assert torch.equal(mine, theirs)
            else:
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
