# SPDX-License-Identifier: Apache-2.0
"""Tensor, sequence and pipeline parallel runs give what one rank gives (fp32, gloo, two
processes).
"""

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from helpers.fp8_product import as_on_hopper
from helpers.rank_processes import run_ranks
from lingbot_rollout import CHUNKS, inputs, load_tiny, make_window, roll_out

from vllm_omni.model_executor.layers.collectives.parallel import (
    ParallelContext,
    checkpoint_slots,
    split_evenly,
)
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer
from vllm_omni.tensors.saved import SavedTensors

TOLERANCE = 1e-5
"""Four chunks in fp32; ranks only change the order of sums."""


def _compare(rank: int, rendezvous: str, sequence_parallel: bool, height: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        data = inputs(height)
        expected = roll_out([load_tiny()], data)
        parallel = ParallelContext(rank, 2, dist.group.WORLD, sequence_parallel=sequence_parallel)
        model = load_tiny(parallel)
        assert make_window(model, data).buffer.shape[3] == 1, (
            "each of two ranks keeps one of two heads"
        )
        for ours, one_rank in zip(roll_out([model], data), expected, strict=True):
            torch.testing.assert_close(ours, one_rank, atol=TOLERANCE, rtol=0)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sequence_parallel", "height"),
    [(False, 4), (True, 4), (True, 2)],
    ids=["tensor", "sequence", "sequence of 9 tokens"],
)
def test_two_ranks_equal_one(sequence_parallel: bool, height: int, tmp_path: Path) -> None:
    """18 tokens a chunk, and 9, which do not divide over two ranks."""
    run_ranks(_compare, (str(tmp_path / "rendezvous"), sequence_parallel, height), 2)


class LateWindow(KVWindow):
    """Takes keys, values and queries as they are, as every window did, and rounds them itself."""

    def quantized_ahead(self, frames: range) -> None:
        pass


class CountingWindow(KVWindow):
    quantized_writes = 0

    def write_quantized(self, layer: int, frames: range, quantized_2TNH: torch.Tensor) -> None:
        self.quantized_writes += 1
        super().write_quantized(layer, frames, quantized_2TNH)


class Saved:
    """A window's tensors as a snapshot holds them."""

    def __init__(self, window: KVWindow) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in window.tensors(3).items()}

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        assert tensors.keys() == self.tensors.keys()
        for name, tensor in tensors.items():
            tensor.copy_(self.tensors[name])


def _compare_fp8(rank: int, rendezvous: str, height: int, hopper: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        with as_on_hopper() if hopper else nullcontext():
            data, parallel = (
                inputs(height),
                ParallelContext(rank, 2, dist.group.WORLD, sequence_parallel=True),
            )
            one_model, model = load_tiny(), load_tiny(parallel)

            def window(model: LingBotTransformer, kind: type[KVWindow]) -> KVWindow:
                return make_window(model, data, storage=torch.float8_e4m3fn, kind=kind)

            one_rank = roll_out([one_model], data, [window(one_model, KVWindow)])
            late = roll_out([model], data, [window(model, LateWindow)])
            ahead, middle = window(model, CountingWindow), 2
            started = roll_out([model], data, [ahead], CHUNKS[:middle])
            forked, restored = ahead.fork(), window(model, KVWindow)
            restored.restore(cast(SavedTensors, Saved(ahead)), ahead.committed_frames, 3)
            for goes_on in (ahead, forked, restored):
                flows = [*started, *roll_out([model], data, [goes_on], CHUNKS[middle:])]
                for ours, theirs, one in zip(flows, late, one_rank, strict=True):
                    assert torch.equal(ours, theirs)
                    torch.testing.assert_close(ours, one, atol=TOLERANCE, rtol=0)
            assert isinstance(ahead, CountingWindow)
            assert ahead.quantized_writes == 2 * 2 * 3, (
                "in both layers, both passes over all chunks but the first"
            )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("height", "hopper"), [(4, False), (2, True)], ids=["products in fp32", "products in FP8"]
)
def test_ranks_with_fp8_keys_and_values_equal_one(
    height: int, hopper: bool, tmp_path: Path
) -> None:
    """And, bit for bit, ranks that exchange before they round; also from a fork and a snapshot
    on.
    """
    run_ranks(_compare_fp8, (str(tmp_path / "rendezvous"), height, hopper), 2)


def test_two_pipeline_stages_equal_one() -> None:
    """Stage 0 owns the patch embedding, stage 1 the head; each computes conditions for its own
    blocks. Bit for bit.
    """
    data = inputs()
    stages = [load_tiny(ParallelContext(stage=stage, num_stages=2)) for stage in range(2)]
    for ours, one_stage in zip(roll_out(stages, data), roll_out([load_tiny()], data), strict=True):
        assert torch.equal(ours, one_stage)


def test_stages_split_the_checkpoint_between_them() -> None:
    """Blocks, patch embedding and head are on one stage only; together the stages need every
    tensor.
    """
    first, last = (
        set(checkpoint_slots(load_tiny(ParallelContext(stage=stage, num_stages=2))))
        for stage in range(2)
    )
    assert first | last == set(checkpoint_slots(load_tiny()))
    assert not [
        name for name in first & last if name.startswith(("blocks.", "head.", "patch_embedding."))
    ]


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
