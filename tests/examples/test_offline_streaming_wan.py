# SPDX-License-Identifier: Apache-2.0
"""The offline streaming example as its own command line: text to video, and that video repainted."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.forked_scripts import run_script
from helpers.waits import seconds

from vllm_omni.entrypoints.media import decode_mp4
from vllm_omni.model_executor.models.registry import get_family

SCRIPT = Path(__file__).parents[2] / "examples" / "offline_inference" / "streaming_wan.py"


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds(400), check=False)


@pytest.mark.nightly
def test_a_prompt_becomes_a_video_and_a_video_is_repainted(tmp_path: Path) -> None:
    """9 and 12 frames each way; the prompt changes at the second chunk."""
    model, out, repainted = tmp_path / "model", tmp_path / "stream.mp4", tmp_path / "repainted.npy"
    get_family("causal_wan").make_tiny(model, 0, "diffusers")
    size = ("--height", 32, "--width", 48)
    result = run(model, "--chunks", 2, "--switch", "1:a town at night", "--out", out, *size)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert decode_mp4(out.read_bytes())[0].shape == (21, 32, 48, 3)
    result = run(model, "--video", out, "--out", repainted, *size)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "noise 0.800" in result.stdout
    frames = np.load(repainted)
    assert frames.shape == (21, 32, 48, 3) and frames.std() > 5


@pytest.mark.parametrize(("flag", "value"), [("--switch", "later"), ("--out", "stream.gif")])
def test_what_it_cannot_do_is_said_before_the_model_is_loaded(flag: str, value: str, tmp_path: Path) -> None:
    result = run_script(SCRIPT, tmp_path, flag, value)
    assert result.returncode != 0 and flag in result.stderr
