# SPDX-License-Identifier: Apache-2.0
"""The fused encoder, with its passes in plain torch (fp32, CPU), produces the same results as the
plain encoder: latents, caches, and encoding in parts.

test_stack_kernels.py tests the passes themselves as kernels.
"""

import pytest
import torch
from vae_streams import (
    RELEASES,
    assert_caches_close,
    encode_stream,
    plainly_fused_encoder,
    random_vae,
)

from vllm_omni.model_executor.models.wan.vae.fused_encoder import fused_encoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE

TOLERANCE = 1e-4
"""Tolerance for latents of about unit size. Fusing changes the order of summation in fp32."""
CUTS = [1, 4, 8]


def an_encoder(release: str, **options: object) -> StreamingWanVAE:
    return random_vae(release=release, encoder=True, decoder=False, **options)


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def plain(release: str) -> StreamingWanVAE:
    return an_encoder(release)


@pytest.fixture(scope="module")
def fused(release: str) -> StreamingWanVAE:
    return an_encoder(release, fuse_encoder=plainly_fused_encoder)


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randn(1, 3, sum(CUTS), 48, 80, generator=torch.Generator().manual_seed(1)).clamp(
        -1, 1
    )


def test_latents_and_cache_equal_the_plain_encoder(
    plain: StreamingWanVAE, fused: StreamingWanVAE, pixels: torch.Tensor
) -> None:
    """Latents and caches equal those of the plain encoder after a stream's first latent frame,
    after its second, and later.
    """
    for frames in (1, 5, 13):
        expected, expected_cache = plain.encode(pixels[:, :, :frames], None)
        latents, cache = fused.encode(pixels[:, :, :frames], None)
        assert expected.std() > 0.1, "latents with contrast"
        torch.testing.assert_close(latents, expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert_caches_close(cache, expected_cache)
        assert cache.nbytes == fused.encoder_cache_nbytes(48, 80) == expected_cache.nbytes


def test_splits_change_no_bit(fused: StreamingWanVAE, pixels: torch.Tensor) -> None:
    whole, whole_cache = fused.encode(pixels, None)
    for cuts in (CUTS, [5, 8], [1, 4, 4, 4]):
        latents, cache = encode_stream(fused, pixels, cuts)
        assert torch.equal(latents, whole)
        assert cache.equal(whole_cache)


def test_a_stream_may_change_encoders(
    plain: StreamingWanVAE, fused: StreamingWanVAE, pixels: torch.Tensor
) -> None:
    """Each encoder can continue from the other's cache, so a snapshot taken with one encoder can be
    loaded with either.
    """
    expected, expected_cache = plain.encode(pixels, None)
    for first, second in ((plain, fused), (fused, plain)):
        for cut in (1, 5):
            started, cache = first.encode(pixels[:, :, :cut], None)
            rest, cache = second.encode(pixels[:, :, cut:], cache)
            torch.testing.assert_close(
                torch.cat((started, rest), dim=2), expected, atol=TOLERANCE, rtol=TOLERANCE
            )
            assert_caches_close(cache, expected_cache)


def test_a_call_does_not_change_its_cache_and_frames(
    fused: StreamingWanVAE, pixels: torch.Tensor
) -> None:
    given = pixels.clone()
    _, cache = fused.encode(given[:, :, :5], None)
    before = cache.clone()
    latents, _ = fused.encode(given[:, :, 5:], cache)
    assert cache.equal(before)
    assert torch.equal(given, pixels)
    assert torch.equal(fused.encode(given[:, :, 5:], cache)[0], latents)


def test_a_cache_holds_only_its_features(fused: StreamingWanVAE, pixels: torch.Tensor) -> None:
    for frames in (1, 13):
        _, cache = fused.encode(pixels[:, :, :frames], None)
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in cache.features
        }
        assert sum(storages.values()) == cache.nbytes


def test_weights_that_are_loaded_later_are_used(release: str, pixels: torch.Tensor) -> None:
    changed = an_encoder(release, seed=3)
    fused = an_encoder(release, fuse_encoder=plainly_fused_encoder)
    before = fused.encode(pixels[:, :, :1], None)[0]
    fused.load_state_dict(changed.state_dict())
    expected, latents = (vae.encode(pixels[:, :, :5], None)[0] for vae in (changed, fused))
    assert not torch.allclose(before, expected[:, :, :1], atol=1e-2)
    torch.testing.assert_close(latents, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_cpu_uses_the_plain_encoder(release: str) -> None:
    assert fused_encoder(an_encoder(release, dtype=torch.bfloat16).encoder) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_the_fused_encoder_on_a_gpu_is_as_accurate_as_the_plain_one(
    release: str, pixels: torch.Tensor
) -> None:
    exact = an_encoder(release, base_dim=32).encode(pixels, None)[0]
    with torch.device("cuda"):
        fused = an_encoder(release, base_dim=32, dtype=torch.bfloat16)
        plain = an_encoder(
            release, base_dim=32, dtype=torch.bfloat16, fuse_encoder=lambda encoder: None
        )
    assert fused_encoder(fused.encoder) is not None
    found, as_before = (vae.encode(pixels.cuda(), None)[0].cpu() for vae in (fused, plain))
    error, usual = (
        float((latents - exact).norm() / exact.norm()) for latents in (found, as_before)
    )
    assert error < 1.25 * usual, (error, usual)
    whole, cut = fused.encode(pixels.cuda(), None), encode_stream(fused, pixels.cuda(), CUTS)
    assert torch.equal(whole[0], cut[0])
    assert whole[1].equal(cut[1])
