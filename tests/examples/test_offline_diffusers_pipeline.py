# SPDX-License-Identifier: Apache-2.0
"""The offline example generates images and videos from diffusers pipeline directories."""

from pathlib import Path

import numpy as np
import pytest
from helpers.example_scripts import run_example
from PIL import Image

from vllm_omni.entrypoints.media.mp4 import decode_mp4
from vllm_omni.model_executor.models.registry import get_family

SCRIPT = "diffusers_pipeline.py"


def tiny(tmp_path: Path, layout: str) -> Path:
    out = tmp_path / layout
    out.mkdir()
    get_family("diffusers_pipeline").make_tiny(out, 0, layout)
    return out


@pytest.mark.nightly
def test_text_becomes_images(tmp_path: Path) -> None:
    """A text-to-image run writes two numbered files of the requested size."""
    out = tmp_path / "fox.png"
    arguments = (
        "--size",
        "64x32",
        "--steps",
        2,
        "--num-images",
        2,
        "--seed",
        3,
        "--option",
        "prompt_suffix=auto",
    )
    result = run_example(SCRIPT, tiny(tmp_path, "qwen_image"), "--out", out, *arguments)
    assert "seed 3" in result.stdout
    for number in range(2):
        image = np.array(Image.open(tmp_path / f"fox-{number}.png"))
        assert image.shape == (32, 64, 3) and image.std() > 1


@pytest.mark.nightly
def test_text_becomes_a_video(tmp_path: Path) -> None:
    """A text-to-video run writes an MP4 file with nine frames."""
    out = tmp_path / "fox.mp4"
    run_example(
        SCRIPT,
        tiny(tmp_path, "wan"),
        "--out",
        out,
        "--size",
        "64x32",
        "--steps",
        2,
        "--num-frames",
        9,
    )
    assert decode_mp4(out.read_bytes())[0].shape == (9, 32, 64, 3)


@pytest.mark.nightly
def test_a_refused_request_ends_with_its_reason(tmp_path: Path) -> None:
    """If a request is refused, the script prints the reason in one line and exits without a
    traceback.
    """
    result = run_example(
        SCRIPT, tiny(tmp_path, "sd3"), "--out", tmp_path / "x.png", "--size", "60x32", status=1
    )
    assert "unsupported_size: 60x32: width and height must be multiples of 16" in result.stderr
