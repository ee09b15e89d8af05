# SPDX-License-Identifier: Apache-2.0
"""The offline streaming example generates a video from text or from another video."""

from pathlib import Path

import numpy as np
import pytest
from helpers.example_scripts import EXAMPLES, run_example
from helpers.quick_programs import run_python

from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.model_executor.models.registry import get_family


@pytest.mark.nightly
def test_a_prompt_becomes_a_video_and_a_video_is_repainted(tmp_path: Path) -> None:
    """Text-to-video and video-to-video runs each generate one chunk of 9 frames and one of 12. The
    prompt changes at the second chunk.
    """
    model, out, repainted = tmp_path / "model", tmp_path / "stream.mp4", tmp_path / "repainted.npy"
    get_family("causal_wan").make_tiny(model, 0, "diffusers")
    size = ("--height", 32, "--width", 48)
    run_example(
        "streaming_wan.py",
        model,
        "--chunks",
        2,
        "--switch",
        "1:a town at night",
        "--out",
        out,
        *size,
    )
    assert decode_mp4(out.read_bytes())[0].shape == (21, 32, 48, 3)
    result = run_example("streaming_wan.py", model, "--video", out, "--out", repainted, *size)
    assert "noise 0.800" in result.stdout
    frames = np.load(repainted)
    assert frames.shape == (21, 32, 48, 3) and frames.std() > 5


@pytest.mark.parametrize(("flag", "value"), [("--switch", "later"), ("--out", "stream.gif")])
def test_invalid_arguments_are_refused_before_the_model_is_loaded(
    flag: str, value: str, tmp_path: Path
) -> None:
    result = run_python(EXAMPLES / "streaming_wan.py", tmp_path, flag, value, limit_s=600)
    assert result.returncode != 0 and flag in result.stderr
