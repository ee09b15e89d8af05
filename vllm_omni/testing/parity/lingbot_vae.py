# SPDX-License-Identifier: Apache-2.0
"""Compares LingBot-World's VAE with golden files.

The tolerance is 5e-5 for whole clips, and 1e-5 for differences between streams and whole clips.
"""

import json

import torch

from vllm_omni.model_executor.checkpoint.loading import rename
from vllm_omni.model_executor.models.wan.checkpoint.component_names import VAE_RULES
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.images.image_condition import MASK_CHANNELS, GreyCondition
from vllm_omni.model_executor.models.wan.vae.chunk_decoder import ChunkDecoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig, to_uint8
from vllm_omni.testing.parity.comparison import GoldenScenario

VAE_WEIGHTS = "vae_tiny_weights_orig_names.safetensors"
_VAE, _STREAMED = 5e-5, 1e-5


def run_vae(scenario: GoldenScenario) -> None:
    """Compare the encoder and the decoder with the recording, for whole clips and for streams of
    chunks.
    """
    vae = _load_vae(scenario)
    if "cond_latent" in scenario:
        latents = scenario.get("cond_latent").shape[2]
        clip = scenario.get("image")[None, :, None]
        grey = torch.zeros(
            *clip.shape[:2], vae.config.temporal_factor * (latents - 1), *clip.shape[3:]
        )
        clip = torch.cat((clip, grey), dim=2)
        whole, _ = vae.encode(clip, None)
        scenario.compare_recorded("encode whole clip", whole, "cond_latent", _VAE)
        scenario.compare("encode streamed = whole", _encode_stream(vae, clip), whole, _STREAMED)
    if "latents" in scenario:
        recorded = scenario.get("latents")
        whole, _ = vae.decode(recorded, None)
        scenario.compare_recorded("decode whole clip", whole, "decoded_whole", _VAE)
        scenario.compare("decode streamed = whole", _decode_stream(vae, recorded), whole, _STREAMED)
        if "decoded_whole_u8_round" in scenario:
            frames = to_uint8(whole).permute(3, 0, 1, 2).unsqueeze(0)
            scenario.compare_recorded("uint8 frames", frames, "decoded_whole_u8_round", 1.0)
    # This continuation re-encodes grey frames and drops the first latent.
    if "pr3701_ext_cond_latent" in scenario:
        latents, *cells = scenario.get("pr3701_ext_cond_latent").shape[2:]
        image = torch.zeros(1, 3, 1, *(vae.config.spatial_factor * cell for cell in cells))
        condition = GreyCondition(vae, "fresh_grey", chunk_frames=latents)
        y, _ = condition.next(None, latents, condition.next(image, latents, None)[1])
        scenario.compare_recorded(
            "encode grey clip", y[None, MASK_CHANNELS:], "pr3701_ext_cond_latent", _VAE
        )
    # This decode restarts two latents early and drops the warm-up frames.
    if "pr3701_warm_decode_chunk1" in scenario:
        chunk = scenario.get("pr3701_warm_decode_chunk1").shape[2] // vae.config.temporal_factor
        first, second = scenario.get("latents")[:, :, : 2 * chunk].split(chunk, dim=2)
        decoder = ChunkDecoder(vae, continuation="restart")
        restarted, _ = decoder.decode(second, decoder.decode(first, None)[1])
        scenario.compare_recorded("decode restarted", restarted, "pr3701_warm_decode_chunk1", _VAE)


def run_vae_names(scenario: GoldenScenario) -> None:
    """Check that the rename rules map each recorded name to the recorded target name."""
    recorded = json.loads(scenario.path.read_text())
    wrong = [name for name, target in recorded.items() if rename(name, VAE_RULES) != target]
    scenario.compare_names("VAE tensor names", recorded, wrong)


def run_vae_cache_shapes(scenario: GoldenScenario) -> None:
    """Compare the shapes of the decoder's cache after a stream with the recorded shapes."""
    clip = GoldenScenario(scenario.directory / "vae.safetensors", scenario.report)
    vae = _load_vae(clip)
    recorded = [shape for shape in json.loads(scenario.path.read_text()) if shape is not None]
    _, cache = vae.decode(clip.get("latents"), None)
    ours = [list(feature.shape) for feature in cache.features]
    if ours != recorded:
        raise ValueError(f"the cache has shapes {ours}, recorded {recorded}")
    scenario.compare("cache tensors", torch.tensor(len(ours)), torch.tensor(len(recorded)), 0.0)


def recorded_vae(scenario: GoldenScenario) -> VAEConfig:
    """Build the VAE config from the original implementation's constructor arguments, as stored in
    the scenario's metadata.

    Raises:
        ValueError: The original's arguments include an unknown argument.
    """
    cfg = json.loads(scenario.meta("cfg"))
    statistics = {f"latents_{name}": json.loads(scenario.meta(name)) for name in ("mean", "std")}
    return VAEConfig.from_dict(
        {("base_dim" if key == "dim" else key): value for key, value in cfg.items()} | statistics
    )


def _load_vae(scenario: GoldenScenario) -> StreamingWanVAE:
    vae = StreamingWanVAE(recorded_vae(scenario))
    load_vae(vae, scenario.directory / VAE_WEIGHTS)
    return vae


def _encode_stream(vae: StreamingWanVAE, clip: torch.Tensor) -> torch.Tensor:
    """Encode 9 frames, then 12 at a time as in a session, and then the remaining frames."""
    chunk = 3 * vae.config.temporal_factor
    first = min(clip.shape[2], chunk - 3)
    cache, parts = None, []
    for part in (clip[:, :, :first], *clip[:, :, first:].split(chunk, dim=2)):
        if part.shape[2]:
            latents, cache = vae.encode(part, cache)
            parts.append(latents)
    return torch.cat(parts, dim=2)


def _decode_stream(vae: StreamingWanVAE, latents: torch.Tensor) -> torch.Tensor:
    cache, parts = None, []
    for part in latents.split(3, dim=2):
        pixels, cache = vae.decode(part, cache)
        parts.append(pixels)
    return torch.cat(parts, dim=2)
