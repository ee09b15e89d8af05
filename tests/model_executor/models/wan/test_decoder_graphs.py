# SPDX-License-Identifier: Apache-2.0
"""A decoder that replays a CUDA graph for each latent frame returns the same frames, bit for bit,
as a decoder without graphs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from vae_streams import RELEASES, decode_stream, plainly_fused, random_vae

from vllm_omni.model_executor.layers.cuda_graphs import Replay
from vllm_omni.model_executor.models.wan.vae.decoder_graphs import DecoderGraphs
from vllm_omni.model_executor.models.wan.vae.fused_decoder import FusedDecoder, fused_decoder
from vllm_omni.model_executor.models.wan.vae.fused_layers import FusedPasses
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.stacked_frames import add_up, stack_frames
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAECache

CUTS = [3, 1, 2, 3]


class HostGraphs:
    """Simulates a decoder's graphs without a GPU: a replay runs the host code again.

    The class counts captures and replays.
    """

    def __init__(self) -> None:
        self.graphs = DecoderGraphs(self.capture)
        self.captures = self.replays = 0

    def decoder(self, decoder: Any, bands: RowBands | None) -> FusedDecoder:
        return FusedDecoder(decoder, bands, FusedPasses(stack_frames, add_up), self.graphs)

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        """Simulate a capture. On a GPU, a capture computes nothing, so writes made during the
        simulated capture are reverted.
        """
        self.captures += 1
        before = [position.clone() for position in self.graphs.buffers]
        output = torch.empty_like(run())
        for position, feature in zip(self.graphs.buffers, before, strict=True):
            position.copy_(feature)

        def replay() -> None:
            self.replays += 1
            output.copy_(run())

        return output, replay


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(release: str) -> StreamingWanVAE:
    return random_vae(release=release, fuse=plainly_fused)


@pytest.fixture
def host() -> HostGraphs:
    return HostGraphs()


def latents(seed: int = 1, height: int = 3) -> torch.Tensor:
    return torch.randn(1, 16, sum(CUTS), height, 5, generator=torch.Generator().manual_seed(seed))


def assert_stream(
    got: tuple[torch.Tensor, VAECache], wanted: tuple[torch.Tensor, VAECache]
) -> None:
    assert torch.equal(got[0], wanted[0]) and got[1].equal(wanted[1])


def test_two_graphs_serve_every_stream(
    plain: StreamingWanVAE, host: HostGraphs, release: str
) -> None:
    """Two graphs are sufficient for all streams: one for first latent frames, captured during the
    first stream, and one for later latent frames.
    """
    graphed = random_vae(release=release, fuse=host.decoder)
    for seed in (1, 2):
        assert_stream(
            decode_stream(graphed, latents(seed), CUTS), decode_stream(plain, latents(seed), CUTS)
        )
    assert host.captures == 2
    eager = 2  # the first frame of each kind
    assert host.replays == 2 * sum(CUTS) + 1 - eager


def test_a_cache_is_not_changed_by_other_decodes(
    plain: StreamingWanVAE, host: HostGraphs, release: str
) -> None:
    """Decoding other streams does not change a stream's cache, and a chunk can be decoded again
    from the same cache.
    """
    graphed = random_vae(release=release, fuse=host.decoder)
    caches: dict[int, Any] = {1: None, 2: None}
    expected: dict[int, Any] = {1: None, 2: None}
    for part in range(3):
        for seed in (1, 2):
            chunk = latents(seed)[:, :, 2 * part : 2 * part + 2]
            frames, cache = graphed.decode(chunk, caches[seed])
            again, same_cache = graphed.decode(chunk, caches[seed])
            wanted, expected[seed] = plain.decode(chunk, expected[seed])
            assert torch.equal(frames, wanted) and torch.equal(again, wanted)
            assert cache.equal(expected[seed]) and same_cache.equal(cache)
            caches[seed] = cache
    assert caches[1].equal(expected[1]), "unchanged by the other stream"


def test_other_sizes_run_eagerly(plain: StreamingWanVAE, host: HostGraphs, release: str) -> None:
    graphed = random_vae(release=release, fuse=host.decoder)
    graphed.decode(latents(), None)
    replays = host.replays
    assert_stream(
        decode_stream(graphed, latents(height=4), CUTS),
        decode_stream(plain, latents(height=4), CUTS),
    )
    assert host.replays == replays
    assert_stream(decode_stream(graphed, latents(2), CUTS), decode_stream(plain, latents(2), CUTS))
    assert host.replays == replays + sum(CUTS)


def test_loaded_weights_are_captured_again(host: HostGraphs) -> None:
    graphed, other = random_vae(fuse=host.decoder), random_vae(7, fuse=plainly_fused)
    graphed.decode(latents(), None)
    graphed.load_state_dict(other.state_dict())
    assert_stream(decode_stream(graphed, latents(), CUTS), decode_stream(other, latents(), CUTS))
    assert host.captures == 4


def test_a_frame_that_cannot_be_captured_runs_once(plain: StreamingWanVAE, release: str) -> None:
    """A frame that cannot be captured runs only once, even if the capture fails on only one rank,
    because each launch exchanges rows with the other ranks.
    """
    launches = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal launches
        launches += 1
        return stack_frames(*args, **options)

    def refuse(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        raise RuntimeError("no capture here")

    graphs, passes = DecoderGraphs(refuse), FusedPasses(counted, add_up)
    graphed = random_vae(
        release=release, fuse=lambda decoder, bands: FusedDecoder(decoder, bands, passes, graphs)
    )
    graphed.decode(latents(), None)
    launches = 0
    assert_stream(
        graphed.decode(latents(2)[:, :, :1], None), plain.decode(latents(2)[:, :, :1], None)
    )
    once = launches
    random_vae(
        release=release, fuse=lambda decoder, bands: FusedDecoder(decoder, bands, passes)
    ).decode(latents(2)[:, :, :1], None)
    assert launches == 2 * once


def _check_heights(rank: int, size: int, rendezvous: str) -> None:
    with process_group(rank, size, rendezvous) as group:
        bands, host = RowBands(rank, size, group), HostGraphs()
        graphed, plain = (
            random_vae(bands=bands, fuse=host.decoder),
            random_vae(bands=bands, fuse=plainly_fused),
        )
        decode_stream(graphed, latents(height=6), CUTS)
        replays = host.replays
        got, wanted = (decode_stream(vae, latents(height=5), CUTS) for vae in (graphed, plain))
        assert_stream(got, wanted)
        assert replays > 0 and host.replays == replays


def test_frames_of_another_height_run_eagerly_on_every_rank(tmp_path: Any) -> None:
    """If no graph was captured for a frame height, frames of that height are decoded eagerly on
    every rank. For example, the first of two ranks has 3 latent rows for heights of both 5 and 6,
    but its graphs exchange the rows for a height of 6.
    """
    run_ranks(_check_heights, (2, str(tmp_path / "rendezvous")), 2)


def _check_on_devices(rank: int, size: int, rendezvous: str, release: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    try:
        assert dist.group.WORLD is not None
        bands = RowBands(rank, size, dist.group.WORLD)
        with torch.device("cuda"):
            vaes = [
                random_vae(
                    base_dim=16,
                    release=release,
                    bands=bands,
                    dtype=torch.bfloat16,
                    fuse=lambda decoder, bands, graphs=graphs: fused_decoder(
                        decoder, bands, cuda_graphs=graphs
                    ),
                )
                for graphs in (False, True)
            ]
        for height in (8, 11, 7, 8):
            for seed in (1, 2):
                x = latents(seed, height).cuda()
                wanted, got = (decode_stream(vae, x, CUTS) for vae in vaes)
                assert_stream(got, wanted)
        fused = vaes[1]._fused
        assert fused is not None and fused.graphs is not None and len(fused.graphs.buffers) > 0
    finally:
        dist.destroy_process_group()


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_bands_on_gpus_equal_plain_launches(tmp_path: Any, release: str) -> None:
    """Bands decoded on GPUs with CUDA graphs equal bands decoded without graphs. NCCL exchanges run
    between the graphs.
    """
    size = min(4, torch.cuda.device_count())
    run_ranks(_check_on_devices, (size, str(tmp_path / "rendezvous"), release), size)
