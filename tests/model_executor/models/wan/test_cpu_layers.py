# SPDX-License-Identifier: Apache-2.0
"""The fast CPU layers produce the same results as diffusers' layers and always use the most
recently loaded weights.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanRMS_norm
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_omni.model_executor.models.lance.network.vae import LanceWanVAE
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig
from vllm_omni.model_executor.models.wan.vae_layers import (
    CPURMSNorm,
    FoldedCausalConv3d,
    use_cpu_layers,
)
from vllm_omni.model_executor.models.wan2_2.vae import VideoVAE
from vllm_omni.testing.tiny.wan import VAE_2_2

ORDER = 2e-6  # for fp32 sums, in a different order, of 108 products of about 0.1


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def convolution(
    kernel: tuple[int, int, int], stride: tuple[int, int, int], padding: tuple[int, int, int]
) -> Any:
    torch.manual_seed(0)
    return WanCausalConv3d(4, 6, kernel, stride, padding).requires_grad_(False)


@pytest.mark.parametrize("num_cached", [0, 1, 2])
@pytest.mark.parametrize("frames", [1, 4])
@pytest.mark.parametrize("clips", [1, 2])
def test_a_folded_convolution_equals_the_causal_one(
    clips: int, frames: int, num_cached: int
) -> None:
    """For any number of cached frames and both memory layouts, a folded convolution equals the
    causal convolution.
    """
    whole = convolution((3, 3, 3), (1, 1, 1), (1, 1, 1))
    folded = FoldedCausalConv3d(copy.deepcopy(whole))
    x = random(clips, 4, frames, 5, 6)
    cache = random(clips, 4, num_cached, 5, 6, seed=1) if num_cached else None
    expected = whole(x, cache)
    for layout in (torch.contiguous_format, torch.channels_last_3d):
        out = folded(x.contiguous(memory_format=layout), cache)
        torch.testing.assert_close(out, expected, atol=ORDER, rtol=0)


def weights(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"weight": weight, "bias": torch.zeros(6)}


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, weight: layer.load_state_dict(weights(weight)),
        lambda layer, weight: layer.load_state_dict(weights(weight), assign=True),
        lambda layer, weight: layer.weight.data.copy_(weight),
        lambda layer, weight: setattr(layer.weight, "data", weight.clone()),
    ],
    ids=["loaded", "assigned", "written", "replaced"],
)
def test_no_weight_is_ever_stale(change: Callable[[Any, torch.Tensor], None]) -> None:
    """After weights have been replaced in any way, the next forward pass uses the new weights."""
    whole = convolution((3, 3, 3), (1, 1, 1), (1, 1, 1))
    folded = FoldedCausalConv3d(copy.deepcopy(whole))
    x, weight = random(1, 4, 3, 5, 6), random(6, 4, 3, 3, 3, seed=7)
    folded(x)
    change(folded, weight)
    folded.bias = whole.bias
    whole.weight.data.copy_(weight)
    torch.testing.assert_close(folded(x), whole(x), atol=1e-4, rtol=0)  # weights of 1


@pytest.mark.parametrize("shape", [(1, 12, 3, 4, 5), (2, 12, 4, 5)])
def test_the_norm_equals_diffusers(shape: tuple[int, ...]) -> None:
    """The norm over channels equals diffusers' norm for clips and for frames. Zeros stay zero, and
    small values lose no precision.
    """
    whole = WanRMS_norm(12, images=len(shape) == 4).requires_grad_(False)
    whole.gamma.copy_(random(*whole.gamma.shape))
    norm = CPURMSNorm(copy.deepcopy(whole))
    x = random(*shape)
    x[:, :, 0] *= 1e-6
    x[:, :, 1] = 0
    torch.testing.assert_close(norm(x), whole(x), atol=1e-6, rtol=0)
    half = x.bfloat16()
    assert torch.equal(norm.to(torch.bfloat16)(half), whole.to(torch.bfloat16)(half))


class CountConvolutions(TorchDispatchMode):
    """Counts three-dimensional and two-dimensional convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.three = self.two = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Calls on the meta device are not counted, because they only determine shapes.
        if "conv" in func.name() and args[0].device.type == "cpu":
            self.three += args[1].dim() == 5
            self.two += args[1].dim() == 4
        return func(*args, **(kwargs or {}))


WAN_2_1: dict[str, Any] = {"base_dim": 4, "z_dim": 16, "num_res_blocks": 1}
WAN_2_2: dict[str, Any] = {
    "base_dim": 4,
    "decoder_base_dim": 4,
    "z_dim": 4,
    "num_res_blocks": 1,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


@pytest.mark.parametrize("values", [WAN_2_1, WAN_2_2], ids=["2.1", "2.2"])
def test_a_whole_autoencoder_is_unchanged(values: dict[str, Any]) -> None:
    """When diffusers' autoencoder encodes and decodes a clip, it produces the same result with
    these layers as with its own layers.
    """
    torch.manual_seed(0)
    plain: Any = AutoencoderKLWan(**values)
    plain.eval().requires_grad_(False)
    fast = copy.deepcopy(plain)
    use_cpu_layers(fast)
    assert list(fast.state_dict()) == list(plain.state_dict())
    clip = random(1, 3, 9, 32, 32).clamp(-1, 1)
    expected, found = (vae.encode(clip).latent_dist.mode() for vae in (plain, fast))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    frames, same = (vae.decode(expected).sample for vae in (plain, fast))
    torch.testing.assert_close(same, frames, atol=1e-5, rtol=0)


def test_no_family_convolves_over_three_dimensions_on_a_cpu() -> None:
    """No model family runs three-dimensional convolutions on a CPU, where they are ten times
    slower. The test runs the streaming VAE and the VAEs of Wan 2.2 and Lance.
    """
    stream = StreamingWanVAE(VAEConfig(base_dim=4))
    lance = LanceWanVAE(VAE_2_2)
    wan22 = VideoVAE(WAN_2_2)
    with CountConvolutions() as counted:
        _, cache = stream.encode(random(1, 3, 1, 16, 16), None)
        stream.encode(random(1, 3, 4, 16, 16), cache)
        _, cache = stream.decode(random(1, 16, 1, 2, 2), None)
        stream.decode(random(1, 16, 2, 2, 2), cache)
        lance.decode_video(random(1, 48, 1, 2, 2))
        lance.encode_video(random(1, 3, 5, 32, 32))
        wan22.decode(random(4, 2, 2, 2))
        wan22.encode(random(1, 3, 5, 32, 32))
    assert counted.two > 100
    assert counted.three == 0


def test_layers_on_other_devices_are_unchanged() -> None:
    """Layers on other devices are not replaced, because those devices have kernels for
    three-dimensional convolutions.
    """
    with torch.device("meta"):
        vae = StreamingWanVAE(VAEConfig(base_dim=4))
    assert {type(layer) for layer in vae.modules() if isinstance(layer, WanCausalConv3d)} == {
        WanCausalConv3d
    }
