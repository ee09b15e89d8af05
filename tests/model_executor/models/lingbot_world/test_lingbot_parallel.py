# SPDX-License-Identifier: Apache-2.0
"""Tensor-, sequence- and pipeline-parallel runs produce the same results as one rank (fp32, gloo,
two processes).
"""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers.fp8_product import as_on_hopper
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from lingbot_rollout import inputs, load_tiny, make_window, roll_out

from vllm_omni.model_executor.layers.collectives.parallel import (
    ParallelContext,
    split_evenly,
)

FP8 = torch.float8_e4m3fn
TOLERANCE = 1e-5
"""Tolerance for four chunks in fp32. Results are not bit-identical, because splitting sums across
ranks changes the order of summation.
"""


def _compare(
    rank: int,
    rendezvous: str,
    sequence_parallel: bool,
    height: int,
    storage: torch.dtype | None,
    hopper: bool,
) -> None:
    with process_group(rank, 2, rendezvous) as group, as_on_hopper() if hopper else nullcontext():
        data, results = inputs(height), []
        parallel = ParallelContext(rank, 2, group, sequence_parallel=sequence_parallel)
        for model in (load_tiny(), load_tiny(parallel)):
            window = make_window(model, data, storage=storage)
            results.append(roll_out([model], data, [window]))
        assert window.buffer.shape[3] == 1, "each of two ranks has one of two heads"
        for one_rank, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, one_rank, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("sequence_parallel", "height", "storage", "hopper"),
    [
        (False, 4, None, False),
        (True, 4, None, False),
        (True, 2, None, False),
        (True, 4, FP8, False),
        (True, 2, FP8, True),
    ],
    ids=["tensor", "sequence", "sequence of 9 tokens", "FP8 K/V", "FP8 products"],
)
def test_two_ranks_equal_one(
    sequence_parallel: bool,
    height: int,
    storage: torch.dtype | None,
    hopper: bool,
    tmp_path: Path,
) -> None:
    """Two ranks produce the same results as one rank, both for 18 tokens per chunk and for 9
    tokens, which cannot be divided evenly.
    """
    arguments = (str(tmp_path / "rendezvous"), sequence_parallel, height, storage, hopper)
    run_ranks(_compare, arguments, 2)


def test_two_pipeline_stages_equal_one() -> None:
    """Two pipeline stages produce the same results as one rank, bit for bit. Stage 0 has the patch
    embedding, and stage 1 has the head. Each stage computes the conditions for its own blocks.
    """
    data = inputs()
    stages = [load_tiny(ParallelContext(stage=stage, num_stages=2)) for stage in range(2)]
    for ours, one_stage in zip(roll_out(stages, data), roll_out([load_tiny()], data), strict=True):
        assert torch.equal(ours, one_stage)


@pytest.mark.parametrize(
    ("total", "parts", "lengths"), [(7, 2, [4, 3]), (4680, 4, [1170] * 4), (2, 3, [1, 1, 0])]
)
def test_uneven_splits_are_as_even_as_possible(total: int, parts: int, lengths: list[int]) -> None:
    assert split_evenly(total, parts) == lengths


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads = 2 does not divide over 3 parallel ranks"):
        load_tiny(ParallelContext(0, 3))


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers can not be cut into 3 pipeline stages"):
        load_tiny(ParallelContext(stage=0, num_stages=3))
