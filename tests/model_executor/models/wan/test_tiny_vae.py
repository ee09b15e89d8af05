# SPDX-License-Identifier: Apache-2.0
"""Decoding a stream with the tiny decoder produces the same frames as running the decoder's network
on a whole clip with initially empty memories.
"""

from pathlib import Path

import pytest
import torch

from vllm_omni.model_executor.models.wan.vae.taehv import MemoryBlock, TemporalUpsample
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    CHANNELS,
    TinyVAEDecoder,
    load_tiny_vae,
    tiny_vae_channels,
)
from vllm_omni.testing.tiny.wan import write_tiny_vae

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny_vae") / "taew2_1.pth"
    write_tiny_vae(path, 0)
    return path


@pytest.fixture(scope="module")
def vae(weights: Path) -> TinyVAEDecoder:
    decoder = TinyVAEDecoder(tiny_vae_channels(weights))
    load_tiny_vae(decoder, weights)
    return decoder


def whole(vae: TinyVAEDecoder, latents: torch.Tensor) -> torch.Tensor:
    """Run each block on all frames at once. A frame's memory is the preceding frame, or zeros for
    the first frame.
    """
    x = latents[0].transpose(0, 1)
    for layer in vae.decoder:
        if isinstance(layer, MemoryBlock):
            past = torch.cat((torch.zeros_like(x[:1]), x[:-1]))
            x = torch.relu(layer.conv(torch.cat((x, past), dim=1)) + x)
        else:
            x = layer(x)
    return (x[3:] * 2 - 1).clamp(-1, 1).transpose(0, 1)[None]


@pytest.mark.parametrize("cut", [[7], [3, 3, 1], [1, 1, 5], [2, 4, 1]])
def test_a_stream_split_anywhere_equals_the_whole_clip(vae: TinyVAEDecoder, cut: list[int]) -> None:
    latents = torch.randn(1, 16, 7, 4, 6, generator=torch.Generator().manual_seed(1))
    cache, parts = None, []
    for part in latents.split(cut, dim=2):
        pixels, cache = vae.decode(part, cache)
        parts.append(pixels)
        assert cache.nbytes == vae.decoder_cache_nbytes(32, 48)
    streamed = torch.cat(parts, dim=2)
    assert streamed.shape == (1, 3, 25, 32, 48) and streamed.std() > 0.05
    torch.testing.assert_close(streamed, whole(vae, latents), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "factor"), [(8, 1), (8, 2), (3, 2)])
def test_enlarging_frames_in_the_convolution_equals_enlarging_them_first(
    channels: int, factor: int, layout: torch.memory_format
) -> None:
    """Enlarging frames within the convolution produces the same result as enlarging them before it,
    as the original implementation does. One case has three fp32 channels, which cannot be copied as
    eight-byte words.
    """
    grow = TemporalUpsample(channels, factor)
    x = torch.randn(3, channels, 4, 6).contiguous(memory_format=layout)
    enlarged = torch.nn.functional.interpolate(x, scale_factor=2)
    wanted = grow.conv(enlarged).unflatten(1, (-1, channels)).flatten(0, 1)
    torch.testing.assert_close(grow(x), wanted, atol=1e-6, rtol=0)


def test_a_cache_is_immutable(vae: TinyVAEDecoder) -> None:
    latents = torch.randn(1, 16, 2, 4, 6)
    _, cache = vae.decode(latents, None)
    before = cache.clone()
    first, _ = vae.decode(latents, cache)
    again, _ = vae.decode(latents, cache)
    assert torch.equal(first, again) and cache.equal(before)


def test_released_weights_have_taehvs_names_and_sizes(tmp_path: Path) -> None:
    """`taew2_1.pth` contains 22.6 MB of fp32 weights, including those of an encoder. Only the
    decoder is loaded, and loading is strict.
    """
    decoder = TinyVAEDecoder()
    names = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
    assert names["decoder.3.conv.0.weight"] == (256, 512, 3, 3) and names[
        "decoder.19.conv.weight"
    ] == (128, 64, 1, 1)
    assert names["decoder.13.conv.weight"] == (256, 128, 1, 1) and names["decoder.22.weight"] == (
        3,
        64,
        3,
        3,
    )
    assert tiny_vae_channels(None) == CHANNELS
    stored = {name: torch.zeros(shape) for name, shape in names.items()}
    torch.save({**stored, "encoder.0.weight": torch.zeros(64, 3, 3, 3)}, tmp_path / "taew2_1.pth")
    load_tiny_vae(decoder, tmp_path / "taew2_1.pth")
    del stored["decoder.1.bias"]
    torch.save(stored, tmp_path / "short.pth")
    with pytest.raises(ValueError, match=r"missing: 1 \(decoder\.1\.bias\)"):
        load_tiny_vae(decoder, tmp_path / "short.pth")
    torch.save({"other": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match="is no TAEHV file"):
        tiny_vae_channels(tmp_path / "other.pth")
