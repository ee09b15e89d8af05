# SPDX-License-Identifier: Apache-2.0
"""Tests of Waypoint's streaming autoencoder: decoding in parts, frame sizes, and immutable
caches.
"""

import pytest
import torch
from test_waypoint_parity import GOLDEN

from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.models.waypoint.autoencoders import (
    StreamingTAEHV,
    to_codec,
    to_pixels,
)
from vllm_omni.model_executor.models.waypoint.checkpoint import load_autoencoder


@pytest.fixture(scope="module")
def codec() -> StreamingTAEHV:
    codec = StreamingTAEHV(8, 8, (16, 8, 8, 8), size=(32, 64))
    load_autoencoder(codec, open_tensors(GOLDEN / "taehv_tiny_weights.safetensors"), what="TAEHV")
    return codec


def test_a_stream_of_latents_may_be_split_anywhere(codec: StreamingTAEHV) -> None:
    latents = torch.randn(3, 8, 2, 4, generator=torch.Generator().manual_seed(0))
    whole, end = codec.decode(latents, None)
    first, cache = codec.decode(latents[:1], None)
    retained = [feature.clone() for feature in cache.features]
    rest, other = codec.decode(latents[1:], cache)
    assert whole.shape == (12, 3, 32, 64)
    assert torch.allclose(torch.cat((first, rest)), whole, atol=1e-6)
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(end.features, other.features, strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(retained, cache.features, strict=True))


def test_frames_that_are_no_multiple_of_four_are_refused(codec: StreamingTAEHV) -> None:
    with pytest.raises(ValueError, match="a latent frame is 4 video frames, got 3"):
        codec.encode(torch.zeros(3, 3, 32, 64), None)


def test_resizing_to_the_codec_and_back_keeps_flat_images() -> None:
    frames = torch.full((4, 45, 80, 3), 51, dtype=torch.uint8)
    there = to_codec(frames, (32, 64), torch.float32)
    assert there.shape == (4, 3, 32, 64) and torch.allclose(there, torch.full_like(there, 0.2))
    assert torch.equal(to_pixels(there, (45, 80)), frames)
