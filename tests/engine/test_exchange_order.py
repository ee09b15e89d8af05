# SPDX-License-Identifier: Apache-2.0
"""The devices of several ranks cannot deadlock, whatever work runs concurrently on each device.

CUDA may serialise any two CUDA streams on a device. The tests run a real engine on the CPU, where
exchanges are never serialised in this way. They therefore record each rank's exchanges and replay
them on a simulated device with a single queue: an exchange ends when all participants have reached
it, and only then does the next one start.
"""

import asyncio
import json
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from helpers.engine_client import EngineClient, running_engine
from helpers.waits import pause_task
from recording_worker import FOLDER

Exchange = tuple[str, tuple[int, ...], str]
CHUNKS = 12
MATCHED = {
    "cache": "noise_matched",
    "denoising_steps": [1000, 500],
    "video_denoising_steps": [700, 400],
}
ULYSSES = {"sequence_parallel": True}


def stuck(ranks: list[list[Exchange]]) -> dict[int, Exchange]:
    """Return the exchange at which each unfinished rank is stuck."""
    queues = [deque(exchanges) for exchanges in ranks]

    def next_of(rank: int) -> Exchange | None:
        return queues[rank][0] if queues[rank] else None

    def participants(rank: int) -> tuple[int, ...]:
        """Return the participants of the exchange that `rank` has reached, or () if one of them has
        not reached it.
        """
        kind, partners, group = exchange = queues[rank][0]
        if kind == "all":
            return partners if all(next_of(each) == exchange for each in partners) else ()
        (peer,) = partners
        return (
            (rank, peer)
            if next_of(peer) == ("recv" if kind == "send" else "send", (rank,), group)
            else ()
        )

    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue and (present := participants(rank)):
                moved = True
                for each in present:
                    queues[each].popleft()
    return {rank: queue[0] for rank, queue in enumerate(queues) if queue}


def test_deadlocks_are_detected() -> None:
    sends, responses = ("send", (1,), "hidden"), ("recv", (1,), "results")
    last = [("recv", (0,), "hidden"), ("send", (0,), "results")]
    assert stuck([[sends, responses], last]) == {}
    assert stuck([[responses, sends], last]) == {0: responses, 1: last[0]}
    together = ("all", (0, 1), "layers")
    assert stuck([[together, sends], [together, last[0]]]) == {}
    assert stuck([[together, sends], [last[0], together]]) == {0: together, 1: last[0]}


@pytest.mark.parametrize(
    ("family", "omni", "sizes"),
    [
        pytest.param("null_world", {}, {"pipeline_parallel_size": 2}, id="PP 2"),
        *(
            pytest.param(*case, id=name, marks=pytest.mark.nightly)
            for name, case in {
                "PP 3": ("null_world", {}, {"pipeline_parallel_size": 3}),
                "PP 2 + VAE stage": (
                    "null_world",
                    {"vae_stage": True},
                    {"pipeline_parallel_size": 3},
                ),
                "PP 2 x Ulysses 2": (
                    "causal_wan",
                    {"model": ULYSSES},
                    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
                ),
                "Ulysses 2 x VAE stage": (
                    "causal_wan",
                    {"model": ULYSSES, "vae_stage": True, "vae_parallel": True},
                    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
                ),
                "chunks in flight": (
                    "causal_wan",
                    {"model": MATCHED, "chunks_in_flight": 2},
                    {"pipeline_parallel_size": 2},
                ),
                "temporal + VAE stage": (
                    "causal_wan",
                    {
                        "model": MATCHED,
                        "chunks_in_flight": 2,
                        "pipeline": "temporal",
                        "vae_stage": True,
                    },
                    {"pipeline_parallel_size": 3},
                ),
                "temporal x Ulysses 2": (
                    "causal_wan",
                    {
                        "model": MATCHED | ULYSSES,
                        "chunks_in_flight": 2,
                        "pipeline": "temporal",
                        "vae_parallel": True,
                    },
                    {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
                ),
            }.items()
        ),
    ],
)
def test_exchanges_of_all_ranks_cannot_deadlock(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    omni: dict[str, Any],
    sizes: dict[str, int],
) -> None:
    """The exchanges of all ranks complete, both during the warm-up and with three concurrent
    sessions.

    A session's chunks run one at a time or with several in flight, and some chunks are aborted.
    """
    monkeypatch.setenv(FOLDER, str(tmp_path))
    model: Path = request.getfixturevalue(family)

    async def scenario() -> None:
        async with running_engine(
            model, omni, worker_cls="recording_worker.RecordingWorker", **sizes
        ) as client:
            await asyncio.gather(*(session(client, f"s{seed}", seed, omni) for seed in range(3)))
            # returns when every rank has finished its work
            await client.engine.collective_rpc("session_stats")

    asyncio.run(scenario())
    logs = sorted(tmp_path.glob("rank*.jsonl"))
    ranks = [
        [(kind, tuple(partners), group) for kind, partners, group in map(json.loads, log.open())]
        for log in logs
    ]
    assert len(ranks) > 1 and all(len(exchanges) > 20 for exchanges in ranks)
    assert not stuck(ranks)


async def session(client: EngineClient, name: str, seed: int, omni: dict[str, Any]) -> None:
    chunks = (
        client.send(
            session_id=name, chunk_index=index, prompt=f"a field in season {seed}", seed=seed
        )
        for index in range(CHUNKS)
    )
    if omni.get("chunks_in_flight", 1) > 1:
        await asyncio.gather(*chunks)
    else:
        for chunk in chunks:
            await chunk
    aborted = asyncio.create_task(
        client.send(session_id=name, chunk_index=CHUNKS, request_id=f"{name}-aborted")
    )
    await pause_task(0.02 * seed)
    await client.engine.abort(f"{name}-aborted")
    aborted.cancel()
    await client.send(session_id=f"{name}-after", chunk_index=0, prompt="a town", seed=seed)
