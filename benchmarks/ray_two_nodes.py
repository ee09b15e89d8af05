# SPDX-License-Identifier: Apache-2.0
"""Compare running LingBot World on Ray with running it in vLLM's own processes.

One machine with two GPUs acts as two Ray nodes.

    python benchmarks/ray_two_nodes.py                                # full size, two GPUs
    # the tiny model, to try the script
    python benchmarks/ray_two_nodes.py --no-gpu -- --chunks 4 --warm-chunks 2

Each GPU belongs to a separate Ray node, so the two ranks run on two nodes. Control messages are
sent over TCP, and tensors over NCCL. For each executor and each way to split the model, the script
runs benchmarks/lingbot_world.py once, with the arguments after `--`. The latents from both
executors must be bit-identical. The script needs the `[ray]` extra.

vLLM detects that these nodes, unlike real nodes, are on one machine: ranks that share memory try
single-machine all-reduce implementations, which require each rank to see the other rank's GPU. In
this benchmark, both executors therefore use only NCCL's all-reduce. Ray's memory monitor is off,
because it kills workers based on the kernel's total memory. Two nodes on one machine share this
memory, and on a virtual machine the total may grow only as memory is used. The script needs no
network: on a machine without a network, the nodes communicate over 127.0.0.1.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, save

RUNS = {
    "pipeline": ["--pipeline-parallel", "2", "--sessions", "2"],
    "sequence": ["--sequence-parallel", "2"],
    "tensor": ["--tensor-parallel", "2"],
}

TINY = ["--tiny", "--height", "64", "--width", "96", "--eager"]
"""Options for a run without GPUs. The tiny model is used because two ranks of the full-size model
fill 24 GiB of host memory even with only two layers.
"""

OBJECT_STORE_BYTES = 96 << 20
"""Size of Ray's object store. The store can be small, because vLLM's executor sends only its
configuration through it.
"""

ERROR = re.compile(r"Error\b|Exception\b|assert|\bkilled\b|SIGSEGV|out of memory", re.IGNORECASE)


def start_nodes(on_gpus: bool, folder: Path) -> Any:
    """Start two Ray nodes with one GPU each (or, without GPUs, with one worker slot each).

    Sockets and logs are written to `folder`. This folder's path must be short, because a socket
    path can have at most 107 characters.
    """
    node = {
        "num_cpus": 4,
        "num_gpus": 1,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0", RAY_memory_monitor_refresh_ms="0", RAY_TMPDIR=str(folder)
    )
    from ray.cluster_utils import Cluster

    if not on_gpus:
        os.environ.update(VLLM_OMNI_RAY_ON_CPU="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = before.split(",") if before else ["0", "1"]
    cluster = None
    try:
        for number in range(2):
            if on_gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number]  # inherited by workers
            if cluster is None:
                cluster = Cluster(initialize_head=True, head_node_args=node)
            else:
                cluster.add_node(**node)
    finally:
        if before is None:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    return cluster


def ray_errors(folder: Path, since: float) -> str:
    """Return excerpts from Ray logs that were modified after the time `since` and contain an error:
    the lines around the first error, and the last lines.
    """
    parts = []
    for path in sorted(folder.glob("ray/session_latest/logs/*")):
        if not path.is_file() or path.stat().st_mtime < since:
            continue
        lines = path.read_text(errors="replace").splitlines()
        first = next((number for number, line in enumerate(lines) if ERROR.search(line)), None)
        if first is not None:
            parts += [f"== {path.name}", *lines[max(first - 2, 0) : first + 8], "...", *lines[-12:]]
    return "\n".join(parts)


def dump_stacks(group: int, cluster: Any) -> None:
    """Abort the hanging processes (engine and Ray workers) with SIGABRT, so that each process logs
    its stack.
    """
    os.killpg(group, signal.SIGABRT)
    for node in cluster.list_all_nodes():
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in raylet.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name().startswith("ray::"):
                    process.send_signal(signal.SIGABRT)
    time.sleep(5)


def measure(
    run: str, executor: str, more: list[str], cluster: Any, timeout_s: float, ray_folder: Path
) -> dict[str, Any]:
    """Run lingbot_world.py once. Return its result or, if it fails, how it ended ("timeout" if it
    hung).
    """
    started = time.time()
    script = Path(__file__).with_name("lingbot_world.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(script),
            *RUNS[run],
            "--executor",
            executor,
            "--out",
            folder,
            *more,
        ]
        command.append("--disable-custom-all-reduce")
        environ = {**os.environ, "RAY_ADDRESS": cluster.address, "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
        environ["PYTHONFAULTHANDLER"] = "1"
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ended: int | str = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                dump_stacks(process.pid, cluster)
                # This also kills the engine's processes. Ray stops its own processes.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ended = "timeout"
        files = list(Path(folder).glob("*.json"))
        if ended != 0 or not files:
            failed = {"failed": ended, "log": log.read_text(errors="replace")[-40_000:]}
            if executor == "ray":
                failed["ray_log"] = ray_errors(ray_folder, started)[-20_000:]
            return failed
        return json.loads(files[0].read_text())["result"]


def explain(run: str, executor: str, failed: dict[str, Any]) -> None:
    """Print how a failed run ended, its first error, the end of its log, and Ray's logs."""
    lines = [
        line for line in failed["log"].splitlines() if not line.startswith("Extension modules")
    ]
    errors = [line[:400] for line in lines if ERROR.search(line)]
    print(
        f"{run}: {executor} failed ({failed['failed']}); its errors:",
        *errors[:6],
        "its end:",
        sep="\n",
    )
    print(
        *(line[:400] for line in lines[-12:]),
        failed.get("ray_log", "")[-6000:],
        sep="\n",
        flush=True,
    )


def main() -> None:
    args = make_parser().parse_args()
    more = args.more if not args.no_gpu else [*TINY, *args.more]
    folder = Path(tempfile.mkdtemp(prefix="r", dir="/tmp"))
    results: dict[str, Any] = {}
    cluster = start_nodes(not args.no_gpu, folder)
    try:
        for run in args.runs:
            pair = {
                executor: measure(run, executor, more, cluster, args.timeout_s, folder)
                for executor in ("mp", "ray")
            }
            results[run] = pair
            if failed := [name for name, result in pair.items() if "failed" in result]:
                for executor in failed:
                    explain(run, executor, pair[executor])
                continue
            times = {name: result["chunk_interval_ms"] for name, result in pair.items()}
            pair["equal"] = pair["mp"]["latents_digests"] == pair["ray"]["latents_digests"]
            print(
                f"{run}: {times} ms per chunk, latents {'equal' if pair['equal'] else 'DIFFER'}",
                flush=True,
            )
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    save("ray_two_nodes", {"result": results}, args)
    sys.exit(not all(pair.get("equal") for pair in results.values()))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=list(RUNS), help="ways to split the model"
    )
    parser.add_argument(
        "--no-gpu", action="store_true", help="nodes without GPUs and the tiny model"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=280, help="for each run (default: %(default)s)"
    )
    parser.add_argument("more", nargs="*", help="arguments for lingbot_world.py, behind --")
    add_output_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
