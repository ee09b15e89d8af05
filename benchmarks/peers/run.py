# SPDX-License-Identifier: Apache-2.0
"""Runs each part in a separate process, and writes one result file per part."""

import contextlib
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.parts import OURS, OURS_TINY, PARTS, Part

REPO = Path(__file__).parents[2]
DRIVERS = Path(__file__).parent / "drivers"
SMALL_GPU_MIB = 100_000
"""GPU memory below which LingBot World's text encoder remains on the CPU in bf16 runs, because the
model and the encoder do not fit into 80 GB.
"""
LOG_LINES = 12
OURS_SETTINGS = (
    *("model_options", "omni_options", "dtype", "quantization", "kv_cache_dtype", "eager"),
    *("stages_ms", "steps_ms"),
)
"""Fields that are copied from the results of this project's benchmarks, if they are present."""


@dataclass(frozen=True)
class PartRunner:
    out: Path
    """Folder for results and logs."""
    folder: Path
    """Folder that contains the peers' Python paths."""
    python: str | None
    """Interpreter that runs the peers. Default: the interpreter of this process."""
    commit: str | None
    """Commit of this project. Default: the checkout's commit if the checkout is a git repository.
    """
    tiny: bool = False
    """Whether to run narrow models on the CPU."""

    def run(self, name: str, limit_s: int | None = None, again: bool = False) -> bool:
        """Measure a part if it has no result yet or if `again` is set. Return whether the part has
        a result afterwards.
        """
        result = self.out / f"{name}.json"
        if result.exists() and not again:
            print(f"{name}: {result} exists, skipped (--again repeats it)")
            return True
        self.out.mkdir(parents=True, exist_ok=True)
        part, log = PARTS[name], self.out / f"{name}.log"
        with tempfile.TemporaryDirectory() as scratch:
            command, environment = self.command(part, Path(scratch))
            start = time.monotonic()
            status = run_limited(command, environment, log, limit_s or part.limit_s)
            print(f"{name}: {status} after {time.monotonic() - start:.0f} s, log {log}", flush=True)
            written = sorted(Path(scratch).glob("*.json"))
            if status != "finished" or not written:
                print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]))
                return False
            measured = json.loads(written[0].read_text())
        document = self.document(name, part, measured)
        result.write_text(json.dumps(document, indent=1) + "\n")
        return True

    def command(self, part: Part, scratch: Path) -> tuple[list[str], dict[str, str]]:
        """Return the command and the environment for a part. The command writes a JSON file to
        `scratch`.
        """
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        if part.package == OURS:
            options = OURS_TINY[part.script] if self.tiny else part.options
            smallest_mib = min((gpu["mib"] for gpu in gpus()), default=SMALL_GPU_MIB)
            if part is PARTS["ours_bf16"] and smallest_mib < SMALL_GPU_MIB and not self.tiny:
                options += ("--model-options", '{"text_encoder_device": "cpu"}')
            script = REPO / "benchmarks" / part.script
            return [sys.executable, str(script), *options, "--out", str(scratch)], environment
        paths = (self.folder / name for name in (part.package, "common"))
        environment["PYTHONPATH"] = os.pathsep.join(str(path.resolve()) for path in paths)
        if part.package in ("sglang", "telefuser"):  # vLLM's allocator does not allow this setting
            environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        command = [self.python or sys.executable, str(DRIVERS / part.script), *part.options]
        command += ["--result", str(scratch / "measured.json"), *(["--tiny"] * self.tiny)]
        return command, environment

    def document(self, name: str, part: Part, measured: dict[str, Any]) -> dict[str, Any]:
        """Return the contents of a part's result file, in the format of the files in
        `benchmarks/results`.
        """
        found = measured["result"]
        if part.package == OURS:
            found = result_of_ours(found) | {"fast_paths": measured.get("fast_paths")}
        return {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "command": f"python -m benchmarks.peers run {name}" + " --tiny" * self.tiny,
            "commit": self.commit or checkout_commit(),
            "hardware": {
                "cpu": platform.processor() or platform.machine(),
                "cores": len(os.sched_getaffinity(0)),
                "gpus": [gpu["name"] for gpu in gpus()],
                "gpu_ids": [gpu["uuid"] for gpu in gpus()],
            },
            "versions": measured["versions"],
            "result": {"part": name, "model": part.model, "tiny": self.tiny, **found},
        }


def run_limited(command: list[str], environment: dict[str, str], log: Path, limit_s: float) -> str:
    """Run a command, redirect its output to `log`, and kill its process group at the time limit."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
            status = "finished" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            status = f"killed at the limit of {limit_s:.0f} s (--seconds sets it)"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # kills the remaining workers
            process.wait()
    return status


def result_of_ours(found: dict[str, Any]) -> dict[str, Any]:
    """Convert a result of this project's benchmarks to the format of the drivers' results."""
    chunks_ms = found["chunk_interval_ms_all"]
    memory = (found.get("device_memory") or [{}])[0].get("torch_peak")
    return {
        "peer": "vllm_omni (this project)",
        "chunk_ms": found["chunk_interval_ms"],
        "chunk_ms_range": [min(chunks_ms), max(chunks_ms)],
        "first_chunk_ms": found["time_to_first_frame_ms"],
        "chunks_ms": chunks_ms,
        "steady_from": 0,
        "frames_per_chunk": found.get("frames_per_chunk", 12),
        "size": found["size"],
        **({"peak_memory_gb": round(memory / 1e9, 1)} if memory else {}),
        "settings": {key: found[key] for key in OURS_SETTINGS if key in found},
        "replaced": ["weights: random"],
    }


def gpus() -> list[dict[str, Any]]:
    """Return the name, UUID and memory in MiB of each visible GPU, without creating a CUDA context
    in this process.
    """
    fields = ("name", "uuid", "memory.total")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    rows = [line.split(", ") for line in lines.splitlines()]
    return [{"name": name, "uuid": uuid, "mib": int(mib)} for name, uuid, mib in rows]


def checkout_commit() -> str | None:
    """Return the short hash of the checkout's commit, with `-dirty` if tracked files differ from
    the commit.
    """
    command = ["git", "-C", str(REPO), "describe", "--always", "--dirty", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() or None
