# SPDX-License-Identifier: Apache-2.0
"""The Wan video autoencoders (2.1 and 2.2) for streams of pixels and latents, with an explicit
feature cache.

The networks are diffusers' `WanEncoder3d` and `WanDecoder3d`. This module manages the feature cache
of their causal convolutions, which diffusers stores in its model and clears in every call. In this
module, a cache is an immutable value: a call takes a cache and returns a new one, so an aborted
chunk leaves the session's cache unchanged.

A latent frame corresponds to 4 video frames, but the first latent frame of a stream corresponds to
a single video frame. Latent frames are processed one at a time, so the results for a stream that is
processed in parts are bit-identical to those for the whole clip in one call. A call needs memory
for one additional cache. In this cache, the features of each latent frame replace those of the
previous latent frame, convolution by convolution.

Shape letters: B streams, C channels, T frames, H height, W width (in pixels:
`VAEConfig.spatial_factor` x latent cells).
"""

import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanCausalConv3d,
    WanDecoder3d,
    WanEncoder3d,
    patchify,
    unpatchify,
)
from torch import nn
from torch._dynamo.exc import TorchDynamoException

from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.last_tap import use_last_taps
from vllm_omni.model_executor.models.wan.vae.fused_decoder import FusedDecoder, fused_decoder
from vllm_omni.model_executor.models.wan.vae.fused_encoder import FusedEncoder, fused_encoder
from vllm_omni.model_executor.models.wan.vae.fused_layers import fused_vae
from vllm_omni.model_executor.models.wan.vae.split_decode import RowBands, split_decoder
from vllm_omni.model_executor.models.wan.vae_layers import (
    cached_convolution,
    stream_upsamplers,
    use_cpu_layers,
)
from vllm_omni.outputs import empty_result
from vllm_omni.tensors.saved import CHANNELS_LAST, SavedTensors

logger = logging.getLogger("vllm." + __name__)

Part = Literal["encoder", "decoder"]
Rounding = Literal["round", "truncate"]
"""Rounding of pixel values to uint8 levels: to the nearest level (`round`), or down
(`truncate`).
"""
Shape = tuple[int, ...]
Network = Callable[..., torch.Tensor]
"""Function with the signature of diffusers' encoder and decoder, (x, feat_cache, feat_idx) -> x.
The function replaces the features in `feat_cache`.
"""
LatentNetwork = Callable[
    [torch.Tensor, list[Any] | None, tuple[Shape, ...]], tuple[torch.Tensor, list[Any]]
]
"""Function that processes one latent frame. It has the arguments of `_step`, except for the
network, and the same results: (x, features, shapes of a stream's features) -> (output, features).
"""
_COMPILE_ATTEMPTS = 2
"""Maximum number of attempts to compile a network for one shape."""


