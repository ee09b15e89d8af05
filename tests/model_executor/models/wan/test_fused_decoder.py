# SPDX-License-Identifier: Apache-2.0
"""The fused decoder, with its passes in plain torch (fp32, CPU), produces the same results as the
plain decoder: frames, caches, decoding in parts, and bands.

test_stack_kernels.py tests the passes themselves as kernels.
"""

import pytest
import torch
from vae_streams import RELEASES, assert_caches_close, decode_stream, plainly_fused, random_vae

from vllm_omni.model_executor.models.wan.vae.fused_decoder import fused_decoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAECache

TOLERANCE = 1e-5
"""Tolerance for pixels in [-1, 1]. Fusing changes the order of summation in fp32."""
CUTS = [1, 1, 3]


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(release: str) -> StreamingWanVAE:
    return random_vae(release=release)


@pytest.fixture(scope="module")
def fused(release: str) -> StreamingWanVAE:
    return random_vae(release=release, fuse=plainly_fused)


@pytest.fixture(scope="module")
def latents() -> torch.Tensor:
    return torch.randn(1, 16, sum(CUTS), 3, 5, generator=torch.Generator().manual_seed(1))


def test_frames_and_cache_equal_the_plain_decoder(
    plain: StreamingWanVAE, fused: StreamingWanVAE, latents: torch.Tensor
) -> None:
    """Frames and caches equal those of the plain decoder after a stream's first latent frame, after
    its second, and later.
    """
    for count in (1, 2, 5):
        expected, expected_cache = plain.decode(latents[:, :, :count], None)
        pixels, cache = fused.decode(latents[:, :, :count], None)
        assert expected.std() > 0.1, "frames with contrast"
        torch.testing.assert_close(pixels, expected, atol=TOLERANCE, rtol=0)
        assert_caches_close(cache, expected_cache)
        factor = fused.config.spatial_factor
        nbytes = fused.decoder_cache_nbytes(3 * factor, 5 * factor)
        assert cache.nbytes == nbytes == expected_cache.nbytes


def test_images_equal_first_frames(
    plain: StreamingWanVAE, fused: StreamingWanVAE, latents: torch.Tensor
) -> None:
    """A single image equals the first frame of a stream, bit for bit, and images decoded together
    equal those of the plain decoder.
    """
    images = torch.cat((latents[:, :, :1], latents[:, :, 1:2]))
    assert torch.equal(fused.decode_image(images[:1]), fused.decode(images[:1], None)[0])
    pixels = fused.decode_image(images)
    expected = torch.cat([plain.decode(image, None)[0] for image in images.split(1)])
    torch.testing.assert_close(pixels, expected, atol=TOLERANCE, rtol=0)


def test_splits_change_no_bit(fused: StreamingWanVAE, latents: torch.Tensor) -> None:
    whole, whole_cache = fused.decode(latents, None)
    for cuts in (CUTS, [3, 2], [1] * 5):
        pixels, cache = decode_stream(fused, latents, cuts)
        assert torch.equal(pixels, whole)
        assert cache.equal(whole_cache)


def test_a_stream_may_change_decoders(
    plain: StreamingWanVAE, fused: StreamingWanVAE, latents: torch.Tensor
) -> None:
    """Each decoder can continue from the other's cache, so a snapshot taken with one decoder can be
    loaded with either.
    """
    expected, expected_cache = plain.decode(latents, None)
    for first, second in ((plain, fused), (fused, plain)):
        frames, cache = first.decode(latents[:, :, :2], None)
        rest, cache = second.decode(latents[:, :, 2:], cache)
        torch.testing.assert_close(
            torch.cat((frames, rest), dim=2), expected, atol=TOLERANCE, rtol=0
        )
        assert_caches_close(cache, expected_cache)


def test_a_call_does_not_change_its_cache(fused: StreamingWanVAE, latents: torch.Tensor) -> None:
    _, cache = fused.decode(latents[:, :, :2], None)
    before = cache.clone()
    frames, _ = fused.decode(latents[:, :, 2:], cache)
    assert cache.equal(before)
    assert torch.equal(fused.decode(latents[:, :, 2:], cache)[0], frames)


def test_a_cache_holds_only_its_features(fused: StreamingWanVAE, latents: torch.Tensor) -> None:
    _, cache = fused.decode(latents, None)
    storages = {
        feature.untyped_storage().data_ptr(): feature.untyped_storage().nbytes()
        for feature in cache.features
    }
    assert sum(storages.values()) == cache.nbytes


def test_streams_together_equal_each_alone(fused: StreamingWanVAE, latents: torch.Tensor) -> None:
    assert fused.takes_streams == (not fused.config.is_residual)
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


def test_weights_that_are_loaded_later_are_used(release: str, latents: torch.Tensor) -> None:
    """Weights loaded later take effect, because values derived from the weights are recomputed."""
    changed = random_vae(seed=3, release=release)
    fused = random_vae(release=release, fuse=plainly_fused)
    fused.decode(latents[:, :, :1], None)
    fused.load_state_dict(changed.state_dict())
    torch.testing.assert_close(
        fused.decode(latents, None)[0], changed.decode(latents, None)[0], atol=TOLERANCE, rtol=0
    )


def test_a_cpu_uses_the_plain_decoder(release: str) -> None:
    vae = random_vae(release=release, dtype=torch.bfloat16)
    assert fused_decoder(vae.decoder, None) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_the_fused_decoder_on_a_gpu_is_as_accurate_as_the_plain_one(
    release: str, latents: torch.Tensor
) -> None:
    """On a GPU, the fused decoder in bf16 is as close to the fp32 result as the plain decoder in
    bf16. Decoding a stream in parts produces the same frames as decoding it at once, bit for bit.
    """
    exact = random_vae(base_dim=32, release=release).decode(latents, None)[0]
    with torch.device("cuda"):
        fused = random_vae(base_dim=32, release=release, dtype=torch.bfloat16)
        plain = random_vae(
            base_dim=32, release=release, dtype=torch.bfloat16, fuse=lambda decoder, bands: None
        )
    assert fused_decoder(fused.decoder, None) is not None
    found, as_before = (vae.decode(latents.cuda(), None)[0].cpu() for vae in (fused, plain))
    error, usual = (
        float((pixels.float() - exact).norm() / exact.norm()) for pixels in (found, as_before)
    )
    assert error < 1.25 * usual, (error, usual)
    whole, cut = fused.decode(latents.cuda(), None), decode_stream(fused, latents.cuda(), CUTS)
    assert torch.equal(whole[0], cut[0])
    assert whole[1].equal(cut[1])
