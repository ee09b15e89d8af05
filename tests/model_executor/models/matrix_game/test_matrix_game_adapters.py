# SPDX-License-Identifier: Apache-2.0
"""Matrix-Game adapters, including those for its action layers, produce the same results as merged
weights on one rank and on two ranks.
"""

from pathlib import Path

import pytest
import torch
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from helpers.chunks import run_adapted
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from matrix_game_driver import load_game, make_request, open_session

from vllm_omni.inputs import Lora
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.lora.store import AdapterStore
from vllm_omni.model_executor.models.matrix_game.pipeline import MatrixGame

TOLERANCE = 2e-4
"""Tolerance for fp32 latents of magnitude 1 after two chunks. Results are not bit-identical,
because both merging weights and splitting sums across ranks change the order of summation.
"""
KEYS = {"original": [["w"], ["l"], ["a", "i"]], "original_templerun": [["jump"], [], ["left"]]}
INK = [Lora(name="ink")]


@pytest.fixture(scope="module", params=list(KEYS))
def checkpoint(request: pytest.FixtureRequest, layouts: dict[str, Path]) -> Path:
    return layouts[request.param]


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an adapter file that changes every layer."""
    target = load_game(checkpoint).adapter_targets()["transformer"]
    return files.write_community(
        every_layer(target), tmp_path_factory.mktemp("adapter") / "ink.safetensors"
    )


def every_layer(target: files.AdapterTarget) -> files.Factors:
    return files.factors(target, target.matrices(), seed=1, size=0.1)


def walk(
    game: MatrixGame, store: AdapterStore, keys: list[list[str]], choices: list[list[Lora]]
) -> list[torch.Tensor]:
    """Return the latents of a new session in which chunk i uses the adapters in `choices[i]`."""
    session = open_session(game, output="latents")
    return run_adapted(
        game, store, choices, lambda: make_request(session, output="latents", actions=keys)
    )


def test_an_adapter_of_every_layer_equals_merged_weights(checkpoint: Path, adapter: Path) -> None:
    """An adapter for every layer produces the same latents as weights with the adapter merged in.
    When a session switches adapters, the keys and values of its image are recomputed. The latents
    of a later session without the adapter are bit-identical to the base model's.
    """
    keys, game = KEYS[checkpoint.name], load_game(checkpoint)
    store = make_store(game, {"ink": adapter})
    plain = walk(game, store, keys, [[], []])
    got = walk(game, store, keys, [INK, INK])
    switched = walk(game, store, keys, [[], INK])
    reference = load_game(checkpoint)
    made = every_layer(reference.adapter_targets()["transformer"])
    files.merge(reference.transformer, files.differences(made, files.ALPHA / files.RANK))
    expected = walk(reference, make_store(reference), keys, [[], []])
    assert not torch.allclose(expected[0], plain[0], atol=0.01)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)
    assert torch.equal(switched[0], plain[0]) and not torch.allclose(
        switched[1], plain[1], atol=0.01
    )
    for one, other in zip(walk(game, store, keys, [[], []]), plain, strict=True):
        assert torch.equal(one, other)


def adapted(
    checkpoint: Path, adapter: Path, parallel: ParallelContext | None = None
) -> list[torch.Tensor]:
    """Return the latents of two chunks generated with the adapter."""
    game = load_game(checkpoint, parallel or ParallelContext())
    return walk(game, make_store(game, {"ink": adapter}), KEYS[checkpoint.name], [INK, INK])


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("one_rank") / "latents.pt"
    torch.save(adapted(checkpoint, adapter), file)
    return file


def _compare(
    rank: int,
    rendezvous: str,
    checkpoint: str,
    adapter: str,
    one_rank: str,
    sequence_parallel: bool,
) -> None:
    with process_group(rank, 2, rendezvous) as group:
        parallel = ParallelContext(rank, 2, group, sequence_parallel=sequence_parallel)
        latents = adapted(Path(checkpoint), Path(adapter), parallel)
        for one, other in zip(latents, torch.load(one_rank), strict=True):
            torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


# A model without mouse input runs a subset of the same code on two ranks, so it is tested only
# nightly.
ON_TWO_RANKS = pytest.mark.parametrize(
    "checkpoint",
    ["original", pytest.param("original_templerun", marks=pytest.mark.nightly)],
    indirect=True,
)


@ON_TWO_RANKS
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_equal_one(
    sequence_parallel: bool, checkpoint: Path, adapter: Path, one_rank: Path, tmp_path: Path
) -> None:
    """Two ranks that use an adapter produce the same latents as one rank. Keys and values share one
    weight tensor, and each tensor-parallel rank selects its rows from that tensor.
    """
    files_of_ranks = (str(tmp_path / "rendezvous"), str(checkpoint), str(adapter), str(one_rank))
    run_ranks(_compare, (*files_of_ranks, sequence_parallel), 2)


def test_an_unused_gain_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    gain = {"blocks.0.action_model.key_attn_q_norm.diff": torch.ones(8)}
    files.save_file(gain, tmp_path / "gain.safetensors")
    with pytest.raises(
        ValueError,
        match=r"lacks or keeps as they are: 1 \(blocks\.0\.action_model\.key_attn_q_norm",
    ):
        make_store(load_game(checkpoint), {"gain": tmp_path / "gain.safetensors"})
