# SPDX-License-Identifier: Apache-2.0
"""Streams generated with tensor or sequence parallelism equal the stream of a single rank, even if
sinks are replaced (fp32, gloo).
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from causal_wan_driver import load_model, stream
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext

TOLERANCE = 2e-4
"""Tolerance for seven chunks in fp32. Results are not bit-identical, because splitting sums across
ranks changes the order of summation.
"""
GRAPH_CHUNKS = 14
"""Number of chunks: enough to fill a window of three chunks and then to reach both ring positions
several times.
"""
OPTIONS: dict[str, Any] = {
    "latent_frames_per_chunk": 1,
    "window_frames": 4,
    "sink_frames": 2,
    "sink_refresh_threshold": 0.95,
}


@pytest.fixture(scope="module")
def one_rank(causal_wan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path to a file with the latents of a stream computed on a single rank."""
    file = tmp_path_factory.mktemp("one_rank") / "stream.pt"
    torch.save(stream(load_model(causal_wan, **OPTIONS), 7), file)
    return file


def _compare(
    rank: int, rendezvous: str, causal_wan: str, one_rank: str, sequence_parallel: bool
) -> None:
    with process_group(rank, 2, rendezvous) as group:
        parallel = ParallelContext(rank, 2, group, sequence_parallel=sequence_parallel)
        model = load_model(Path(causal_wan), parallel, **OPTIONS)
        assert model.transformer.num_cache_heads == 2, "each of two ranks has two of four heads"
        for ours, expected in zip(stream(model, 7), torch.load(one_rank), strict=True):
            torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_two_ranks_equal_one(
    sequence_parallel: bool, causal_wan: Path, one_rank: Path, tmp_path: Path
) -> None:
    run_ranks(
        _compare,
        (str(tmp_path / "rendezvous"), str(causal_wan), str(one_rank), sequence_parallel),
        2,
    )


def test_heads_that_do_not_divide_are_refused(causal_wan: Path) -> None:
    with pytest.raises(ValueError, match="num_heads = 4 does not divide over 3 parallel ranks"):
        load_model(causal_wan, ParallelContext(0, 3))


def _compare_graphs(rank: int, rendezvous: str, causal_wan: str, sequence_parallel: bool) -> None:
    """Compare two streams with a stream without graphs: one with graphs on both ranks, and one with
    graphs only on rank 0.
    """
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    options = {"window_frames": 9, "sink_frames": 3}
    parallel = ParallelContext(rank, 2, dist.group.WORLD, sequence_parallel=sequence_parallel)
    try:
        with torch.device("cuda"):
            plain = load_model(Path(causal_wan), parallel, **options)
            by_graphs = load_model(Path(causal_wan), parallel, **options, cuda_graphs=True)
        expected = stream(plain, GRAPH_CHUNKS)
        for model in (by_graphs, by_graphs if rank == 0 else plain):
            for got, want in zip(stream(model, GRAPH_CHUNKS), expected, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=0)
        graphs = by_graphs.transformer.graphs
        assert graphs is not None and len(graphs) == (16 if rank == 0 else 8)
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_ranks_with_graphs_equal_ranks_without(
    sequence_parallel: bool, causal_wan: Path, tmp_path: Path
) -> None:
    """Ranks that use graphs generate the same latents, bit for bit, as ranks that do not. This is
    true even if only one rank uses graphs, because the collectives run between graphs.
    """
    run_ranks(
        _compare_graphs,
        (str(tmp_path / "rendezvous"), str(causal_wan), sequence_parallel),
        2,
    )
