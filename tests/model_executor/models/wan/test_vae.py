# SPDX-License-Identifier: Apache-2.0
"""The streaming VAE produces the same results as the original implementation. Processing a clip as
a stream produces the same results as processing it at once, bit for bit.

`tests/golden/lingbot/vae*` were recorded on a CPU in float32 from the original Wan VAE with a base
dimension of 4 and random weights.
"""

import json
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from helpers.golden import golden_folder
from safetensors.torch import load_file
from torch._dynamo.exc import TorchDynamoException
from torch.profiler import ProfilerActivity, profile
from vae_streams import decode_stream, encode_stream

from vllm_omni.model_executor.models.wan.vae.vae import (
    StreamingWanVAE,
    VAECache,
    VAEConfig,
    cache_nbytes,
    to_uint8,
)

GOLDEN = golden_folder("lingbot")
TOLERANCE = 1e-5  # for float32 sums, in a different order, of up to 432 products


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "vae.safetensors")


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    names = json.loads((GOLDEN / "vae_key_map.json").read_text())
    stored = load_file(GOLDEN / "vae_tiny_weights_orig_names.safetensors")
    return {names[name]: tensor.float() for name, tensor in stored.items()}


@pytest.fixture(scope="module")
def vae(weights: dict[str, torch.Tensor]) -> StreamingWanVAE:
    vae = StreamingWanVAE(VAEConfig(base_dim=4))
    vae.load_state_dict(weights)
    return vae


