# SPDX-License-Identifier: Apache-2.0
"""Compares Wan 2.2's autoencoder and its tiny decoder with golden files.

All sizes are read from the metadata and shapes of the recorded tensors, so golden files may use any
sizes, chunks and seeds. Tensors that a file lacks are not compared. The tolerances are 1e-5 for the
encoder, 5e-5 for the decoder, one level for uint8 frames and 2e-5 for the tiny decoder. A stream
continued from a snapshot or split differently must equal the uninterrupted stream bit for bit.
Activations inside the networks can exceed 100, where a single fp32 rounding error is larger than
these tolerances. The tolerance for activations is therefore at least 4e-6 of the largest recorded
value.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import patchify, unpatchify
from torch import nn

from vllm_omni.model_executor.checkpoint.loading import load_strict, rename, shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.models.wan.architecture import WAN_2_2_VAE, VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.component_names import VAE_RULES
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.vae.taehv import TAEHV
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    TinyVAEDecoder,
    load_tiny_vae,
    tiny_vae_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAECache, to_uint8
from vllm_omni.testing.parity.comparison import (
    ComparisonReport,
    GoldenScenario,
    read_tensors,
    run_scenarios,
)

_ENCODER, _DECODER, _TINY = 1e-5, 5e-5, 2e-5
_LEVEL = 1.0
"""Tolerance for uint8 frames, in levels."""
_ROUNDING = 4e-6
"""Minimum tolerance for an activation, relative to its largest recorded value. The value
corresponds to 32 fp32 rounding errors.
"""
_VAE_WEIGHTS = "wan22_vae_tiny_weights*.safetensors"
_TINY_WEIGHTS = "taew22_tiny_weights*.safetensors"


def verify(golden_dir: Path) -> ComparisonReport:
    """Run every scenario file in `golden_dir`."""
    return run_scenarios(
        "wan22_vae",
        golden_dir,
        {
            "wan22_vae*.safetensors": run_vae,
            "taew22*.safetensors": run_tiny_vae,
            "wan22_vae*.json": run_names,
        },
        auxiliary=("README*", ".*", _VAE_WEIGHTS, _TINY_WEIGHTS),
    )


def recorded_vae(metadata: dict[str, str]) -> VAEConfig:
    """Build the VAE config from the original implementation's constructor arguments, as stored in
    the metadata of the recorded weights file.

    Raises:
        ValueError: The original's arguments include an unknown argument.
    """
    fields = {
        "dim": "base_dim",
        "dec_dim": "decoder_base_dim",
        "z_dim": "z_dim",
        "dim_mult": "dim_mult",
        "num_res_blocks": "num_res_blocks",
        "temperal_downsample": "temporal_downsample",
    }
    cfg = json.loads(metadata["cfg"])
    if unknown := sorted(set(cfg) - set(fields)):
        raise ValueError(f"the recorded VAE has unknown settings: {', '.join(unknown)}")
    values: dict[str, Any] = {
        fields[key]: tuple(value) if isinstance(value, list) else value
        for key, value in cfg.items()
    }
    for name in ("mean", "std"):
        values[f"latents_{name}"] = tuple(json.loads(metadata[name]))
    return replace(WAN_2_2_VAE, **values)


def load_recorded(directory: Path) -> StreamingWanVAE:
    """Return the VAE whose weights are recorded in a directory.

    Raises:
        ValueError: The directory has no weights, or the weights do not fit the VAE.
    """
    path = _one(directory, _VAE_WEIGHTS)
    vae = StreamingWanVAE(recorded_vae(read_tensors(path)[1]))
    load_vae(vae, path)
    return vae


def load_recorded_tiny(directory: Path) -> TinyVAEDecoder:
    """Return the tiny decoder whose weights are recorded in a directory.

    Raises:
        ValueError: The directory has no weights, or the weights do not fit the decoder.
    """
    path = _one(directory, _TINY_WEIGHTS)
    channels = open_tensors(path).shapes["decoder.1.weight"][1]
    mean, std = (0.0,) * channels, (1.0,) * channels  # the latents remain normalised
    config = replace(WAN_2_2_VAE, z_dim=channels, latents_mean=mean, latents_std=std)
    decoder = TinyVAEDecoder(tiny_vae_channels(path), config)
    load_tiny_vae(decoder, path)
    return decoder


def _one(directory: Path, pattern: str) -> Path:
    found = sorted(directory.glob(pattern))
    if not found:
        raise ValueError(f"{directory} holds no {pattern}")
    return found[0]


# -- the autoencoder -------------------------------------------------------------------------------


def run_vae(scenario: GoldenScenario) -> None:
    """Compare the encoder, the decoder and their caches with the recording, for whole clips and for
    streams.
    """
    vae = load_recorded(scenario.directory)
    for name in [name for name in scenario.tensors if name.startswith("abot_variant.")]:
        scenario.get(name)  # These tensors were recorded only to document another network.
    if "patchify_in" in scenario:
        pixels, cells = scenario.get("patchify_in"), scenario.get("patchify_out")
        patch = vae.config.patch
        scenario.compare("pixels to cells", patchify(pixels, patch), cells, 0.0)
        scenario.compare("cells to pixels", unpatchify(cells, patch), pixels, 0.0)
    _compare_encoder(scenario, vae)
    _compare_decoder(scenario, vae)


def _compare_encoder(scenario: GoldenScenario, vae: StreamingWanVAE) -> None:
    clip = scenario.get("video_u8").permute(3, 0, 1, 2)[None].float() * (2 / 255) - 1
    group = vae.config.temporal_factor
    clip = clip[:, :, : 1 + (clip.shape[2] - 1) // group * group]
    judge = _Judge(scenario, "encoder", _ENCODER)
    whole, _ = vae.encode(clip, None)
    judge("latents", whole, "latents")
    judge("mean", whole * vae.latents_std + vae.latents_mean, "mu")
    alone, _ = vae.encode(clip[:, :, :1], None)
    judge("first frame alone", alone, "latent_first_frame_alone")

    cache, latents = None, []
    encoder: Any = vae.encoder
    watched: dict[str, nn.Module] = {
        "conv_in": encoder.conv_in,
        "attn": encoder.mid_block.attentions[0],
        "head": encoder.conv_out,
    }
    for level, block in enumerate(encoder.down_blocks):
        watched |= {f"down{level}": block, f"down{level}.shortcut": block.avg_shortcut}
    for step, part in enumerate(clip.split([1] + [group] * (clip.shape[2] // group), dim=2)):
        with _results(watched) as results:
            latent, cache = vae.encode(part, cache)
        latents.append(latent)
        for name, (result,) in results.items():
            judge.activation("stages", result, f"enc.step{step}.{name}")
        _compare_cache(judge, cache, f"enc.cache_after{step}")
    scenario.compare("encode streamed = whole", torch.cat(latents, dim=2), whole, 0.0)


def _compare_decoder(scenario: GoldenScenario, vae: StreamingWanVAE) -> None:
    judge = _Judge(scenario, "decoder", _DECODER)
    z = scenario.get("z")
    judge("denormalised", z * vae.latents_std + vae.latents_mean, "z_denorm")
    decoder: Any = vae.decoder
    watched: dict[str, nn.Module] = {
        "conv_in": decoder.conv_in,
        "head": decoder.conv_out,
        "conv2": vae.post_quant_conv,
    }
    for level, block in enumerate(decoder.up_blocks):
        watched |= {f"up{level}": block}
        if block.avg_shortcut is not None:
            watched |= {f"up{level}.shortcut": block.avg_shortcut}
    cache, frames, conv2, cells = None, [], [], []
    for step, latent in enumerate(z.split(1, dim=2)):
        with _results(watched) as results:
            pixels, cache = vae.decode(latent, cache)
        frames.append(pixels)
        conv2 += results.pop("conv2")
        cells += results["head"]
        for name, (result,) in results.items():
            judge.activation("stages", result, f"dec.step{step}.{name}")
        _compare_cache(judge, cache, f"dec.cache_after{step}")
    assert cache is not None
    _compare_cache(judge, cache, "dec.cache_end")
    judge("1x1 convolution", torch.cat(conv2, dim=2), "dec.conv2")

    streamed = torch.cat(frames, dim=2)
    unclamped = unpatchify(torch.cat(cells, dim=2), vae.config.patch)
    chunks = _chunks(scenario, z.shape[2])
    parts = _decode(vae.decode, z, chunks)
    for index, pixels in enumerate(parts):
        judge("frames of chunks", pixels, f"decoded.chunk{index}")
    for name in [name for name in scenario.tensors if name.startswith("decoded_unclamped_first")]:
        judge("frames before the clamp", unclamped[:, :, : int(name[23:])], name)
    for name in [name for name in scenario.tensors if name.startswith("decoded_u8_trunc_first")]:
        levels = to_uint8(streamed, "truncate")[: int(name[22:])]
        scenario.compare_recorded("uint8 frames", levels, name, _LEVEL)
    scenario.compare("decode one by one = chunks", streamed, torch.cat(parts, dim=2), 0.0)
    _compare_continued(scenario, vae.decode, z, streamed)


def _compare_continued(
    scenario: GoldenScenario, decode: Callable[..., Any], z: torch.Tensor, whole: torch.Tensor
) -> None:
    """Check that a stream that continues from a copy of its state is bit-identical to the
    uninterrupted stream. This is checked for the state after each latent frame.
    """
    cache = None
    for index in range(1, z.shape[2]):
        _, cache = decode(z[:, :, index - 1 : index], cache)
        restored = VAECache(tuple(tensor.clone() for tensor in cache.tensors().values()))
        rest, _ = decode(z[:, :, index:], restored)
        scenario.compare("decode from a snapshot", rest, whole[:, :, -rest.shape[2] :], 0.0)


def _compare_cache(judge: "_Judge", cache: VAECache, name: str) -> None:
    recorded = [key for key in judge.scenario.tensors if re.fullmatch(rf"{name}\.\d+", key)]
    if recorded and len(recorded) != len(cache.features):
        raise ValueError(
            f"{name} has {len(recorded)} tensors, the stream holds {len(cache.features)}"
        )
    for key, feature in zip(sorted(recorded), cache.features, strict=bool(recorded)):
        # After a first step, the original's cache contains one frame. This package's cache also
        # contains zeros before this frame.
        frames = judge.scenario.tensors[key].shape[2]
        judge.activation("caches", feature[:, :, -frames:], key)


class _Judge:
    """Compares tensors of one network component with the recorded tensors, if the file contains
    them.
    """

    def __init__(self, scenario: GoldenScenario, part: str, tolerance: float) -> None:
        self.scenario, self._part, self._tolerance = scenario, part, tolerance

    def __call__(self, stage: str, ours: torch.Tensor, name: str) -> None:
        if name in self.scenario:
            self.scenario.compare_recorded(f"{self._part}: {stage}", ours, name, self._tolerance)

    def activation(self, stage: str, ours: torch.Tensor, name: str) -> None:
        """Compare an activation inside the network with the recorded one, using the tolerance for
        activations.
        """
        if name in self.scenario:
            recorded = self.scenario.get(name)
            tolerance = max(self._tolerance, _ROUNDING * float(recorded.abs().max()))
            self.scenario.compare(f"{self._part}: {stage}", ours, recorded, tolerance)


@contextmanager
def _results(modules: dict[str, nn.Module]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Context manager that collects the outputs of the `modules` that are called within it."""
    results: dict[str, list[torch.Tensor]] = {name: [] for name in modules}

    def store(name: str) -> Callable[[nn.Module, Any, torch.Tensor], None]:
        return lambda _module, _inputs, result: results[name].append(result.clone())

    hooks = [module.register_forward_hook(store(name)) for name, module in modules.items()]
    try:
        yield results
    finally:
        for hook in hooks:
            hook.remove()


