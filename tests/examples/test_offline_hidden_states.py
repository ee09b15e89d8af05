# SPDX-License-Identifier: Apache-2.0
"""The offline example prints text and writes hidden states."""

from pathlib import Path

import pytest
from helpers.example_scripts import run_example

from vllm_omni.hidden_states import from_safetensors


@pytest.mark.nightly
def test_it_prints_text_and_writes_rows(tmp_path: Path) -> None:
    """If no model is given, the example creates one. It then runs two prompts and writes the hidden
    states of two layers.
    """
    out = tmp_path / "states.safetensors"
    done = run_example("hidden_states.py", "--rows", "generated", "--layers", 2, -1, "--out", out)
    states = from_safetensors(out.read_bytes())
    assert set(states) == {2, -1} and states[2].shape == (states.num_positions, 64)
    assert done.stdout.count("layer 2:") == 2 and "'The sea is' ->" in done.stdout
