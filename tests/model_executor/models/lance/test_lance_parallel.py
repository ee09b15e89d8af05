# SPDX-License-Identifier: Apache-2.0
"""Tensor- and sequence-parallel ranks produce the same results as one rank for a batch that
contains every kind of task (fp32, gloo).
"""

from pathlib import Path

import pytest
import torch
from helpers.chunks import finish, step
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from lance_driver import load_lance, prepare, request_of

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lance.pipeline import Lance

TOLERANCE = 1e-4
"""Tolerance for fp32 latents. Results are not bit-identical, because splitting sums across ranks
changes the order of summation.
"""
TASKS = ("t2i", "image_edit", "t2v", "i2v", "x2t_image")


def results(lance: Lance) -> list[torch.Tensor]:
    """Return the results of one batch that contains generation tokens, context tokens and generated
    text tokens.
    """
    requests = [
        request_of(task, **({} if task == "x2t_image" else {"output": "latents"})) for task in TASKS
    ]
    for request in requests:
        prepare(lance, request)
    while batch := [request for request in requests if request.step < request.num_steps]:
        step(lance, batch)
    return [next(iter(finish(lance, request)[1].values())).clone() for request in requests]


def _compare(
    rank: int, size: int, rendezvous: str, checkpoint: str, sequence_parallel: bool
) -> None:
    with process_group(rank, size, rendezvous) as group:
        expected = results(load_lance(Path(checkpoint)))
        parallel = ParallelContext(rank, size, group, sequence_parallel=sequence_parallel)
        lance = load_lance(Path(checkpoint), parallel)
        found = results(lance)
        for ours, one_rank in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, one_rank, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("sequence_parallel", "size"),
    [
        pytest.param(True, 2, id="sequence-2"),
        pytest.param(True, 4, id="sequence-4", marks=pytest.mark.nightly),
        pytest.param(False, 2, id="tensor-2", marks=pytest.mark.nightly),
    ],
)
def test_ranks_equal_one(
    sequence_parallel: bool, size: int, checkpoint: Path, tmp_path: Path
) -> None:
    """Several ranks produce the same results as one rank, even when four ranks share two key/value
    heads.
    """
    run_ranks(
        _compare,
        (size, str(tmp_path / "rendezvous"), str(checkpoint), sequence_parallel),
        size,
    )


def test_heads_that_do_not_divide_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="do not divide over 3 sequence-parallel ranks"):
        load_lance(checkpoint, ParallelContext(0, 3, sequence_parallel=True))
