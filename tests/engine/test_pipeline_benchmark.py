# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/pipeline_parallel.py` runs, saves each row, and its rows agree where they compute the same sums."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_table_of_a_tiny_model(tmp_path: Path) -> None:
    """One GPU's worth, and a VAE stage, in two runs that share a file."""
    script = REPO / "benchmarks" / "pipeline_parallel.py"
    for row in ("one_gpu", "vae_stage"):
        command = [sys.executable, str(script), "--tiny", "--rows", row, "--out", str(tmp_path)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    (path,) = tmp_path.glob("*_pipeline_parallel_tiny.json")
    rows = json.loads(path.read_text())["result"]["rows"]
    assert set(rows) == {"one_gpu", "vae_stage"}
    assert rows["one_gpu"]["frames_digests"] == rows["vae_stage"]["frames_digests"]
    for row in rows.values():
        assert row["fps_all_sessions"] > 0 and row["frames_per_chunk"] == 12
        assert len(row["steps_ms"]) == 5 and row["stages_ms"]["decode"] > 0
    assert rows["vae_stage"]["num_gpus"] == len(rows["vae_stage"]["session_bytes"]) == 2
