# SPDX-License-Identifier: Apache-2.0
"""Tests of the offline Lance example and of the files that it writes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.example_scripts import load_example, run_example
from PIL import Image

from vllm_omni.model_executor.models.lance.config import TASKS
from vllm_omni.model_executor.models.registry import get_family

SCRIPT = "lance.py"


def test_every_task_has_a_name() -> None:
    assert set(load_example(SCRIPT).TASKS.values()) == set(TASKS)


def test_several_images_get_numbered_files(tmp_path: Path) -> None:
    images = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    paths = load_example(SCRIPT).write(tmp_path / "cat.png", {}, {"images": images})
    assert [path.name for path in paths] == ["cat-0.png", "cat-1.png"]
    assert all(Image.open(path).size == (16, 16) for path in paths)


def test_a_clip_is_read_as_frames(tmp_path: Path) -> None:
    example = load_example(SCRIPT)
    (path,) = example.write(
        tmp_path / "a.mp4", {"fps": 12}, {"frames": torch.zeros(5, 16, 32, 3, dtype=torch.uint8)}
    )
    args = example.make_parser().parse_args(["model", "video-understanding", "--video", str(path)])
    assert example.read_inputs(args)["video"].shape == (5, 16, 32, 3)


@pytest.mark.nightly
def test_an_image_is_generated_and_read(tmp_path: Path) -> None:
    """The script generates an image and then describes it. The test runs the script twice on the
    tiny checkpoint, as a user would.
    """
    get_family("lance").make_tiny(tmp_path / "model", 0, "image")
    image = tmp_path / "cat.png"

    def run(task: str, *arguments: object) -> str:
        options = ("--model-options", '{"max_image_pixels": 16384}')
        return run_example(SCRIPT, tmp_path / "model", task, *arguments, *options).stdout

    run(
        "text-to-image",
        "--prompt",
        "a cat",
        "--height",
        64,
        "--width",
        96,
        "--steps",
        2,
        "--out",
        image,
    )
    assert np.asarray(Image.open(image)).shape == (64, 96, 3)
    response = run(
        "image-understanding", "--image", image, "--max-tokens", 20, "--resolution", "image_256res"
    )
    assert "tokens, ended by" in response
