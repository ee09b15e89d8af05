# SPDX-License-Identifier: Apache-2.0
"""Tensor-, sequence- and pipeline-parallel runs produce the same results as one rank (fp32, gloo,
two processes).
"""

from pathlib import Path

import pytest
import torch
from abot_driver import (
    latents_of,
    latents_of_stages,
    load_world,
    make_request,
    open_session,
    run_chunk,
)
from helpers.chunks import run_vae_stage
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks

from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext

TOLERANCE = 1e-4
"""Tolerance for five chunks in fp32. Results are not bit-identical, because splitting sums across
ranks changes the order of summation.
"""

CHUNKS = [{"actions": [["w"], ["l"], ["a", "i"]]}, {"actions": [["s", "k"]] * 3}, {}, {}, {}]
OPTIONS = {"positions": "window"}
"""Options that make the positions of reference images change at every chunk."""


@pytest.fixture(scope="module")
def one_rank(layouts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path to a file with the latents of `CHUNKS`, computed on a single rank."""
    file = tmp_path_factory.mktemp("one_rank") / "latents.pt"
    torch.save(latents_of(load_world(layouts["original"], **OPTIONS), CHUNKS), file)
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
    layouts: dict[str, Path], one_rank: Path, sequence_parallel: bool, tmp_path: Path
) -> None:
    """Two ranks produce the same latents as one rank. The first chunk has 26 tokens, of which 20
    come from reference images, so the second rank processes tokens from both reference images and
    frames.
    """
    rendezvous = str(tmp_path / "rendezvous")
    checkpoint = str(layouts["original"])
    run_ranks(_compare, (rendezvous, checkpoint, str(one_rank), sequence_parallel), 2)


@pytest.mark.parametrize("partition", [(2, 2), (1, 3)], ids=str)
def test_two_pipeline_stages_equal_one(
    layouts: dict[str, Path], one_rank: Path, partition: tuple[int, ...]
) -> None:
    """Two pipeline stages generate the same latents as one rank, bit for bit."""
    stages = [
        load_world(
            layouts["original"],
            ParallelContext(stage=n, num_stages=2, partition=partition),
            **OPTIONS,
        )
        for n in range(2)
    ]
    assert torch.equal(latents_of_stages(stages, CHUNKS), torch.load(one_rank))


@pytest.mark.parametrize("decoder", ["wan", "tiny"])
def test_a_decoder_on_its_own_stage_gives_the_same_frames(
    layouts: dict[str, Path], decoder: str
) -> None:
    """A separate VAE stage produces the same frames as one rank, bit for bit, although it stores
    neither reference images nor a K/V window. Its position base follows the other stage's.
    """
    places = (None, ParallelContext(vae_stage=True), ParallelContext(stage=1, vae_stage=True))
    one, layers, vae = (
        load_world(layouts["original"], place, decoder=decoder, **OPTIONS) for place in places
    )
    assert layers.decoder is None
    session, *others = (open_session(world) for world in (one, layers, vae))
    for _ in range(4):
        expected = run_chunk(one, session)
        _, result = run_vae_stage(layers, vae, *(make_request(other) for other in others))
        assert torch.equal(result["frames"], expected)
    assert {other.base for other in (session, *others)} == {session.base}
