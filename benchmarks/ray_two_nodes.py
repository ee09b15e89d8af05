# SPDX-License-Identifier: Apache-2.0
"""One machine with two GPUs as two Ray nodes: LingBot World over Ray against vLLM's own processes, result and time.

    python benchmarks/ray_two_nodes.py                                              # full size, two GPUs
    python benchmarks/ray_two_nodes.py --no-gpu --runs pipeline -- --layers 2 --height 64 --width 96 --eager

Each node is a Ray node of its own with one GPU, so two ranks are on two nodes: control messages go over TCP, tensors
over NCCL. Runs benchmarks/lingbot_world.py once per way to split and executor; what is behind `--` goes to it. The
latents of both executors must be equal bit for bit. Needs the extra `[ray]`.

Real nodes are not on one machine, and vLLM notices: ranks that share its memory try the all-reduces that are made for
one machine, for which each needs to see the other's GPU. So both executors run with NCCL's alone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, save

RUNS = {
    "pipeline": ["--pipeline-parallel", "2", "--sessions", "2"],
    "sequence": ["--sequence-parallel", "2"],
    "tensor": ["--tensor-parallel", "2"],
}


def start_nodes(on_gpus: bool) -> Any:
    """Two Ray nodes, GPU 0 and GPU 1 (or, without GPUs, one slot for a worker each)."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 4, "num_gpus": 1, "include_dashboard": False, "object_store_memory": 512 << 20}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if not on_gpus:
        os.environ.update(VLLM_OMNI_RAY_ON_CPU="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = before.split(",") if before else ["0", "1"]
    cluster = None
    try:
        for number in range(2):
            if on_gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number]  # the node's workers inherit it
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


def measure(run: str, executor: str, more: list[str], address: str, timeout_s: float) -> dict[str, Any]:
    """Run lingbot_world.py once; returns its result, or how it ended ("timeout" = it hung)."""
    script = Path(__file__).with_name("lingbot_world.py")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(script), *RUNS[run], "--executor", executor, "--out", folder, *more]
        command.append("--disable-custom-all-reduce")
        environ = {**os.environ, "RAY_ADDRESS": address, "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
        log = Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                ended: int | str = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # its engine's processes as well; Ray ends its own
                process.wait()
                ended = "timeout"
        files = list(Path(folder).glob("*.json"))
        if ended != 0 or not files:
            return {"failed": ended, "log": log.read_text(errors="replace")[-40_000:]}
        return json.loads(files[0].read_text())["result"]


def main() -> None:
    args = make_parser().parse_args()
    cluster = start_nodes(not args.no_gpu)
    results: dict[str, Any] = {}
    try:
        for run in args.runs:
            pair = {
                executor: measure(run, executor, args.more, cluster.address, args.timeout_s)
                for executor in ("mp", "ray")
            }
            results[run] = pair
            if failed := [name for name, result in pair.items() if "failed" in result]:
                print(f"{run}: failed with {failed}: {pair[failed[0]]['log'][-4000:]}", flush=True)
                continue
            pair["equal"] = pair["mp"]["latents_digests"] == pair["ray"]["latents_digests"]
            times = {name: pair[name]["chunk_interval_ms"] for name in ("mp", "ray")}
            print(f"{run}: {times} ms per chunk, latents {'equal' if pair['equal'] else 'DIFFER'}", flush=True)
    finally:
        cluster.shutdown()
    save("ray_two_nodes", {"result": results}, args)
    sys.exit(not all(pair.get("equal") for pair in results.values()))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), help="ways to split the model")
    parser.add_argument("--no-gpu", action="store_true", help="nodes without GPUs, to try the script")
    parser.add_argument("--timeout-s", type=float, default=280, help="for each run (default: %(default)s)")
    parser.add_argument("more", nargs="*", help="arguments for lingbot_world.py, behind --")
    add_output_arguments(parser)
    return parser


if __name__ == "__main__":
    main()