def _chunks(scenario: GoldenScenario, frames: int) -> list[int]:
    chunks = json.loads(scenario.metadata.get("chunks", "[]")) or [frames]
    if sum(chunks) != frames:
        raise ValueError(f"chunks {chunks} do not add up to {frames} latents")
    return [int(chunk) for chunk in chunks]


def _decode(
    decode: Callable[..., tuple[torch.Tensor, VAECache]], z: torch.Tensor, cuts: Sequence[int]
) -> list[torch.Tensor]:
    cache, parts = None, []
    for part in z.split(list(cuts), dim=2):
        pixels, cache = decode(part, cache)
        parts.append(pixels)
    return parts


# -- the tiny decoder ------------------------------------------------------------------------------


def run_tiny_vae(scenario: GoldenScenario) -> None:
    """Compare the tiny decoder, its memory and the encoder with the recording. The encoder is in
    the same file as the decoder.
    """
    decoder = load_recorded_tiny(scenario.directory)
    judge = _Judge(scenario, "tiny decoder", _TINY)
    z = scenario.get("z").transpose(1, 2)  # recorded as [N, T, C, H, W]
    chunks = _chunks(scenario, z.shape[2])
    cache, parts = None, []
    for index, part in enumerate(z.split(chunks, dim=2)):
        pixels, cache = decoder.decode(part, cache)
        parts.append(pixels)
        judge("frames of chunks", _unit(pixels), f"frames.chunk{index}")
    assert cache is not None
    names = sorted(name for name in scenario.tensors if name.startswith("memory_end."))
    if names:
        for name, feature in zip(names, cache.features, strict=True):
            judge("memory", feature, name)
    whole, _ = decoder.decode(z, None)
    scenario.compare("decode streamed = whole", torch.cat(parts, dim=2), whole, _TINY)
    if "encode_out" in scenario:
        path = _one(scenario.directory, _TINY_WEIGHTS)
        shapes = open_tensors(path).shapes
        width, channels = shapes["encoder.0.weight"][0], z.shape[1]
        network = TAEHV(
            channels, width, decoder.channels, patch=decoder.config.patch, dtype=torch.float32
        )
        load_strict(network, open_tensors(path), shapes_of(network), what="TAEHV")
        judge("encoder", _encode_tiny(scenario, network), "encode_out")


