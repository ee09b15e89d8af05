# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/pipeline_parallel.py` runs, saves each row, and its rows agree where they compute
the same sums.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.nightly
def test_the_table_of_a_tiny_model(tmp_path: Path) -> None:
    """One GPU's worth, a VAE stage, and a stream of other steps, in runs that share a file."""
    script = REPO / "benchmarks" / "pipeline_parallel.py"
    for row in ("one_gpu", "vae_stage", "matched2_one_gpu"):
        command = [sys.executable, str(script), "--tiny", "--rows", row, "--out", str(tmp_path)]
        subprocess.run(
            command,
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
    (path,) = tmp_path.glob("*_pipeline_parallel_tiny.json")
    rows = json.loads(path.read_text())["result"]["rows"]
    assert set(rows) == {"one_gpu", "vae_stage", "matched2_one_gpu"}
    digests = {name: row["latents_digests"] for name, row in rows.items()}
    assert digests["one_gpu"] == digests["vae_stage"] and len(set(digests["one_gpu"])) == 2
    assert digests["matched2_one_gpu"][0] != digests["one_gpu"][0]
    for name, row in rows.items():
        assert row["fps_all_sessions"] > 0 and row["frames_per_chunk"] == 12
        assert (
            len(row["steps_ms"]) == (2 if "matched" in name else 5)
            and row["stages_ms"]["decode"] > 0
        )
    assert rows["vae_stage"]["num_gpus"] == len(rows["vae_stage"]["session_bytes"]) == 2
