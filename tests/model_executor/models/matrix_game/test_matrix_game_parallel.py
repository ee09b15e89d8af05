# SPDX-License-Identifier: Apache-2.0
"""Tensor-, sequence- and pipeline-parallel runs produce the same results as one rank (fp32, gloo,
two processes).
"""

from pathlib import Path
from typing import cast

import pytest
import torch
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from matrix_game_driver import latents_of, latents_of_stages, load_game, open_session

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.layer_moves import LayerMove

TOLERANCE = 1e-4
"""Tolerance for three chunks in fp32. Results are not bit-identical, because splitting sums across
ranks changes the order of summation.
"""

CHUNKS = {
    "original": [{"actions": [["w"], ["l"], ["a", "i"]]}, {"actions": [["s", "k"]] * 3}, {}],
    "original_templerun": [{"actions": [["jump"], [], ["left"]]}, {"actions": [["slide"]] * 3}, {}],
}


@pytest.fixture(scope="module", params=list(CHUNKS))
def checkpoint(request: pytest.FixtureRequest, layouts: dict[str, Path]) -> Path:
    return layouts[request.param]


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path to a file with the latents of `CHUNKS`, computed on a single rank."""
    file = tmp_path_factory.mktemp("one_rank") / "latents.pt"
    torch.save(latents_of(load_game(checkpoint), CHUNKS[checkpoint.name]), file)
    return file


def _compare(
    rank: int, rendezvous: str, checkpoint: str, one_rank: str, sequence_parallel: bool
) -> None:
    with process_group(rank, 2, rendezvous) as group:
        parallel = ParallelContext(rank, 2, group, sequence_parallel=sequence_parallel)
        game = load_game(Path(checkpoint), parallel)
        latents = latents_of(game, CHUNKS[Path(checkpoint).name])
        torch.testing.assert_close(latents, torch.load(one_rank), atol=TOLERANCE, rtol=0)
        windows = open_session(game).window.by_name
        # [L, 2, T, N, H]
        heads = {name.removesuffix("."): window.buffer.shape[3] for name, window in windows.items()}
        assert heads["trunk"] == heads.get("mouse", 2) == 2
        assert heads["keyboard"] == (4 if sequence_parallel else 2)


# A model without mouse input runs a subset of the same code on two ranks, so it is tested only
# nightly.
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
    """Two ranks that share 36 tokens and 4 heads produce the same latents as one rank. With
    Ulysses, the mouse attention also uses all-to-all.
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
    """Two pipeline stages generate the same latents as one rank, bit for bit. Only the first two of
    the four blocks have action modules, so a stage holds none, one or both of these modules.
    """
    stages = [
        load_game(checkpoint, ParallelContext(stage=n, num_stages=2, partition=partition))
        for n in range(2)
    ]
    acting = [len(game.transformer.action_blocks()) for game in stages]
    assert acting == {(2, 2): [2, 0], (1, 3): [1, 1], (3, 1): [2, 0]}[partition]
    assert torch.equal(latents_of_stages(stages, CHUNKS[checkpoint.name]), torch.load(one_rank))


def test_action_modules_are_renumbered_when_layers_move(checkpoint: Path) -> None:
    """When other layers move, a layer that stays on its stage may get a new index in that stage's
    K/V windows.
    """
    game = load_game(checkpoint, ParallelContext(stage=0, num_stages=2, partition=(3, 1)))
    blocks = game.transformer.blocks
    del blocks["0"]
    game.move_layers(cast(LayerMove, _KeepsAll()))
    assert [block.action_index for block in game.transformer.action_blocks()] == [0]
    assert [block.index for block in blocks.values()] == [0, 1]


class _KeepsAll:
    """Simulates a `LayerMove` that moves none of the stage's layers."""

    partition = (3, 1)

    def modules(self, modules: torch.nn.ModuleDict, make: object) -> torch.nn.ModuleDict:
        return modules


def test_action_heads_that_do_not_divide_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="does not divide over 3 parallel ranks"):
        load_game(checkpoint, ParallelContext(0, 3))