def _unit(pixels_1CTHW: torch.Tensor) -> torch.Tensor:
    """Return pixels in the recorded layout [1, T, C, H, W] and range [0, 1]."""
    return ((pixels_1CTHW + 1) / 2).transpose(1, 2)


def _encode_tiny(scenario: GoldenScenario, network: TAEHV) -> torch.Tensor:
    """Encode the frames of the clip that the VAE's golden file contains."""
    clips = [
        path
        for path in sorted(scenario.directory.glob("wan22_vae*.safetensors"))
        if "video_u8" in _tensor_names(path)
    ]
    if not clips:
        raise ValueError("no file of the directory holds the clip video_u8")
    frames = 4 * scenario.get("encode_out").shape[1]
    clip = read_tensors(clips[0])[0]["video_u8"][:frames].permute(0, 3, 1, 2).float()
    latents, _ = network.encode((clip * (2 / 255) - 1 + 1) / 2, None)
    return latents[None]


def _tensor_names(path: Path) -> set[str]:
    """Return the names of a recording's tensors."""
    return set(read_tensors(path)[0])


# -- names -----------------------------------------------------------------------------------------


def run_names(scenario: GoldenScenario) -> None:
    """Compare the tensor names and sizes of the released network with those of this package."""
    recorded = json.loads(scenario.path.read_text())
    names = recorded["key_map_orig_to_diffusers"]
    wrong = [name for name, target in names.items() if rename(name, VAE_RULES) != target]
    scenario.compare_names("VAE tensor names", names, wrong)
    with torch.device("meta"):
        vae = StreamingWanVAE(WAN_2_2_VAE)
    shapes = shapes_of(vae)
    if set(shapes) != set(names.values()):
        raise ValueError("the released network has other tensors than the recorded names")
    sizes = recorded.get("full_size", {})
    ours = {
        "tensors": len(shapes),
        "parameters": sum(parameter.numel() for parameter in vae.parameters()),
    }
    for key in ours.keys() & sizes.keys():
        scenario.compare(f"full size: {key}", torch.tensor(ours[key]), torch.tensor(sizes[key]), 0)
    for part, layout in (
        ("decoder", vae.decoder_cache_layout(32, 32)),
        ("encoder", vae.encoder_cache_layout(32, 32)),
    ):
        # The recorded lists include the shortcut convolutions, which cache no frames.
        calls = [
            name for name in recorded.get(f"{part}_causal_convs", []) if "shortcut" not in name
        ]
        if calls:
            scenario.compare(
                "number of caches",
                torch.tensor(len(layout.shapes)),
                torch.tensor(len(calls)),
                0.0,
            )