@pytest.fixture(scope="module")
def clip(golden: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the image and 32 grey frames."""
    pixels = torch.zeros(1, 3, 33, 16, 24)
    pixels[0, :, 0] = golden["image"]
    return pixels


def test_uint8_frames_round_to_nearest(golden):
    """uint8 frames equal round(255 * clamp(x / 2 + 0.5)), channels last, exactly as recorded."""
    frames = to_uint8(golden["decoded_whole"])
    assert frames.is_contiguous()
    assert torch.equal(frames, golden["decoded_whole_u8_round"][0].permute(1, 2, 3, 0))


@pytest.mark.parametrize("cuts", [[9, 12, 12], [1, 8, 24], [1] + [4] * 8, [33]])
def test_a_streamed_encode_equals_the_whole_clip_bit_for_bit(vae, clip, cuts):
    """Encoding a clip in parts produces the same latents and cache as encoding it at once, bit for
    bit.
    """
    whole, whole_cache = vae.encode(clip, None)
    latents, cache = encode_stream(vae, clip, cuts)
    assert torch.equal(latents, whole)
    assert cache.equal(whole_cache)


@pytest.mark.parametrize("cuts", [[3, 3, 3], [1, 1, 1, 3, 3], [2, 7], [9]])
def test_a_streamed_decode_equals_the_whole_clip_bit_for_bit(vae, golden, cuts):
    """Decoding latents in parts produces the same frames and cache as decoding them at once, bit
    for bit.
    """
    whole, whole_cache = vae.decode(golden["latents"], None)
    pixels, cache = decode_stream(vae, golden["latents"], cuts)
    assert torch.equal(pixels, whole)
    assert cache.equal(whole_cache)


@pytest.mark.parametrize("frames_per_call", [1, 2, 3, 4])
def test_fewer_frames_per_call_give_the_same_frames(vae, weights, golden, frames_per_call):
    """Frames and caches do not depend on how many frames the decoder's largest levels process per
    call.

    The frames are bit-identical if convolutions sum in the same order for any number of frames. On
    a CPU, convolutions over two and over four frames sum in the same order.
    """
    small = StreamingWanVAE(VAEConfig(base_dim=4), encoder=False, frames_per_call=frames_per_call)
    small.load_state_dict(
        {name: value for name, value in weights.items() if name in small.state_dict()}
    )
    whole, whole_cache = vae.decode(golden["latents"], None)
    pixels, cache = decode_stream(small, golden["latents"], [2, 3, 4])
    tolerance = TOLERANCE if frames_per_call % 2 else 0.0
    torch.testing.assert_close(pixels, whole, atol=tolerance, rtol=0)
    for feature, expected in zip(cache.features, whole_cache.features, strict=True):
        # Cached features are activations rather than pixels.
        torch.testing.assert_close(feature, expected, atol=10 * tolerance, rtol=0)


def test_frames_per_call_must_be_positive():
    """A limit of less than one frame per call is rejected."""
    with pytest.raises(ValueError, match="at least 1, got 0"):
        StreamingWanVAE(VAEConfig(base_dim=4), encoder=False, frames_per_call=0)


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak number of additional bytes that torch allocates during `work`, according to
    its profiler.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    kineto = profiled.profiler.kineto_results
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in kineto.events()
        if event.name() == "[memory]"
    )
    return max(accumulate(nbytes for _, nbytes in changes))


def test_memory_of_a_decode_does_not_grow_with_its_latents():
    """A decode call needs memory for its input cache, one more cache, and the intermediate results
    for one latent frame.

    The test uses fp32, because a CPU without bf16 support converts values during the call. The
    measured additional memory is 2.4 times the size of a cache, or 1.6 times that size with only
    one frame per call.
    """
    latents = torch.randn(1, 16, 5, 8, 12, generator=torch.Generator().manual_seed(0))
    peaks = {}
    for frames_per_call in (None, 1):
        vae = StreamingWanVAE(
            VAEConfig(base_dim=16), encoder=False, frames_per_call=frames_per_call
        )
        _, cache = vae.decode(latents[:, :, :1], None)
        peaks[frames_per_call] = (
            peak_bytes(partial(vae.decode, latents[:, :, 1:], cache)) / cache.nbytes
        )
        two_latents = peak_bytes(partial(vae.decode, latents[:, :, 1:3], cache)) / cache.nbytes
        assert peaks[frames_per_call] < two_latents + 0.3
    assert peaks[None] < 2.5
    assert peaks[1] < 2.1
    assert peaks[1] < peaks[None] - 0.2


@pytest.mark.nightly  # compiles
@pytest.mark.parametrize("frames_per_call", [None, 1, 2])
def test_the_cache_of_a_compiled_decoder_holds_only_its_features(frames_per_call):
    """The cache references only its own features, although compiled code returns them as slices of
    larger buffers.
    """
    vae = StreamingWanVAE(
        VAEConfig(base_dim=16), encoder=False, compiled=True, frames_per_call=frames_per_call
    )
    eager = StreamingWanVAE(VAEConfig(base_dim=16), encoder=False)
    eager.load_state_dict(vae.state_dict())
    latents = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    pixels, cache = vae.decode(latents, None)
    storages = {
        feature.untyped_storage().data_ptr(): feature.untyped_storage().nbytes()
        for feature in cache.features
    }
    assert sum(storages.values()) == cache.nbytes
    torch.testing.assert_close(pixels, eager.decode(latents, None)[0], atol=TOLERANCE, rtol=0)


def test_a_call_does_not_change_its_input_cache(vae, golden):
    """A call does not change its input cache, so an aborted chunk can be decoded again with the
    same result.
    """
    _, cache = vae.decode(golden["latents"][:, :, :3], None)
    before = cache.clone()
    first, _ = vae.decode(golden["latents"][:, :, 3:6], cache)
    assert cache.equal(before)
    assert torch.equal(vae.decode(golden["latents"][:, :, 3:6], cache)[0], first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_bytes_are_constant_and_known_in_advance(golden, clip, dtype):
    """A cache has a constant, known size from the first latent frame on, both for encoding and for
    decoding.
    """
    vae = StreamingWanVAE(VAEConfig(base_dim=4), dtype=dtype)
    cache = None
    for latent in golden["latents"].split(1, dim=2):
        _, cache = vae.decode(latent, cache)
        assert cache.nbytes == vae.decoder_cache_nbytes(16, 24)
    cache = None
    for part in clip.split([1] + [4] * 8, dim=2):
        _, cache = vae.encode(part, cache)
        assert cache.nbytes == vae.encoder_cache_nbytes(16, 24)


def test_cache_shapes_equal_the_recorded_ones(vae, golden):
    """After a stream, the cached features of each causal convolution in the decoder have the
    recorded shapes.
    """
    recorded = json.loads((GOLDEN / "vae_dec_cache_shapes.json").read_text())
    _, cache = vae.decode(golden["latents"], None)
    assert [list(feature.shape) for feature in cache.features] == [
        shape for shape in recorded if shape
    ]


def test_the_full_size_decoder_cache_has_1801_mib():
    """At 480x832 in bfloat16, the decoder's cache has the size published for another
    implementation.
    """
    assert round(cache_nbytes(VAEConfig(), "decoder", 480, 832, torch.bfloat16) / 2**20) == 1801


def test_a_batch_of_streams_equals_each_stream_alone(vae, golden):
    """In a batch, each stream has the same pixels and cache as when it runs alone, within float
    tolerance. Streams do not share memory.
    """
    latents = [golden["latents"].roll(shift, dims=4) for shift in range(3)]
    caches = [vae.decode(of_one[:, :, :1], None)[1] for of_one in latents]
    assert vae.takes_streams
    pixels, joined = vae.decode(
        torch.cat([of_one[:, :, 1:4] for of_one in latents]), VAECache.joined(caches)
    )
    for index, own in enumerate(joined.of_streams()):
        alone, cache = vae.decode(latents[index][:, :, 1:4], caches[index])
        assert (pixels[index] - alone[0]).abs().max() <= TOLERANCE
        assert all(
            torch.allclose(a, b, atol=1e-4, rtol=1e-4)
            for a, b in zip(own.features, cache.features, strict=True)
        )
        assert (
            sum(feature.untyped_storage().nbytes() for feature in own.features)
            == own.nbytes
            == cache.nbytes
        )


def test_a_cache_round_trips_through_named_tensors(vae, golden):
    """A stream continued from a cache that was rebuilt from `tensors()` is the same as a stream
    continued from the original cache.
    """
    _, cache = vae.decode(golden["latents"][:, :, :3], None)
    rebuilt = VAECache(tuple(tensor.clone() for _, tensor in sorted(cache.tensors().items())))
    for original, copy in zip(
        vae.decode(golden["latents"][:, :, 3:6], cache),
        vae.decode(golden["latents"][:, :, 3:6], rebuilt),
        strict=True,
    ):
        assert original.equal(copy)


def test_encoder_and_decoder_can_be_built_alone(weights, clip, golden):
    """The encoder or the decoder can be built alone, for example on a pipeline stage that decodes
    no frames. The VAE then has only that half's parameters.
    """
    encoder = StreamingWanVAE(VAEConfig(base_dim=4), decoder=False)
    decoder = StreamingWanVAE(VAEConfig(base_dim=4), encoder=False)
    assert (encoder.has_encoder, encoder.has_decoder) == (True, False)
    assert (decoder.has_encoder, decoder.has_decoder) == (False, True)
    assert sorted([*encoder.state_dict(), *decoder.state_dict()]) == sorted(weights)


def test_full_size_has_the_published_tensors_and_parameters():
    """The full-size VAE has 194 tensors and 126,892,531 parameters."""
    with torch.device("meta"):
        vae = StreamingWanVAE(VAEConfig())
    assert len(vae.state_dict()) == 194
    assert sum(parameter.numel() for parameter in vae.parameters()) == 126_892_531


@pytest.mark.parametrize(
    ("frames", "started"), [(0, False), (4, False), (8, False), (1, True), (5, True), (0, True)]
)
def test_incomplete_groups_of_frames_are_refused(vae, clip, frames, started):
    """A stream accepts 1 + 4n frames in its first call and 4n frames in later calls."""
    cache = vae.encode(clip[:, :, :1], None)[1] if started else None
    with pytest.raises(ValueError, match=f"multiple of 4 frames, got {frames}"):
        vae.encode(clip[:, :, :frames], cache)


def test_sizes_that_are_no_multiple_of_eight_are_refused(vae):
    """Height and width must be multiples of 8."""
    with pytest.raises(ValueError, match="multiples of 8, got 16 x 20"):
        vae.encode(torch.zeros(1, 3, 1, 16, 20), None)


def test_a_config_round_trips_through_the_diffusers_keys():
    """Converting a config to a diffusers checkpoint's keys and back produces the same
    architecture.
    """
    config = VAEConfig(base_dim=4)
    assert VAEConfig.from_dict({"_class_name": "AutoencoderKLWan", **config.to_dict()}) == config
    assert VAEConfig.from_dict(dict(AutoencoderKLWan(base_dim=4).config)) == config


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attn_scales": [0.5]}, "attn_scales = \\[0.5\\]"),
        ({"patch_size": 2}, "'in_channels' must be 12 with patch_size 2, got 3"),
        ({"z_dim": 48}, "need z_dim = 48 values, got 16"),
        ({"scale_factor_spatial": 16}, "scale_factor_spatial is 16"),
        ({"tiling": True}, "unknown keys tiling"),
        ({"dim_mult": [1, 2]}, "temporal_downsample needs 1 entries"),
    ],
)
def test_configs_of_other_autoencoders_are_refused(changed, message):
    """Another autoencoder's config is rejected with an error that names the key. Otherwise, a
    different VAE would be built silently.
    """
    with pytest.raises(ValueError, match=message):
        VAEConfig.from_dict({**VAEConfig().to_dict(), **changed})


@pytest.mark.parametrize("frames_per_call", [pytest.param(None, marks=pytest.mark.nightly), 1])
def test_later_latents_are_one_graph_for_each_part(
    monkeypatch: pytest.MonkeyPatch, weights: dict[str, torch.Tensor], frames_per_call: int | None
) -> None:
    """For later latent frames, each part of the decoder is one compiled graph. With `fullgraph`,
    code that cannot be traced raises an error, and the decoder would then run uncompiled.
    """
    plain = StreamingWanVAE(VAEConfig(base_dim=4), encoder=False, frames_per_call=frames_per_call)
    compile_for_real, graphs = torch.compile, []

    def traced(network: Any, **options: Any) -> Any:
        assert options == {"dynamic": False, "fullgraph": True}

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        return compile_for_real(network, backend=backend, **options)

    monkeypatch.setattr(torch, "compile", traced)
    in_graphs = StreamingWanVAE(
        VAEConfig(base_dim=4), encoder=False, compiled=True, frames_per_call=frames_per_call
    )
    decoder = {name: tensor for name, tensor in weights.items() if name in plain.state_dict()}
    for vae in (plain, in_graphs):
        vae.load_state_dict(decoder)
    latents = torch.randn(1, 16, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    expected, _ = decode_stream(plain, latents, [1, 1, 1])
    frames, _ = decode_stream(in_graphs, latents, [1, 1, 1])
    assert torch.equal(frames, expected)
    parts = 1 if frames_per_call is None else 3
    assert len(graphs) <= 2 * parts, (
        "on a CPU a first latent's features lie otherwise than later ones'"
    )


def test_a_decoder_that_cannot_be_compiled_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch,
    weights: dict[str, torch.Tensor],
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = []

    def fails(network: Any, **options: Any) -> Any:
        def compiled(x: torch.Tensor, **rest: Any) -> torch.Tensor:
            attempts.append(x.shape)
            raise TorchDynamoException("the pass manager failed")

        return compiled

    monkeypatch.setattr(torch, "compile", fails)
    vaes = [
        StreamingWanVAE(VAEConfig(base_dim=4), encoder=False, compiled=compiled)
        for compiled in (False, True)
    ]
    decoder = {name: tensor for name, tensor in weights.items() if name in vaes[0].state_dict()}
    latents = torch.randn(1, 16, 6, 2, 3, generator=torch.Generator().manual_seed(0))
    for vae in vaes:
        vae.load_state_dict(decoder)
    (expected, _), (frames, _) = (decode_stream(vae, latents, [3, 3]) for vae in vaes)
    assert torch.equal(frames, expected)
    assert len(attempts) == 2, "one retry"
    assert "runs as it is" in caplog.text