@dataclass(frozen=True)
class CacheLayout:
    """Shapes and dtype of a stream's cache. They do not change between calls."""

    shapes: tuple[Shape, ...]
    """Shape of each feature, in the order of the layers that cache them."""
    dtype: torch.dtype
    """Dtype of the features."""

    @cached_property
    def nbytes(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.itemsize

    def restore(
        self, saved: SavedTensors, device: torch.device | str, num_latents: int = 0
    ) -> "VAECache":
        """Restore a saved cache. `num_latents` has no effect, because the layout does not depend on
        the length of the stream.

        Raises:
            RequestFailed: A tensor is missing or does not match this layout (`invalid_snapshot`).
                The message names the tensor.
        """
        return VAECache(
            tuple(
                saved.take_tensor(f"conv{index:02d}", device, self.dtype, shape)
                for index, shape in enumerate(self.shapes)
            )
        )


@dataclass(frozen=True, eq=False)
class VAECache:
    """Immutable state of a stream between calls: the last input frames of every causal convolution.

    The shapes are the same after every call, so `nbytes` does not change during a stream.
    """

    features: tuple[torch.Tensor, ...]
    """Tensors [1, C, 1 or 2, h, w] in the VAE's dtype. They have the same order as the network's
    convolutions.
    """

    @property
    def nbytes(self) -> int:
        return sum(feature.nbytes for feature in self.features)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, keyed by the names that digests and snapshots use."""
        return {f"conv{index:02d}": feature for index, feature in enumerate(self.features)}

    def clone(self) -> "VAECache":
        """Return a copy in new memory. Copies are rarely needed, because caches are immutable and
        may be shared.
        """
        return VAECache(tuple(feature.clone() for feature in self.features))

    def to(self, device: torch.device | str) -> "VAECache":
        """Move the cache to `device`. Tensors that are already on that device are shared."""
        return VAECache(tuple(feature.to(device) for feature in self.features))

    @classmethod
    def joined(cls, caches: Sequence["VAECache"]) -> "VAECache":
        """Concatenate, in new memory, the caches of streams that are decoded together. The streams
        must have the same frame size.
        """
        return cls(
            tuple(
                torch.cat(features)
                for features in zip(*(each.features for each in caches), strict=True)
            )
        )

    def of_streams(self) -> list["VAECache"]:
        """Split a joined cache into one cache per stream, in new memory."""
        parts = zip(*(feature.split(1) for feature in self.features), strict=True)
        return [VAECache(tuple(part.clone() for part in of_one)) for of_one in parts]

    def equal(self, other: "VAECache") -> bool:
        """Return whether both caches are bitwise equal. Comparing a tensor synchronises the host
        with the device.
        """
        return all(torch.equal(a, b) for a, b in zip(self.features, other.features, strict=True))


class StreamingWanVAE(nn.Module):
    """Encoder and/or decoder of a Wan VAE with an explicit cache. Its parameters have diffusers'
    names.

    In half precision on CUDA with Triton, the encoder and decoder are fused (`FusedEncoder`,
    `FusedDecoder`), with the same weights and caches. `compiled` and `frames_per_call` apply only
    to a decoder that is not fused. Convolutions run channels-last, because their kernels are
    fastest in this layout. On CPUs, convolutions run as 2-D convolutions (`use_cpu_layers`).

    Args:
        config: Architecture of the autoencoder.
        encoder: Whether to build the encoder.
        decoder: Whether to build the decoder.
        dtype: Dtype of weights, activations and caches (float32 or bfloat16). Latents are always
            normalised float32.
        compiled: Whether to compile the decoder with torch.compile. The first latent frame of a
            stream is excluded, because it has separate control flow.
        frames_per_call: How many of a latent frame's 4 video frames pass through the decoder's two
            largest levels at a time. Default: all 4. With a smaller number, the decoder needs less
            memory in addition to the cache, but slightly more time. The number does not affect the
            results.
        bands: Band of rows that this rank decodes if the decode is split over ranks
            (`split_decode`), or None to decode all rows.
        single_images: Whether to give convolutions that are not fused a 2-D path for single images.
        fuse: Function that returns a fused version of a `WanDecoder3d` for `bands`, or None to use
            diffusers' decoder.
        fuse_encoder: Function that returns a fused version of a `WanEncoder3d`, or None to use
            diffusers' encoder.
    """

    latents_mean: torch.Tensor
    latents_std: torch.Tensor

    def __init__(
        self,
        config: VAEConfig,
        *,
        encoder: bool = True,
        decoder: bool = True,
        dtype: torch.dtype = torch.float32,
        compiled: bool = False,
        frames_per_call: int | None = None,
        bands: RowBands | None = None,
        single_images: bool = False,
        fuse: Callable[[Any, RowBands | None], FusedDecoder | None] = fused_decoder,
        fuse_encoder: Callable[[Any], FusedEncoder | None] = fused_encoder,
    ) -> None:
        super().__init__()
        self.config = config
        self.bands = bands
        self.dtype = dtype
        self._compiled = compiled
        common: dict[str, Any] = {
            "dim_mult": list(config.dim_mult),
            "num_res_blocks": config.num_res_blocks,
            "is_residual": config.is_residual,
        }
        if encoder:
            self.encoder = WanEncoder3d(
                in_channels=config.frame_channels,
                dim=config.base_dim,
                z_dim=2 * config.z_dim,
                temperal_downsample=list(config.temporal_downsample),
                **common,
            ).to(dtype)
            self.quant_conv = WanCausalConv3d(2 * config.z_dim, 2 * config.z_dim, 1).to(dtype)
        if decoder:
            self.post_quant_conv = WanCausalConv3d(config.z_dim, config.z_dim, 1).to(dtype)
            self.decoder = WanDecoder3d(
                dim=config.decoder_base_dim or config.base_dim,
                z_dim=config.z_dim,
                temperal_upsample=list(reversed(config.temporal_downsample)),
                out_channels=config.frame_channels,
                **common,
            )
            stream_upsamplers(self.decoder)
            if bands is not None:
                split_decoder(self.decoder, bands)
            self.decoder.to(dtype)
        for name, values in (
            ("latents_mean", config.latents_mean),
            ("latents_std", config.latents_std),
        ):
            buffer = torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1, 1)
            self.register_buffer(name, buffer, persistent=False)
        self.requires_grad_(False)
        self.eval()
        if any(weight.is_cuda for weight in self.parameters()):
            lay_channels_last(self)
        use_cpu_layers(self)
        if single_images:
            use_last_taps(self)
        self._encode_latent: LatentNetwork | None = None
        self._fused_encoder = fuse_encoder(self.encoder) if encoder else None
        if encoder:
            self._encode_latent = self._fused_encoder or partial(_step, self.encoder)
        self._fused: FusedDecoder | None = fuse(self.decoder, bands) if decoder else None
        self._decode_latent: LatentNetwork | None = self._fused
        if decoder and self._fused is None:
            self._decode_latent = _plain_decoder(self.decoder, compiled, frames_per_call)
        weight = next(self.parameters(), None)
        self.fast_paths = () if weight is None else (fused_vae(weight.device, weight.dtype),)
        self.register_load_state_dict_post_hook(lambda vae, _: vae.clear_derived())

    @property
    def has_encoder(self) -> bool:
        return hasattr(self, "encoder")

    @property
    def has_decoder(self) -> bool:
        return hasattr(self, "decoder")

    @property
    def takes_streams(self) -> bool:
        """Return whether several streams are decoded in one call. For Wan 2.1, one call for all
        streams is faster than separate calls if nothing is compiled.

        Streams of Wan 2.2 are decoded separately, because a single latent frame is enough work for
        a GPU (29 TFLOP at 480x832). The frames of a stream then do not depend on the other streams
        in the batch.
        """
        if not self.has_decoder or self.bands is not None or self.config.is_residual:
            return False
        return self._fused is not None or (
            not self._compiled and self.latents_mean.device.type == "cpu"
        )

    def clear_derived(self) -> None:
        """Discard tensors derived from weights. Call this method after loading new weights."""
        for fused in (self._fused, self._fused_encoder):
            if fused is not None:
                fused.clear_derived()

    def encode(
        self, pixels_BCTHW: torch.Tensor, cache: VAECache | None
    ) -> tuple[torch.Tensor, VAECache]:
        """Encode the next frames of a stream as normalised latents.

        Args:
            pixels_BCTHW: Video frames, as for `encode_moments`.
            cache: Result of the previous call, or None if the stream starts with these frames.

        Returns:
            The normalised posterior mean [B, C, n (+1), h, w], float32, and the next cache.
        """
        moments_BCTHW, cache = self.encode_moments(pixels_BCTHW, cache)
        mean = moments_BCTHW[:, : self.config.z_dim].float()
        return (mean - self.latents_mean) / self.latents_std, cache

    @torch.no_grad()
    def encode_moments(
        self, pixels_BCTHW: torch.Tensor, cache: VAECache | None
    ) -> tuple[torch.Tensor, VAECache]:
        """Encode the next frames of a stream.

        Args:
            pixels_BCTHW: Video frames [B, 3, T, H, W] in [-1, 1]. T is 1 + 4n at the start of a
                stream and 4n later. H and W must be multiples of `VAEConfig.spatial_factor`.
            cache: Result of the previous call, or None if the stream starts with these frames.

        Returns:
            Mean and log-variance of the posterior, [B, 2 C, n (+1), h, w], in the VAE's dtype, and
            the next cache.
        """
        first = 1 if cache is None else 0
        group = self.config.temporal_factor
        frames, height, width = pixels_BCTHW.shape[2:]
        if frames < first or (frames - first) % group or frames == 0:
            raise ValueError(
                f"{'a stream starts with 1 +' if first else 'a stream goes on with'} a multiple of "
                f"{group} frames, "
                f"got {frames}"
            )
        if height % self.config.spatial_factor or width % self.config.spatial_factor:
            raise ValueError(
                f"height and width must be multiples of {self.config.spatial_factor}, got {height} "
                f"x {width}"
            )
        shapes = _cache_shapes(self.config, "encoder", height, width)
        assert self._encode_latent is not None, "this VAE was built without an encoder"
        features = None if cache is None else list(cache.features)
        pixels_BCTHW = patchify(pixels_BCTHW.to(self.dtype), self.config.patch)
        moments = []
        for part in pixels_BCTHW.split(
            [first] * first + [group] * ((frames - first) // group), dim=2
        ):
            of_latent, features = self._encode_latent(part, features, shapes)
            moments.append(self.quant_conv(of_latent))
        assert features is not None
        return torch.cat(moments, dim=2), VAECache(tuple(features))

    def decode(
        self, latents_BCTHW: torch.Tensor, cache: VAECache | None
    ) -> tuple[torch.Tensor, VAECache]:
        """Decode the next normalised latents of a stream.

        Args:
            latents_BCTHW: Normalised latents [B, C, n, h, w], in any float dtype, with n >= 1.
                Several streams are decoded in one pass (`VAECache.joined`) if all of them have
                already started and `takes_streams` is true. Complete clips are always decoded in
                one pass.
            cache: Result of the previous call, as for `decode_raw`.

        Returns:
            The pixels and the next cache, as for `decode_raw`.
        """
        raw = latents_BCTHW.float() * self.latents_std + self.latents_mean
        return self.decode_raw(raw.to(self.dtype), cache)

    @torch.no_grad()
    def decode_raw(
        self, latents_BCTHW: torch.Tensor, cache: VAECache | None
    ) -> tuple[torch.Tensor, VAECache]:
        """Decode the next latents of a stream.

        Args:
            latents_BCTHW: Unnormalised latents [B, C, n, h, w], in the VAE's dtype, with n >= 1.
            cache: Result of the previous call, or None if the stream starts with these latents.

        Returns:
            Pixels [B, 3, T, H, W] in [-1, 1], in the VAE's dtype, and the next cache. T is 4n (4n -
            3 at the start of a stream), and H and W are h and w times `VAEConfig.spatial_factor`.
            With `bands`, both the pixels and the cache contain only this rank's rows.
        """
        factor = self.config.spatial_factor
        if self.bands is not None:
            latents_BCTHW = self.bands.take_band(latents_BCTHW)
        shapes = _cache_shapes(
            self.config, "decoder", latents_BCTHW.shape[3] * factor, latents_BCTHW.shape[4] * factor
        )
        assert self._decode_latent is not None, "this VAE was built without a decoder"
        features = None if cache is None else list(cache.features)
        pixels = []
        for part in latents_BCTHW.split(1, dim=2):
            frames, features = self._decode_latent(self.post_quant_conv(part), features, shapes)
            pixels.append(frames)
        assert features is not None, "decode needs at least one latent frame"
        if self._fused is not None:
            features = self._fused.kept(features)
        frames = unpatchify(torch.cat(pixels, dim=2), self.config.patch)
        return frames.clamp_(-1.0, 1.0), VAECache(tuple(features))

    @torch.no_grad()
    def decode_image(self, latents_BCTHW: torch.Tensor) -> torch.Tensor:
        """Decode single images to pixels [B, 3, 1, H, W]. The latents have the same format as for
        `decode`, with n = 1.

        The pixels equal the first frame that `decode` returns for these latents. No feature cache
        is needed, because no latent frame follows.
        """
        raw = (latents_BCTHW.float() * self.latents_std + self.latents_mean).to(self.dtype)
        x_BCTHW = self.post_quant_conv(raw)
        if self._fused is None:
            cells = self.decoder(x_BCTHW, first_chunk=True)
        else:
            cells = self._fused.decode_image(x_BCTHW)
        return unpatchify(cells, self.config.patch).clamp_(-1.0, 1.0)

    def encoder_cache_layout(self, height: int, width: int) -> CacheLayout:
        """Return the layout of the encoder cache for a stream of `height` x `width` pixels, without
        running the encoder.
        """
        return _cache_layout(self.config, "encoder", height, width, self.dtype)

    def encoder_cache_nbytes(self, height: int, width: int) -> int:
        return self.encoder_cache_layout(height, width).nbytes

    def check_height(self, height: int) -> None:
        """Raise `RequestFailed` on all ranks if a stream of this height has fewer latent rows than
        there are ranks that decode bands.
        """
        if self.bands is not None:
            self.bands.rows(height // self.config.spatial_factor)

    def decoder_cache_layout(self, height: int, width: int) -> CacheLayout:
        """Return the layout of this rank's decoder cache for a stream of `height` x `width` pixels,
        without running the decoder.
        """
        if self.bands is not None:
            factor = self.config.spatial_factor
            height = factor * len(self.bands.rows(height // factor))
        return _cache_layout(self.config, "decoder", height, width, self.dtype)

    def decoder_cache_nbytes(self, height: int, width: int) -> int:
        return self.decoder_cache_layout(height, width).nbytes


def cache_nbytes(config: VAEConfig, part: Part, height: int, width: int, dtype: torch.dtype) -> int:
    """Return the exact size in bytes of a `VAECache`, without running or allocating the network."""
    return _cache_layout(config, part, height, width, dtype).nbytes


@lru_cache(maxsize=256)
def _cache_layout(
    config: VAEConfig, part: Part, height: int, width: int, dtype: torch.dtype
) -> CacheLayout:
    return CacheLayout(_cache_shapes(config, part, height, width), dtype)


def to_uint8(pixels_1CTHW: torch.Tensor, rounding: Rounding = "round") -> torch.Tensor:
    """Convert pixels [1, 3, T, H, W] in [-1, 1] to contiguous uint8 frames [T, H, W, 3] on the same
    device.

    The levels are 255 * clamp(x / 2 + 0.5, 0, 1), computed in float32 and rounded to the nearest
    integer or rounded down.
    """
    unit_CTHW = (pixels_1CTHW[0].float() / 2 + 0.5).clamp_(0.0, 1.0)
    levels = unit_CTHW.mul_(255)
    # For `truncate`, the cast to uint8 rounds down.
    levels_THWC = (levels.round_() if rounding == "round" else levels).permute(1, 2, 3, 0)
    if levels_THWC.is_cuda:
        return levels_THWC.to(torch.uint8).contiguous()
    return empty_result(levels_THWC.shape, torch.uint8).copy_(levels_THWC)


def _step(
    network: Network, x_1CTHW: torch.Tensor, features: list[Any] | None, shapes: tuple[Shape, ...]
) -> tuple[torch.Tensor, list[Any]]:
    """Run one latent frame through `network`. Return the output and the features, which are
    replaced in place.

    The caller must hold the only reference to `features`, so that replaced features are freed
    immediately. `features` is None at the start of a stream.
    """
    if features is not None:
        return network(x_1CTHW, feat_cache=features, feat_idx=[0]), features
    first: list[Any] = [None] * len(shapes)
    out_1CTHW = network(x_1CTHW, feat_cache=first, feat_idx=[0])
    return out_1CTHW, [
        _pad_first(feature, shape, x_1CTHW) for feature, shape in zip(first, shapes, strict=True)
    ]


def _plain_decoder(decoder: Any, compiled: bool, frames_per_call: int | None) -> LatentNetwork:
    """Return a function that decodes one latent frame with diffusers' layers. The first latent
    frame of a stream is never compiled, because it has separate control flow.
    """
    later = _later_latents(decoder, compiled, frames_per_call)

    def decode(
        x_1CTHW: torch.Tensor, features: list[Any] | None, shapes: tuple[Shape, ...]
    ) -> tuple[torch.Tensor, list[Any]]:
        network = partial(decoder, first_chunk=True) if features is None else later
        return _step(network, x_1CTHW, features, shapes)

    return decode


def _later_latents(decoder: Any, compiled: bool, frames_per_call: int | None) -> Network:
    """Return a function that decodes a latent frame after the first one. If `frames_per_call` is
    set, the function splits the frames of the last two levels.

    The last two levels of a `WanDecoder3d` process 4 video frames per latent frame. These frames
    can be split anywhere, because each part continues from the features that the previous part
    left.
    """
    if frames_per_call is None:
        forward: Network = decoder.forward
        return _compiled(forward) if compiled else forward
    if frames_per_call < 1:
        raise ValueError(f"frames_per_call must be at least 1, got {frames_per_call}")

    def small_levels(
        x_1CTHW: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]
    ) -> torch.Tensor:
        x_1CTHW = cached_convolution(decoder.conv_in, x_1CTHW, feat_cache, feat_idx)
        for level in (decoder.mid_block, *decoder.up_blocks[:-2]):
            x_1CTHW = level(x_1CTHW, feat_cache=feat_cache, feat_idx=feat_idx)
        return x_1CTHW

    def second_largest_level(
        x_1CTHW: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]
    ) -> torch.Tensor:
        level: Network = decoder.up_blocks[-2]
        return level(x_1CTHW, feat_cache=feat_cache, feat_idx=feat_idx)

    def largest_level(
        x_1CTHW: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]
    ) -> torch.Tensor:
        x_1CTHW = decoder.up_blocks[-1](x_1CTHW, feat_cache=feat_cache, feat_idx=feat_idx)
        x_1CTHW = decoder.nonlinearity(decoder.norm_out(x_1CTHW))
        return cached_convolution(decoder.conv_out, x_1CTHW, feat_cache, feat_idx)

    parts: list[Network] = [small_levels, second_largest_level, largest_level]
    if compiled:
        parts = [_compiled(part) for part in parts]
    small, middle, large = parts
    of_middle, of_large = (
        sum(map(_retains_frames, level.modules())) for level in decoder.up_blocks[-2:]
    )

    def decode_latent(
        x_1CTHW: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]
    ) -> torch.Tensor:
        cut = len(feat_cache) - 1 - of_large
        features = (
            feat_cache[: cut - of_middle],
            feat_cache[cut - of_middle : cut],
            feat_cache[cut:],
        )
        feat_cache.clear()  # so that only the lists in `features` reference the features
        x_1CTHW = small(x_1CTHW, feat_cache=features[0], feat_idx=[0])
        frames = []
        for item in x_1CTHW.split(frames_per_call, dim=2):
            item = middle(item, feat_cache=features[1], feat_idx=[0])
            frames.append(large(item, feat_cache=features[2], feat_idx=[0]))
        feat_cache.extend(itertools.chain(*features))
        return torch.cat(frames, dim=2)

    return decode_latent


def _retains_frames(module: nn.Module) -> bool:
    """Return whether `module` is a convolution over several frames. Such convolutions cache their
    last input frames.
    """
    return isinstance(module, WanCausalConv3d) and module.kernel_size[0] > 1


def lay_channels_last(module: nn.Module) -> None:
    """Store convolution weights channels-last. Activations and caches then have the same layout."""
    for parameter in module.parameters():
        if parameter.dim() in CHANNELS_LAST:
            parameter.data = parameter.data.contiguous(memory_format=CHANNELS_LAST[parameter.dim()])


def _compiled(network: Network) -> Network:
    """Compile a network for one shape at a time, and copy its features to separate memory.

    The copies are needed because compiled code returns some features as views of a convolution's
    input buffer, and the views would keep the buffer alive. If compilation fails, the network runs
    eagerly instead. No part of the network has run at that point, because the network is compiled
    as a single graph.
    """
    compiled: Network = torch.compile(network, dynamic=False, fullgraph=True)
    failures: Counter[torch.Size] = Counter()

    def call(x_1CTHW: torch.Tensor, feat_cache: list[Any], feat_idx: list[int]) -> torch.Tensor:
        run = compiled if failures[x_1CTHW.shape] < _COMPILE_ATTEMPTS else network
        try:
            out_1CTHW = run(x_1CTHW, feat_cache=feat_cache, feat_idx=feat_idx)
        except TorchDynamoException:
            failures[x_1CTHW.shape] += 1
            logger.exception(
                "a part of the VAE's decoder was not compiled for %s: it runs as it is",
                x_1CTHW.shape,
            )
            out_1CTHW = network(x_1CTHW, feat_cache=feat_cache, feat_idx=feat_idx)
        for index, feature in enumerate(feat_cache):
            if feature.untyped_storage().nbytes() > feature.nbytes:
                feat_cache[index] = feature.clone()
        return out_1CTHW

    return call


def _pad_first(feature: Any, shape: Shape, like: torch.Tensor) -> torch.Tensor:
    """Pad a feature of the first latent frame to its final shape. The zero frames added in front
    correspond to the convolution's padding.

    The first latent frame leaves one frame in a feature, and later latent frames leave two.
    Temporal upsamplers skip their convolution for the first latent frame, so their feature is a
    string instead of a tensor. The feature is also converted to its final memory layout, because
    concatenating it in a different layout would transpose the frames of every later call.
    """
    if isinstance(feature, torch.Tensor):
        feature = nn.functional.pad(feature, (0, 0, 0, 0, shape[2] - feature.shape[2], 0))
    else:
        feature = like.new_zeros(len(like), *shape[1:])
    return feature.contiguous(memory_format=torch.channels_last_3d)


@lru_cache(maxsize=256)
def _cache_shapes(config: VAEConfig, part: Part, height: int, width: int) -> tuple[Shape, ...]:
    """Return the shapes of a cache, which are the same after every call. They are determined by
    running two latent frames on the meta device.
    """
    with torch.device("meta"), torch.no_grad():
        vae = StreamingWanVAE(config, encoder=part == "encoder", decoder=part == "decoder")
        network: Any = vae.encoder if part == "encoder" else vae.decoder
        features: list[Any] = [None] * sum(
            isinstance(module, WanCausalConv3d) for module in network.modules()
        )
        if part == "encoder":
            size = (height // config.patch, width // config.patch)
            components = [
                torch.empty(1, config.frame_channels, frames, *size)
                for frames in (1, config.temporal_factor)
            ]
            first = network
        else:
            cells = (height // config.spatial_factor, width // config.spatial_factor)
            components = [torch.empty(1, config.z_dim, 1, *cells) for _ in range(2)]
            first = partial(network, first_chunk=True)
        for run, item in zip((first, network), components, strict=True):
            run(item, feat_cache=features, feat_idx=[0])
    # Convolutions over one frame (the shortcuts) cache nothing. Their unused entries are at the
    # end.
    return tuple(tuple(feature.shape) for feature in features if feature is not None)
