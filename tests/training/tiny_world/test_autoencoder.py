# SPDX-License-Identifier: Apache-2.0
"""The training code's autoencoder and tiny decoder produce the same results as the serving
package's streaming versions with the same files.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from training.tiny_world.autoencoder import (
    Autoencoder,
    load_autoencoder,
    load_decoder,
    with_latents_scaled,
)
from training.tiny_world.train_tiny_decoder import TinyDecoder
from vllm_omni.model_executor.models.wan.architecture import VAEConfig
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.vae.tiny_vae import (
    TinyVAEDecoder,
    load_tiny_vae,
    tiny_vae_channels,
)
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE

WIDTH, FRAMES, HEIGHT = 4, 17, 24
TOLERANCE = 1e-4
"""Absolute tolerance for values of about 1. It allows for a different order of summation in about
forty fp32 layers.
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a `vae.pt` file in which every parameter has an effect, even parameters that are
    normally initialized with zeros.
    """
    torch.manual_seed(2)
    model = Autoencoder(WIDTH)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    path = tmp_path_factory.mktemp("autoencoder") / "vae.pt"
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def clip() -> torch.Tensor:
    return (
        torch.rand(1, FRAMES, 3, HEIGHT, HEIGHT + 16, generator=torch.Generator().manual_seed(3))
        * 2
        - 1
    )


@pytest.fixture(scope="module")
def served(trained: Path) -> StreamingWanVAE:
    """Return the autoencoder that the serving package builds from the exported file."""
    config = VAEConfig(base_dim=WIDTH)
    mean, std = torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
    weights = torch.load(trained, weights_only=True)
    exported = trained.parent / "Wan2.1_VAE.pth"
    torch.save(with_latents_scaled(weights, -mean / std, 1 / std), exported)
    vae = StreamingWanVAE(config)
    load_vae(vae, exported)
    return vae


def test_latents_are_those_of_the_served_encoder(
    trained: Path, served: StreamingWanVAE, clip: torch.Tensor
) -> None:
    """A clip encoded at once has the same latents as with the served encoder, which encodes the
    clip in two calls.
    """
    latents, _ = load_autoencoder(trained, "cpu").moments(clip)
    pixels = clip.transpose(1, 2)
    first, cache = served.encode(pixels[:, :, :9], None)
    later, _ = served.encode(pixels[:, :, 9:], cache)
    expected = torch.cat((first, later), dim=2).transpose(1, 2)
    assert latents.shape == expected.shape == (1, 5, 16, HEIGHT // 8, HEIGHT // 8 + 2)
    assert float(expected.std()) > 0.05
    assert float((latents - expected).abs().max()) < TOLERANCE


def test_pixels_are_those_of_the_served_decoder(trained: Path, served: StreamingWanVAE) -> None:
    latents = torch.randn(1, 5, 16, 3, 4, generator=torch.Generator().manual_seed(4))
    made = load_decoder(trained, "cpu")(latents).clamp(-1, 1)
    first, cache = served.decode(latents[:, :3].transpose(1, 2), None)
    later, _ = served.decode(latents[:, 3:].transpose(1, 2), cache)
    expected = torch.cat((first, later), dim=2)
    assert made.shape == expected.shape == (1, 3, FRAMES, 24, 32)
    assert float(expected.std()) > 0.05
    assert float((made - expected).abs().max()) < TOLERANCE


def test_scaled_latents_decode_to_the_same_image(trained: Path, clip: torch.Tensor) -> None:
    """Latents that have been normalised as (z - centre) / scale decode to the same pixels."""
    weights = torch.load(trained, weights_only=True)
    centre, scale = torch.linspace(-1, 1, 16), torch.linspace(0.5, 2, 16)
    before, after = Autoencoder(WIDTH), Autoencoder(WIDTH)
    before.load_state_dict(weights)
    after.load_state_dict(with_latents_scaled(weights, centre, scale))
    with torch.no_grad():
        old, new = before.moments(clip)[0], after.moments(clip)[0]
        expected = (old - centre.view(-1, 1, 1)) / scale.view(-1, 1, 1)
        assert float((new - expected).abs().max()) < TOLERANCE
        assert float((after.decode(new) - before.decode(old)).abs().max()) < TOLERANCE


def test_frames_do_not_depend_on_later_ones(trained: Path, clip: torch.Tensor) -> None:
    model = load_autoencoder(trained, "cpu")
    changed = torch.cat((clip[:, :9], -clip[:, 9:]), dim=1)
    latents, others = model.moments(clip)[0], model.moments(changed)[0]
    assert torch.allclose(latents[:, :3], others[:, :3], atol=1e-6)
    assert float((latents[:, 3:] - others[:, 3:]).abs().max()) > 1e-3


def test_the_cheap_decoder_is_the_served_one(tmp_path: Path) -> None:
    """The training code's tiny decoder produces the same pixels as the serving one, which streams
    the latents in two calls. The layer widths are read from the file.
    """
    torch.manual_seed(5)
    widths = (16, 12, 8, 8)
    model = TinyDecoder(widths)
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "taew2_1.safetensors")
    assert tiny_vae_channels(tmp_path / "taew2_1.safetensors") == widths
    served = TinyVAEDecoder(widths)
    load_tiny_vae(served, tmp_path / "taew2_1.safetensors")
    latents = torch.randn(1, 5, 16, 3, 4)
    with torch.no_grad():
        made = (model(latents) * 2 - 1).clamp(-1, 1).transpose(1, 2)
    first, cache = served.decode(latents[:, :2].transpose(1, 2), None)
    later, _ = served.decode(latents[:, 2:].transpose(1, 2), cache)
    expected = torch.cat((first, later), dim=2)
    assert made.shape == expected.shape == (1, 3, FRAMES, 24, 32)
    assert float(expected.std()) > 0.01
    assert float((made - expected).abs().max()) < TOLERANCE
