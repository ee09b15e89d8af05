# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/streams_per_gpu.py` runs on a real engine and counts what it says it counts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.parametrize("decoder", ["exact", "tiny"])
def test_live_streams_of_a_tiny_model(tmp_path: Path, decoder: str) -> None:
    """Each number of streams is a row: gaps of every counted chunk, and nobody plays faster than
    asked.
    """
    script = REPO / "benchmarks" / "streams_per_gpu.py"
    options = [
        "--tiny",
        "--streams",
        "1",
        "2",
        "--policies",
        "deadline",
        "--decoder",
        decoder,
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, str(script), *options],
        check=True,
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    (path,) = tmp_path.glob(f"*_streams_per_gpu_{decoder}.json")
    rows = json.loads(path.read_text())["result"]["rows"]
    assert [(row["policy"], row["streams"]) for row in rows] == [("deadline", 1), ("deadline", 2)]
    for row in rows:
        assert (
            row["chunks"]
            == sum(stream["chunks"] for stream in row["per_stream"])
            == 5 * row["streams"]
        )
        assert row["degraded"] == 0 and all(
            len(stream["decode_ms"]) == stream["chunks"] for stream in row["per_stream"]
        )
        assert row["gap_p50"] >= 1 and row["slowest_stream_fps"] <= 16
        assert row["held"] == (
            row["worst_stream_gap_p99"] <= 1.5 and row["slowest_stream_fps"] >= 0.98 * 16
        )
