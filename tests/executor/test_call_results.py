# SPDX-License-Identifier: Apache-2.0
"""All output types of a pipeline are converted to the same uint8 images as diffusers' PIL
output.
"""

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.video_processor import VideoProcessor

from vllm_omni.executor.call_results import latents_tensor, result_tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("output_type", ["pt", "np", "pil"])
def test_images_equal_diffusers_pil_output(output_type: str, dtype: torch.dtype) -> None:
    """All values k/255 and the values between them are rounded as in diffusers, in both float32 and
    bfloat16.
    """
    decoded = torch.linspace(-1.2, 1.2, 2 * 3 * 64 * 64).reshape(2, 3, 64, 64).to(dtype)
    processor = VaeImageProcessor()
    reference = np.stack(
        [np.array(image) for image in processor.postprocess(decoded, output_type="pil")]
    )
    output = {"images": processor.postprocess(decoded, output_type=output_type)}
    assert np.array_equal(result_tensors(output, video=False)["images"].numpy(), reference)


@pytest.mark.parametrize("output_type", ["pt", "np", "pil"])
def test_video_frames_equal_diffusers_pil_output(output_type: str) -> None:
    """The frames of a batch that contains one video are returned with the shape [T, H, W, 3]."""
    decoded = torch.linspace(-1.2, 1.2, 3 * 5 * 16 * 32).reshape(1, 3, 5, 16, 32)
    processor = VideoProcessor()
    frames = processor.postprocess_video(decoded, output_type="pil")[0]
    reference = np.stack([np.array(frame) for frame in frames])
    output = {"frames": processor.postprocess_video(decoded, output_type=output_type)}
    got = result_tensors(output, video=True)["frames"]
    assert got.shape == (5, 16, 32, 3) and np.array_equal(got.numpy(), reference)


def test_alpha_is_dropped_and_gray_is_repeated() -> None:
    """Results always have three channels: an alpha channel is dropped, and a single grey channel is
    repeated.
    """
    gray = torch.rand(1, 1, 8, 8)
    spread = result_tensors({"images": gray}, video=False)["images"]
    assert spread.shape == (1, 8, 8, 3) and torch.equal(spread[..., 0], spread[..., 2])
    assert result_tensors({"images": torch.rand(1, 4, 8, 8)}, video=False)["images"].shape == (
        1,
        8,
        8,
        3,
    )


@pytest.mark.parametrize(
    ("output", "video", "words"),
    [
        ({"audios": torch.zeros(1, 8)}, False, "audios"),
        ({"images": torch.zeros(1, 2, 8, 8)}, False, "2 channels"),
        ({"images": None}, False, "NoneType"),
        ({"frames": torch.zeros(2, 5, 3, 8, 8)}, True, "one video"),
        ({"images": torch.zeros(3, 8, 8)}, False, "expected images"),
    ],
)
def test_unsupported_outputs_raise(output: dict[str, object], video: bool, words: str) -> None:
    """Audio, several videos or an unsupported number of channels raise a TypeError that names the
    output.
    """
    with pytest.raises(TypeError, match=words):
        result_tensors(output, video=video)


def test_latents_are_returned_unchanged() -> None:
    """Latents are returned with the pipeline's dtype and shape. Outputs of other types are
    rejected.
    """
    latents = torch.rand(1, 16, 64)
    assert torch.equal(latents_tensor({"images": latents}), latents)
    with pytest.raises(TypeError, match="latent"):
        latents_tensor({"images": [1]})
