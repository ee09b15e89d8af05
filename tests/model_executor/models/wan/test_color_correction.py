# SPDX-License-Identifier: Apache-2.0
"""Tests of the colour correction, compiled as on a GPU. DreamX-World's tests compare its results
with recordings.
"""

import pytest
import torch

from vllm_omni.model_executor.models.wan.vae.color_correction import correct_frames


@pytest.mark.nightly
def test_compiled_code_corrects_the_first_and_later_chunks_alike() -> None:
    compiled = torch.compile(correct_frames, dynamic=False)
    frames = torch.rand(5, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    strength, target = torch.tensor(1.0), None
    with torch.inference_mode():
        for _ in range(2):
            expected, _ = correct_frames(frames, target, strength)
            corrected, target = compiled(frames, target, strength)
            torch.testing.assert_close(corrected, expected, atol=1e-5, rtol=0)
