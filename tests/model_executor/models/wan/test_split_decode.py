# SPDX-License-Identifier: Apache-2.0
"""A decode split across ranks into bands of rows produces the same frames as a decode on one rank
(fp32, gloo, one process per rank).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.process_groups import process_group
from helpers.rank_processes import run_ranks
from vae_streams import RELEASES, decode_stream, plainly_fused

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands
from vllm_omni.model_executor.models.wan.vae.vae import (
    StreamingWanVAE,
    VAEConfig,
    cache_nbytes,
    to_uint8,
)
from vllm_omni.outputs import RequestFailed

CONFIG = VAEConfig(base_dim=4)
WAN_2_2 = replace(RELEASES["2.2"], base_dim=4, decoder_base_dim=None)
WIDTH = 6
TOLERANCE = 1e-5
"""Tolerance for pixels in [-1, 1]. The order of summation in kernels depends on the band height,
and the measured difference is 1e-6.
"""
CUTS = [1, 3, 2]


def build(
    bands: RowBands | None = None, config: VAEConfig = CONFIG, **options: Any
) -> StreamingWanVAE:
    vae = StreamingWanVAE(config, encoder=False, bands=bands, **options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in vae.named_parameters():
        scale = 0.6 / parameter[0].numel() ** 0.5 if parameter.dim() > 1 else 0.6
        parameter.data.copy_(
            torch.randn(parameter.shape, generator=generator) * scale + ("gamma" in name)
        )
    return vae


def latents(height: int) -> torch.Tensor:
    return torch.randn(1, 16, sum(CUTS), height, WIDTH, generator=torch.Generator().manual_seed(1))


def check_bands(
    bands: RowBands, heights: list[int], options: dict[str, Any], config: VAEConfig = CONFIG
) -> None:
    """With one decoder, decode streams of several heights in parts, and check the pixels, the cache
    and its size, and the joined frames.
    """
    whole, mine = build(config=config), build(bands, config, **options)
    factor = config.spatial_factor
    assert dict(mine.named_parameters()).keys() == dict(whole.named_parameters()).keys()
    for height in heights:
        expected, expected_cache = decode_stream(whole, latents(height), CUTS)
        pixels, cache = decode_stream(mine, latents(height), CUTS)
        rows = bands.rows(height)
        ours = slice(factor * rows.start, factor * rows.stop)
        assert expected.std() > 0.1, "frames with contrast"
        torch.testing.assert_close(pixels, expected[:, :, :, ours], atol=TOLERANCE, rtol=0)
        assert cache.nbytes == mine.decoder_cache_nbytes(factor * height, factor * WIDTH)
        assert cache.nbytes == cache_nbytes(
            config, "decoder", factor * len(rows), factor * WIDTH, torch.float32
        )
        for feature, of_all in zip(cache.features, expected_cache.features, strict=True):
            start = rows.start * of_all.shape[3] // height
            band = of_all[:, :, :, start : start + feature.shape[3]]
            torch.testing.assert_close(feature, band, atol=1e-4, rtol=1e-4)
        frames = bands.join_frames(to_uint8(pixels))
        if bands.rank:
            assert frames is None
        else:
            assert frames is not None
            assert (frames.int() - to_uint8(expected).int()).abs().max() <= 1


def check_one_piece(bands: RowBands) -> None:
    """Check that decoding a band of a stream in parts produces the same results as decoding it at
    once, bit for bit.
    """
    mine = build(bands)
    whole_clip, cache = mine.decode(latents(5), None)
    parts, last = decode_stream(mine, latents(5), CUTS)
    assert torch.equal(parts, whole_clip) and last.equal(cache)


def check_layout(bands: RowBands) -> None:
    """Check that a channels-last image stays channels-last when the neighbours' rows are added, and
    that these rows are at the right positions.
    """
    rows = torch.arange(4.0) + 10 * bands.rank
    for shape, layout in (
        ((1, 3, 2, 4, 5), torch.channels_last_3d),
        ((2, 3, 4, 5), torch.channels_last),
    ):
        x = rows.view(-1, 1).expand(shape).contiguous(memory_format=layout)
        out = bands.with_neighbours(x)
        assert out.is_contiguous(memory_format=layout)
        above = 10.0 * bands.rank - 7 if bands.rank else 0.0
        below = 10.0 * bands.rank + 10 if bands.rank < bands.size - 1 else 0.0
        expected = torch.cat((torch.tensor([above]), rows, torch.tensor([below])))
        assert torch.equal(out, expected.view(-1, 1).expand(out.shape))


def check_graph(bands: RowBands) -> None:
    """Check that torch.compile includes the exchanges in the graph that it traces for decoding a
    latent frame.
    """
    mine = build(bands)
    x = latents(4)
    _, cache = mine.decode(x[:, :, :1], None)
    part = mine.post_quant_conv(bands.take_band(x[:, :, 1:2]))
    with torch.inference_mode():
        expected = mine.decoder(part, feat_cache=list(cache.features), feat_idx=[0])
        compiled = torch.compile(
            mine.decoder.forward, backend="aot_eager", fullgraph=True, dynamic=False
        )
        torch.testing.assert_close(
            compiled(part, feat_cache=list(cache.features), feat_idx=[0]), expected
        )


def _rank(rank: int, size: int, rendezvous: str, checks: list[tuple[Any, ...]]) -> None:
    with process_group(rank, size, rendezvous) as group:
        for check, *arguments in checks:
            check(RowBands(rank, size, group), *arguments)
        # A rank must not close its connections while another rank still sends.
        dist.barrier()


def run(size: int, rendezvous: Path, *checks: tuple[Any, ...]) -> None:
    run_ranks(_rank, (size, str(rendezvous), list(checks)), size)


@pytest.mark.parametrize(
    ("size", "heights"),
    [
        pytest.param(1, [4], marks=pytest.mark.nightly),
        (2, [4, 5, 4]),
        pytest.param(3, [7, 3], marks=pytest.mark.nightly),
        pytest.param(4, [4, 6], marks=pytest.mark.nightly),
    ],
)
def test_bands_equal_the_whole_decoder(tmp_path: Path, size: int, heights: list[int]) -> None:
    """Bands equal the corresponding rows of frames decoded on one rank, even if the rows cannot be
    divided evenly among the ranks or a rank has only one row.
    """
    run(size, tmp_path / "rendezvous", (check_bands, heights, {}))


def test_bands_support_partial_calls_fused_passes_and_memory_layouts(tmp_path: Path) -> None:
    run(
        2,
        tmp_path / "rendezvous",
        (check_bands, [4], {"frames_per_call": 1}),
        (check_bands, [4, 5], {"fuse": plainly_fused}),
        (check_bands, [5], {}, WAN_2_2),
        (check_bands, [4], {"fuse": plainly_fused}, WAN_2_2),
        (check_one_piece,),
        (check_layout,),
    )


@pytest.mark.nightly
def test_exchanges_do_not_break_the_graph(tmp_path: Path) -> None:
    run(2, tmp_path / "rendezvous", (check_graph,))


def test_every_rank_needs_a_row() -> None:
    """A stream with fewer latent rows than ranks is refused on every rank, even on one without a
    decoder.
    """
    bands: Any = RowBands(1, 4, None)  # type: ignore[arg-type]
    vae = StreamingWanVAE(CONFIG, encoder=False, decoder=False, bands=bands)
    vae.check_height(32)
    with pytest.raises(RequestFailed, match="height must be at least 32, got 24") as failure:
        vae.check_height(24)
    assert failure.value.code == "unsupported_size"
    bands = RowBands(1, 4, None, 16)  # type: ignore[arg-type]
    wan22 = StreamingWanVAE(WAN_2_2, encoder=False, decoder=False, bands=bands)
    wan22.check_height(64)
    with pytest.raises(RequestFailed, match="height must be at least 64, got 48"):
        wan22.check_height(48)


def test_ranks_that_decode() -> None:
    """Either all ranks that share layers decode, or only the first of them. With a VAE stage,
    either all of its ranks or only its first rank decodes.
    """
    group: Any = object()
    for decode_group, decoding in ((None, [True, False]), (group, [True, True])):
        alone = [ParallelContext(rank, 2, group, decode_group=decode_group) for rank in range(2)]
        assert [rank.decodes for rank in alone] == decoding
        assert [rank.shares_decode for rank in alone] == [decode_group is not None] * 2
        for stage in range(2):
            stages = [
                ParallelContext(
                    rank,
                    2,
                    group,
                    stage=stage,
                    num_stages=1,
                    vae_stage=True,
                    decode_group=decode_group,
                )
                for rank in range(2)
            ]
            assert [rank.decodes for rank in stages] == (decoding if stage else [False, False])


def test_vae_parallel_requires_several_ranks_that_share_layers() -> None:
    """`vae_parallel` requires several ranks that share layers."""
    requested = OmniConfig(vae_parallel=True)
    requested.check_ranks(2)
    with pytest.raises(ValueError, match="--tensor-parallel-size 2 or more"):
        requested.check_ranks(1)
