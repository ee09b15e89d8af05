# SPDX-License-Identifier: Apache-2.0
"""Sessions with CUDA graphs are bit-identical to sessions without them.

On a CPU, a simulated "graph" reruns the forward pass with the host-side decisions made during
capture. An incomplete graph key (for example, one without the camera) would therefore change the
latents.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.chunks import finish, step
from helpers.host_capture import hold
from helpers.rank_processes import run_ranks
from lingbot_world_driver import load_world, make_request, open_session, run_chunk

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs
from vllm_omni.model_executor.models.lingbot_world.pipeline import LingBotWorld
from vllm_omni.model_executor.models.lingbot_world.pretrain import LingBotPretrain

CHUNKS = 10
OPTIONS = {"window_frames": 9, "sink_frames": 3}
KV_TYPES = pytest.mark.parametrize(
    "kv_dtype", [None, torch.float8_e4m3fn], ids=["plain K/V", "FP8 K/V"]
)
WALKS = ([["w"], ["w", "j"], ["i"]], [["s"], [], ["l"]])


def walk(world: LingBotWorld, start: int = 0, chunks: int = CHUNKS) -> list[torch.Tensor]:
    """Run and close a new session with a different camera motion in each chunk, and return its
    latents.
    """
    session = open_session(world, output="latents")
    latents = [
        run_chunk(
            world, session, prompt="a beach", output="latents", actions=WALKS[(start + n) % 2]
        )[1]["latents"]
        for n in range(chunks)
    ]
    session.close()
    return latents


def start_chunk(world: LingBotWorld, session: Any, number: int) -> Any:
    """Return the encoded request for a chunk, whose camera motion depends on its `number`."""
    request = make_request(
        world, session, prompt="a beach", output="latents", actions=WALKS[number % 2]
    )
    world.prepare_encode(request)
    return request


def walk_two(
    world: LingBotWorld, *, shares_passes: bool, cancelled: int | None = None
) -> list[torch.Tensor]:
    """Run two sessions with different camera motions, and return their latents.

    Args:
        world: The model.
        shares_passes: Whether the sessions' chunks share their forward passes. If not, the chunks
            take turns step by step.
        cancelled: Number of the first session's chunk that is cancelled once after its first step
            and then started again.
    """
    sessions = [open_session(world, name, output="latents") for name in ("one", "two")]
    latents = []
    for number in range(CHUNKS):
        if number == cancelled:
            step(world, [start_chunk(world, sessions[0], number + 1)])
        chunks = [
            start_chunk(world, session, number + offset) for offset, session in enumerate(sessions)
        ]
        batches = [chunks] if shares_passes else [[chunk] for chunk in chunks]
        while chunks[0].step < chunks[0].num_steps:
            for batch in batches:
                step(world, batch)
        latents += [finish(world, chunk)[1]["latents"] for chunk in chunks]
    return latents


@KV_TYPES
def test_sessions_with_graphs_equal_sessions_without(
    lingbot_world: Path, kv_dtype: torch.dtype | None
) -> None:
    """The second session only replays graphs captured by the first session.

    The expected number of graphs is the number of ring positions (while the ring is filling and
    afterwards) times the number of kinds of passes.
    """
    plain, by_graphs = (load_world(lingbot_world, kv_dtype=kv_dtype, **OPTIONS) for _ in range(2))
    by_graphs.transformer.graphs = ForwardGraphs(capture=hold)
    walks = [walk(plain, start) for start in (0, 1)]
    for start in (0, 1, 0):
        for got, want in zip(walk(by_graphs, start), walks[start], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert len(by_graphs.transformer.graphs) == 4 * 2


def test_batched_sessions_with_graphs_equal_sessions_without(lingbot_world: Path) -> None:
    """When graphs are replayed for a batch, each request uses its own camera and condition."""
    plain, by_graphs = load_world(lingbot_world, **OPTIONS), load_world(lingbot_world, **OPTIONS)
    by_graphs.transformer.graphs = ForwardGraphs(capture=hold)
    wanted = walk_two(plain, shares_passes=True)
    for got, want in zip(walk_two(by_graphs, shares_passes=True), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(by_graphs.transformer.graphs) == 4 * 2 - 2


def test_chunks_that_take_turns_use_their_own_cameras(lingbot_world: Path) -> None:
    """When chunks of two sessions take turns step by step, the graphs' copy of the camera
    modulation changes with each step. A chunk that is cancelled between its steps does not affect
    other chunks, and its session continues with the same graphs.
    """
    plain, by_graphs = load_world(lingbot_world, **OPTIONS), load_world(lingbot_world, **OPTIONS)
    by_graphs.transformer.graphs = ForwardGraphs(capture=hold)
    wanted = walk_two(plain, shares_passes=False, cancelled=CHUNKS // 2)
    found = walk_two(by_graphs, shares_passes=False, cancelled=CHUNKS // 2)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(by_graphs.transformer.graphs) == 2 * 4 * 2


def test_guided_sessions_with_graphs_equal_sessions_without(lingbot_world: Path) -> None:
    """A chunk with guidance has two batch entries, each with its own window."""
    plain, by_graphs = (
        load_world(lingbot_world, kind=LingBotPretrain, **OPTIONS) for _ in range(2)
    )
    by_graphs.transformer.graphs = ForwardGraphs(capture=hold)
    for got, want in zip(walk(by_graphs, chunks=4), walk(plain, chunks=4), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(by_graphs.transformer.graphs) > 0


def _compare_graphs(
    rank: int, rendezvous: str, lingbot_world: str, kv_dtype: torch.dtype | None
) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    parallel = ParallelContext(rank, 2, dist.group.WORLD, sequence_parallel=True)
    try:
        with torch.device("cuda"):
            plain = load_world(Path(lingbot_world), parallel, kv_dtype=kv_dtype, **OPTIONS)
            by_graphs = load_world(
                Path(lingbot_world), parallel, kv_dtype=kv_dtype, **OPTIONS, cuda_graphs=True
            )
        for got, want in zip(walk(by_graphs), walk(plain), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert (
            by_graphs.transformer.graphs is not None and len(by_graphs.transformer.graphs) == 4 * 2
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@KV_TYPES
def test_ranks_with_graphs_equal_ranks_without(
    lingbot_world: Path, tmp_path: Path, kv_dtype: torch.dtype | None
) -> None:
    run_ranks(_compare_graphs, (str(tmp_path / "rendezvous"), str(lingbot_world), kv_dtype), 2)
