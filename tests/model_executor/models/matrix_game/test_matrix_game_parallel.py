# SPDX-License-Identifier: Apache-2.0
"""Tensor, sequence and pipeline parallel runs give the results of one rank (fp32, gloo, two
processes).
"""

from datetime import timedelta
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist
from helpers.rank_processes import run_ranks
from matrix_game_driver import latents_of, latents_of_stages, load_game, open_session

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, checkpoint_slots
from vllm_omni.model_executor.layers.layer_moves import LayerMove
from vllm_omni.model_executor.models.matrix_game.checkpoint import transformer_shapes
from vllm_omni.testing.tiny.matrix_game import make_tiny

TOLERANCE = 1e-4
"""Three chunks in fp32; ranks only change the order of sums."""

CHUNKS = {
    "original": [{"actions": [["w"], ["l"], ["a", "i"]]}, {"actions": [["s", "k"]] * 3}, {}],
    "original_templerun": [{"actions": [["jump"], [], ["left"]]}, {"actions": [["slide"]] * 3}, {}],
}


@pytest.fixture(scope="module", params=list(CHUNKS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("game") / str(request.param)
    make_tiny(out, 0, request.param)
    return out


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the latents of `CHUNKS`."""
    file = tmp_path_factory.mktemp("one_rank") / "latents.pt"
    torch.save(latents_of(load_game(checkpoint), CHUNKS[checkpoint.name]), file)
    return file


def _compare(
    rank: int, rendezvous: str, checkpoint: str, one_rank: str, sequence_parallel: bool
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    try:
        parallel = ParallelContext(rank, 2, dist.group.WORLD, sequence_parallel=sequence_parallel)
        game = load_game(Path(checkpoint), parallel)
        latents = latents_of(game, CHUNKS[Path(checkpoint).name])
        torch.testing.assert_close(latents, torch.load(one_rank), atol=TOLERANCE, rtol=0)
        windows = open_session(game).window.by_name
        # [L, 2, T, N, H]
        heads = {name.removesuffix("."): window.buffer.shape[3] for name, window in windows.items()}
        assert heads["trunk"] == heads.get("mouse", 2) == 2
        assert heads["keyboard"] == (4 if sequence_parallel else 2)
    finally:
        dist.destroy_process_group()


# Two ranks of a game without a mouse do less of the same: nightly.
ON_TWO_RANKS = pytest.mark.parametrize(
    "checkpoint",
    ["original", pytest.param("original_templerun", marks=pytest.mark.nightly)],
    indirect=True,
)


@ON_TWO_RANKS
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_two_ranks_equal_one(
    checkpoint: Path, one_rank: Path, sequence_parallel: bool, tmp_path: Path
) -> None:
    """36 tokens and 4 heads over two ranks.

    Under Ulysses the mouse's attention trades tokens for heads, too.
    """
    run_ranks(
        _compare,
        (str(tmp_path / "rendezvous"), str(checkpoint), str(one_rank), sequence_parallel),
        2,
    )


@pytest.mark.parametrize("partition", [(2, 2), (1, 3), (3, 1)], ids=str)
def test_two_pipeline_stages_equal_one(
    checkpoint: Path, one_rank: Path, partition: tuple[int, ...]
) -> None:
    """Of the four blocks the first two have action modules: a stage may have none, one or both.

    Bit for bit.
    """
    stages = [
        load_game(checkpoint, ParallelContext(stage=n, num_stages=2, partition=partition))
        for n in range(2)
    ]
    acting = [len(game.transformer.action_blocks()) for game in stages]
    assert acting == {(2, 2): [2, 0], (1, 3): [1, 1], (3, 1): [2, 0]}[partition]
    assert torch.equal(latents_of_stages(stages, CHUNKS[checkpoint.name]), torch.load(one_rank))


def test_stages_split_the_checkpoint_between_them(checkpoint: Path) -> None:
    """Together they need every tensor but the gains that nobody applies."""
    stages = [load_game(checkpoint, ParallelContext(stage=n, num_stages=2)) for n in range(2)]
    first, last = (set(checkpoint_slots(game.transformer)) for game in stages)
    left = set(transformer_shapes(stages[0].config)) - (first | last)
    assert {name.rsplit(".", 2)[1] for name in left} <= {
        f"{a}_attn_{b}_norm" for a in ("key", "img") for b in "qk"
    }
    assert not [
        name for name in first & last if name.startswith(("blocks.", "head.", "patch_embedding."))
    ]


def test_action_modules_are_numbered_anew_when_layers_move(checkpoint: Path) -> None:
    """A layer that stays is at another place of the stage's windows."""
    game = load_game(checkpoint, ParallelContext(stage=0, num_stages=2, partition=(3, 1)))
    blocks = game.transformer.blocks
    del blocks["0"]
    game.move_layers(cast(LayerMove, _KeepsAll()))
    assert [block.action_index for block in game.transformer.action_blocks()] == [0]
    assert [block.index for block in blocks.values()] == [0, 1]


class _KeepsAll:
    """A `LayerMove` after which the stage holds the layers that it has."""

    partition = (3, 1)

    def modules(self, modules: torch.nn.ModuleDict, make: object) -> torch.nn.ModuleDict:
        return modules


def test_action_heads_that_do_not_divide_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="does not divide over 3 parallel ranks"):
        load_game(checkpoint, ParallelContext(0, 3))
