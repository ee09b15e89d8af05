# SPDX-License-Identifier: Apache-2.0
"""Tensor-, sequence- and pipeline-parallel runs produce the same results as one rank (fp32, gloo,
two processes). Adapters produce the same results as merged weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from dreamx_driver import latents_of, latents_of_stages, load_world, make_request, open_session
from helpers import lora_files as files
from helpers.adapter_stores import make_store
from helpers.chunks import run_adapted
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks

from vllm_omni.inputs import Lora
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.lora.store import AdapterStore
from vllm_omni.model_executor.models.dreamx_world.pipeline import DreamXWorld

TOLERANCE = 1e-4
"""Tolerance for three chunks in fp32. Results are not bit-identical, because splitting sums across
ranks changes the order of summation.
"""
CHUNKS = [{"actions": [["w"], ["l"], ["a", "i"]]}, {"actions": [["s", "k"]] * 3}, {}]
OPTIONS: dict[str, Any] = {"window_frames": 6, "sink_frames": 3}
INK = [Lora(name="ink")]


@pytest.fixture(scope="module")
def checkpoint(layouts: dict[str, Path]) -> Path:
    return layouts["original"]


@pytest.fixture(scope="module")
def one_rank(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path to a file with the latents of `CHUNKS`, computed on a single rank."""
    file = tmp_path_factory.mktemp("one_rank") / "latents.pt"
    torch.save(latents_of(load_world(checkpoint, **OPTIONS), CHUNKS), file)
    return file


def _compare(
    rank: int, rendezvous: str, checkpoint: str, one_rank: str, sequence_parallel: bool
) -> None:
    with process_group(rank, 2, rendezvous) as group:
        parallel = ParallelContext(rank, 2, group, sequence_parallel=sequence_parallel)
        world = load_world(Path(checkpoint), parallel, **OPTIONS)
        latents = latents_of(world, CHUNKS)
        torch.testing.assert_close(latents, torch.load(one_rank), atol=TOLERANCE, rtol=0)
        assert open_session(world).window.buffer.shape[3] == 2


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_two_ranks_equal_one(
    checkpoint: Path, one_rank: Path, sequence_parallel: bool, tmp_path: Path
) -> None:
    """Two ranks that share 18 tokens and 4 heads produce the same latents as one rank. The split
    between the ranks falls within the second latent frame, and the camera branch sums its norm
    across both ranks. With Ulysses, the camera branch also uses all-to-all.
    """
    arguments = (str(tmp_path / "rendezvous"), str(checkpoint), str(one_rank), sequence_parallel)
    run_ranks(_compare, arguments, 2)


@pytest.mark.parametrize("partition", [(2, 2), (3, 1)], ids=str)
def test_two_pipeline_stages_equal_one(
    checkpoint: Path, one_rank: Path, partition: tuple[int, ...]
) -> None:
    """Two pipeline stages generate the same latents as one rank, bit for bit. The third of the four
    blocks has no camera branch.
    """
    stages = [
        load_world(
            checkpoint, ParallelContext(stage=n, num_stages=2, partition=partition), **OPTIONS
        )
        for n in range(2)
    ]
    assert torch.equal(latents_of_stages(stages, CHUNKS), torch.load(one_rank))


def test_heads_that_do_not_divide_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="does not divide over 3 parallel ranks"):
        load_world(checkpoint, ParallelContext(0, 3))


def every_layer(target: files.AdapterTarget) -> files.Factors:
    return files.factors(target, target.matrices(), seed=1, size=0.1)


def walk(world: DreamXWorld, store: AdapterStore, choices: list[list[Lora]]) -> list[torch.Tensor]:
    """Return the latents of a new session in which chunk i uses the adapters in `choices[i]`."""
    session = open_session(world, output="latents")
    return run_adapted(
        world,
        store,
        choices,
        lambda: make_request(session, output="latents", actions=[["w", "l"]] * 3),
    )


def test_an_adapter_of_every_layer_equals_merged_weights(checkpoint: Path, tmp_path: Path) -> None:
    """An adapter for every layer, including the camera branch, produces the same latents as weights
    with the adapter merged in. The latents of a later session without the adapter are bit-identical
    to the base model's.
    """
    world = load_world(checkpoint)
    target = world.adapter_targets()["transformer"]
    assert any(".cam_self_attn.q_proj" in name for name in target.matrices())
    adapter = files.write_community(every_layer(target), tmp_path / "ink.safetensors")
    store = make_store(world, {"ink": adapter})
    plain = walk(world, store, [[], []])
    got, switched = walk(world, store, [INK, INK]), walk(world, store, [[], INK])
    reference = load_world(checkpoint)
    made = every_layer(reference.adapter_targets()["transformer"])
    files.merge(reference.transformer, files.differences(made, files.ALPHA / files.RANK))
    expected = walk(reference, make_store(reference), [[], []])
    assert not torch.allclose(expected[0], plain[0], atol=0.01)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)
    assert torch.equal(switched[0], plain[0])
    assert not torch.allclose(switched[1], plain[1], atol=0.01)
    for one, other in zip(walk(world, store, [[], []]), plain, strict=True):
        assert torch.equal(one, other)
