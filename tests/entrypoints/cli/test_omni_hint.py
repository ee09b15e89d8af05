# SPDX-License-Identifier: Apache-2.0
"""`vllm serve my_world` without `--omni` fails with a last line that names the flag."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waits import seconds

from vllm_omni.entrypoints.cli.checkpoints.make_tiny import write_tiny
from vllm_omni.entrypoints.cli.omni_hint import missing_omni


@pytest.fixture
def world(tmp_path: Path) -> Path:
    write_tiny("null_world", tmp_path / "my world")
    return tmp_path / "my world"


def test_the_last_line_of_a_failed_start_is_the_hint(world: Path) -> None:
    """The hint follows vLLM's own error about a missing `config.json`."""
    program = (
        "import sys; sys.argv = ['/bin/vllm', 'serve', sys.argv[1], '--port', '1']\n"
        "import vllm_omni; vllm_omni.register(); vllm_omni.register()\n"
        "raise ValueError('no config.json')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, world],
        capture_output=True,
        text=True,
        timeout=seconds(120),
        check=False,
    )
    *above, last = ended.stderr.splitlines()
    assert last == (
        f"vllm_omni: {world} is a checkpoint of null_world; serve it with: vllm serve '{world}' "
        "--port 1 --omni"
    )
    assert above[-1] == "ValueError: no config.json"


def test_a_command_that_needs_no_hint_gets_none(world: Path, tmp_path: Path) -> None:
    """There is no hint if the user passed the flag, the worker class or the config format. Other
    commands and hub models get no hint either.
    """
    model = str(world)
    assert missing_omni(["vllm", "serve", model]) is not None
    for argv in (
        ["vllm", "serve", model, "--omni"],
        ["vllm", "serve", model, "--worker-cls", "vllm_omni.worker.DiffusionGPUWorker"],
        ["vllm", "serve", model, "--config-format=omni"],
        ["vllm", "serve", "--help"],
        ["vllm", "serve"],
        ["vllm", "serve", "Qwen/Qwen3-0.6B"],
        ["vllm", "bench", model],
        ["vllm-omni", "serve", model],
        ["script.py", "serve", model],
    ):
        assert missing_omni(argv) is None, argv


def test_a_language_model_gets_no_hint(tmp_path: Path) -> None:
    """A language model gets no hint, because its `config.json` names a stock vLLM architecture."""
    write_tiny("qwen2_5_omni", tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"]
    assert missing_omni(["vllm", "serve", str(tmp_path / "model")]) is None
