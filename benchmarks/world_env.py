# SPDX-License-Identifier: Apache-2.0
"""Measure world models as environments that are stepped together, one by one, or over HTTP.

    python benchmarks/world_env.py                           # 8 tiny worlds, random weights, 48x32
    python benchmarks/world_env.py --model DIR --size 160x96 --envs 4
    python benchmarks/world_env.py --remote tiny --size 96x64                # over HTTP, on a CPU
    python benchmarks/world_env.py --remote 1.3B --size 832x480              # over HTTP, on a GPU

Without `--remote`, environments on the same engine are stepped together and one by one, alternately
(A B A B ...), so a change in the machine's load affects both methods. A step is one chunk in every
environment. CPU time is summed over this process and the engine. The result is the median ratio
over all pairs.

With `--remote`, `vllm serve` serves causal Wan at full size with random weights on this machine,
and a client steps 1, 4 and 16 environments, with frames and with latents as observations. The run
for each number of environments has its own warm-up (`--warm`).
"""

import argparse
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, save


def processor_s() -> float:
    """Return the CPU time in seconds that this process and all its descendants have used so far."""
    import psutil

    me = psutil.Process()
    return sum(
        times.user + times.system
        for times in (each.cpu_times() for each in (me, *me.children(recursive=True)))
    )


def spread(values: list[float]) -> dict[str, float]:
    return {
        "p50": round(statistics.median(values), 1),
        "min": round(min(values), 1),
        "max": round(max(values), 1),
    }


def measure(envs: list[Any], actions: list[Any]) -> tuple[float, float]:
    """Step every environment once, and return the elapsed time and the CPU time in seconds."""
    wall, processor = time.perf_counter(), processor_s()
    for env, action in zip(envs, actions, strict=True):
        env.step(action)
    return time.perf_counter() - wall, processor_s() - processor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="checkpoint directory (default: a tiny LingBot World)"
    )
    parser.add_argument("--size", default="48x32", help="WIDTHxHEIGHT (default: %(default)s)")
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument(
        "--pairs", type=int, default=15, help="measured steps of each arm (default: %(default)s)"
    )
    parser.add_argument(
        "--warm",
        type=int,
        default=6,
        help="steps before, until windows are full (default: %(default)s)",
    )
    parser.add_argument(
        "--exact", action="store_true", help="omni.batch_invariant: a forward for each environment"
    )
    parser.add_argument(
        "--remote",
        choices=["1.3B", "14B", "tiny"],
        help="over HTTP: size of the served causal Wan",
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16], help="of --remote")
    parser.add_argument("--steps", type=int, default=6, help="of --remote: measured steps of each")
    parser.add_argument("--preset", default="reference", help="of --remote: omni.model.preset")
    parser.add_argument("--name", help="name of the result file (default: by the arguments)")
    add_output_arguments(parser)
    args = parser.parse_args()
    if args.remote is not None:
        run_remote(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.model is None:
            from vllm_omni.model_executor.models.registry import get_family

            args.model = Path(folder) / "world"
            get_family("lingbot_world").make_tiny(args.model, 0, "original")
        run(args)


def run(args: argparse.Namespace) -> None:
    import numpy as np

    from vllm_omni.environments.world import WorldVectorEnv

    width, height = map(int, args.size.split("x"))
    world: dict[str, Any] = {"prompt": "a village", "height": height, "width": width}
    world["image"] = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    together = WorldVectorEnv.load(args.model, args.envs, exact=args.exact, **world)
    single = [WorldVectorEnv(together._engine._llm, 1, **world) for _ in range(args.envs)]
    arms = {"together": [together], "one_after_the_other": single}
    for envs in arms.values():
        for number, env in enumerate(envs):
            env.reset(seed=number)
            env.action_space.seed(number)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in arms}
    load = os.getloadavg()[0]
    for pair in range(args.warm + args.pairs):
        for name, envs in arms.items():
            times = measure(envs, [env.action_space.sample() for env in envs])
            if pair >= args.warm:
                taken[name].append(times)
    for env in (*single, together):  # closing the last environment stops the engine
        env.close()
    pairs = list(zip(taken["one_after_the_other"], taken["together"], strict=True))
    rows = {
        name: {
            kind: spread([1e3 * time[index] for time in times])
            for index, kind in enumerate(("wall_ms", "processor_ms"))
        }
        for name, times in taken.items()
    }
    ratio = {
        kind: round(statistics.median(one[index] / all_[index] for one, all_ in pairs), 2)
        for index, kind in enumerate(("wall", "processor"))
    }
    frames = args.envs * together.info.chunk_frames
    result = {
        "envs": args.envs,
        "size": args.size,
        "exact": args.exact,
        "pairs": args.pairs,
        "rows": rows,
        "ratio": ratio,
        "frames_per_s": round(1e3 * frames / rows["together"]["wall_ms"]["p50"], 1),
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "note": "the machine was shared: other work ran beside both arms",
    }
    save(args.name or f"world_env{'_exact' if args.exact else ''}", {"result": result}, args)


def run_remote(args: argparse.Namespace) -> None:
    """Serve a model, and step its environments over HTTP."""
    import streaming_wan

    from vllm_omni.entrypoints.cli import demo

    width, height = map(int, args.size.split("x"))
    most = max(args.counts)
    omni = {
        "height": height,
        "width": width,
        "max_sessions": most,
        "max_requests_per_step": most,
        "model": {"preset": args.preset},
    }
    tiny = args.remote == "tiny"
    flags = ["--additional-config", json.dumps({"omni": omni}), "--load-format", "dummy"]
    flags += ["--max-num-seqs", str(most), "--dtype", "float32" if tiny else "bfloat16"]
    with tempfile.TemporaryDirectory() as folder:
        model, log = Path(folder) / "stream", Path(folder) / "server.log"
        streaming_wan.write_checkpoint(model, args.remote)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        began_s = time.perf_counter()
        with demo.server(model, port, height, width, log, extra=flags) as process:
            demo.wait_until_healthy(process, 600)
            rows = [
                {"envs": count, "observation": observation, **step_remote(port, count, kind, args)}
                for count in args.counts
                for observation, kind in (
                    ("frames", {"latents": False}),
                    ("latents", {"observation": "latents"}),
                )
            ]
        started = {"start_and_run_s": round(time.perf_counter() - began_s, 1)}
    result = {"model": args.remote, "size": args.size, "preset": args.preset, "rows": rows}
    save(args.name or "world_env_remote", {"result": {**result, **started}}, args)


def step_remote(
    port: int, count: int, kind: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Step `count` environments on the server, and return the step times."""
    from vllm_omni.environments.world import WorldVectorEnv

    env = WorldVectorEnv.connect(f"http://127.0.0.1:{port}", count, prompt="a coast road", **kind)
    width, height = map(int, args.size.split("x"))
    env.reset(seed=0)
    actions = env.action_space.sample()
    times_s = []
    for step in range(args.warm + args.steps):
        began_s = time.perf_counter()
        observations = env.step(actions)[0]
        if step >= args.warm:
            times_s.append(time.perf_counter() - began_s)
    env.close()
    steps_per_s = count / statistics.median(times_s)
    row = {
        "step_ms": spread([1e3 * time_s for time_s in times_s]),
        "environment_steps_per_s": round(steps_per_s, 3),
        "frames_per_s": round(steps_per_s * env.info.chunk_frames, 1),
        "reply_mb": round(observations.nbytes / 1e6, 2),
    }
    print(f"{count} environments {width}x{height} {kind}: {row}", flush=True)
    return row


if __name__ == "__main__":
    main()
