# SPDX-License-Identifier: Apache-2.0
"""Tensor and sequence parallel streams give what one rank gives, sinks that are renewed included (fp32, gloo)."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from causal_wan_driver import load_model, stream
from rank_processes import run_ranks

from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.causal_wan.tiny import make_tiny

TOLERANCE = 2e-4
"""Seven chunks in fp32; ranks only change the order of sums."""
OPTIONS: dict[str, Any] = {
    "latent_frames_per_chunk": 1,
    "window_frames": 4,
    "sink_frames": 2,
    "sink_refresh_threshold": 0.95,
}


def _compare(rank: int, rendezvous: str, checkpoint: str, sequence_parallel: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        expected = stream(load_model(Path(checkpoint), **OPTIONS), 7)
        parallel = ParallelContext(rank, 2, dist.group.WORLD, sequence_parallel=sequence_parallel)
        model = load_model(Path(checkpoint), parallel, **OPTIONS)
        assert model.transformer.num_cache_heads == 2, "each of two ranks keeps two of four heads"
        for ours, one_rank in zip(stream(model, 7), expected, strict=True):
            torch.testing.assert_close(ours, one_rank, atol=TOLERANCE, rtol=0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_two_ranks_equal_one(sequence_parallel: bool, tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", 0, "original")
    run_ranks(_compare, (str(tmp_path / "rendezvous"), str(tmp_path / "model"), sequence_parallel), 2)


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", 0, "original")
    with pytest.raises(ValueError, match="num_heads = 4 does not divide over 3 parallel ranks"):
        load_model(tmp_path / "model", ParallelContext(0, 3))


def test_graphs_with_collectives_inside_are_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "model", 0, "original")
    with pytest.raises(ValueError, match="cuda_graphs does not go with ranks that share layers"):
        load_model(tmp_path / "model", ParallelContext(0, 2), cuda_graphs=True)
