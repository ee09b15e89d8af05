# SPDX-License-Identifier: Apache-2.0
"""The fused decoder with its passes in plain torch (fp32, CPU) equals the plain decoder: frames,
caches, cuts, bands.

The passes as kernels: test_stack_kernels.py.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from vae_streams import assert_caches_close, decode_stream, plainly_fused, random_vae

from vllm_omni.model_executor.models.wan.vae.fused_decoder import fused_decoder
from vllm_omni.model_executor.models.wan.vae.stacked_frames import (
    Activation,
    Layout,
    add_up,
    stack_frames,
    subpixel,
    sum_of_taps,
    taps_as_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAECache

TOLERANCE = 1e-5
"""Pixels in [-1, 1], fp32 sums in another order."""
CUTS = [1, 1, 3]


@pytest.fixture(scope="module")
def plain() -> StreamingWanVAE:
    return random_vae()


@pytest.fixture(scope="module")
def fused() -> StreamingWanVAE:
    return random_vae(fuse=plainly_fused)


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn(1, 16, sum(CUTS), 3, 5, generator=torch.Generator().manual_seed(1))


def test_frames_and_cache_equal_the_plain_decoder(
    plain: StreamingWanVAE, fused: StreamingWanVAE, latents: torch.Tensor
) -> None:
    """After a stream's first latent, after its second, and later."""
    for count in (1, 2, 5):
        expected, expected_cache = plain.decode(latents[:, :, :count], None)
        pixels, cache = fused.decode(latents[:, :, :count], None)
        assert expected.std() > 0.1, "frames that differ from place to place"
        torch.testing.assert_close(pixels, expected, atol=TOLERANCE, rtol=0)
        assert_caches_close(cache, expected_cache)
        assert cache.nbytes == fused.decoder_cache_nbytes(24, 40) == expected_cache.nbytes


def test_cuts_change_no_bit(fused: StreamingWanVAE, latents: torch.Tensor) -> None:
    whole, whole_cache = fused.decode(latents, None)
    for cuts in (CUTS, [3, 2], [1] * 5):
        pixels, cache = decode_stream(fused, latents, cuts)
        assert torch.equal(pixels, whole)
        assert cache.equal(whole_cache)


def test_a_stream_moves_between_the_decoders(
    plain: StreamingWanVAE, fused: StreamingWanVAE, latents: torch.Tensor
) -> None:
    """A cache that one of them left is one that the other goes on from: snapshots of either open
    on either.
    """
    expected, expected_cache = plain.decode(latents, None)
    for first, second in ((plain, fused), (fused, plain)):
        frames, cache = first.decode(latents[:, :, :2], None)
        rest, cache = second.decode(latents[:, :, 2:], cache)
        torch.testing.assert_close(
            torch.cat((frames, rest), dim=2), expected, atol=TOLERANCE, rtol=0
        )
        assert_caches_close(cache, expected_cache)


def test_a_call_leaves_its_cache_untouched(fused: StreamingWanVAE, latents: torch.Tensor) -> None:
    _, cache = fused.decode(latents[:, :, :2], None)
    before = cache.clone()
    frames, _ = fused.decode(latents[:, :, 2:], cache)
    assert cache.equal(before)
    assert torch.equal(fused.decode(latents[:, :, 2:], cache)[0], frames)


def test_a_cache_keeps_only_its_features(fused: StreamingWanVAE, latents: torch.Tensor) -> None:
    _, cache = fused.decode(latents, None)
    storages = {
        feature.untyped_storage().data_ptr(): feature.untyped_storage().nbytes()
        for feature in cache.features
    }
    assert sum(storages.values()) == cache.nbytes


def test_streams_together_equal_each_alone(fused: StreamingWanVAE, latents: torch.Tensor) -> None:
    assert fused.takes_streams
    streams = [latents.roll(shift, dims=4) for shift in range(3)]
    caches = [fused.decode(of_one[:, :, :1], None)[1] for of_one in streams]
    pixels, joined = fused.decode(
        torch.cat([of_one[:, :, 1:3] for of_one in streams]), VAECache.joined(caches)
    )
    for index, own in enumerate(joined.of_streams()):
        alone, cache = fused.decode(streams[index][:, :, 1:3], caches[index])
        torch.testing.assert_close(pixels[index : index + 1], alone, atol=TOLERANCE, rtol=0)
        assert_caches_close(own, cache)
        assert sum(feature.untyped_storage().nbytes() for feature in own.features) == own.nbytes


def test_weights_that_are_loaded_later_are_used(latents: torch.Tensor) -> None:
    """What is derived from weights is derived again."""
    changed, fused = random_vae(seed=3), random_vae(fuse=plainly_fused)
    fused.decode(latents[:, :, :1], None)
    fused.load_state_dict(changed.state_dict())
    torch.testing.assert_close(
        fused.decode(latents, None)[0], changed.decode(latents, None)[0], atol=TOLERANCE, rtol=0
    )


def test_a_cpu_keeps_the_plain_decoder() -> None:
    assert fused_decoder(random_vae(dtype=torch.bfloat16).decoder, None) is None


def test_upsampling_before_the_convolution_is_a_smaller_one_after_it() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 3, 5, generator=generator)
    layer = nn.Conv2d(6, 4, 3, padding=1)
    cells = functional.conv2d(x, subpixel(layer.weight), padding=1).permute(0, 2, 3, 1)
    expected = layer(functional.interpolate(x, scale_factor=2.0, mode="nearest-exact"))
    found = add_up(Activation(cells, layer.bias, shuffled=True)).permute(0, 3, 1, 2)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", [Layout.SIDE_BY_SIDE, Layout.IN_TURN])
def test_three_frames_of_channels_make_a_causal_convolution(layout: Layout) -> None:
    """Side by side in its input, or its three taps' results side by side and then added."""
    generator = torch.Generator().manual_seed(0)
    past, x = (torch.randn(2, frames, 4, 5, 6, generator=generator) for frames in (2, 3))
    layer = nn.Conv3d(6, 3, 3, padding=(0, 1, 1))
    stacked = stack_frames(Activation(x.flatten(0, 1)), past, layout=layout)
    frames = stacked.frames.permute(0, 3, 1, 2)
    if layout is Layout.SIDE_BY_SIDE:
        found = functional.conv2d(
            frames, layer.weight.transpose(1, 2).flatten(1, 2), layer.bias, padding=1
        )
        found = found.permute(0, 2, 3, 1).unflatten(0, (2, 3))
    else:
        of_taps = functional.conv2d(frames, taps_as_channels(layer.weight), padding=1).permute(
            0, 2, 3, 1
        )
        found = sum_of_taps(of_taps.unflatten(0, (2, 5)), layer.bias)
    expected = layer(torch.cat((past, x), dim=1).permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(stacked.newest, x[:, -2:])
