# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of saving and restoring a session, compared with copying the session's bytes.

    # the tiny LingBot World on this machine
    python benchmarks/session_snapshot.py
    python benchmarks/session_snapshot.py --height 480 --width 832   # the same with more bytes
    # the released architecture, random weights (one GPU)
    python benchmarks/session_snapshot.py --full-size

Sessions are saved and restored in the real engine (`collective_rpc`). For comparison, the worker
also copies the same bytes from and to the same device and folder, without names, a header or
checks:

- plain (`ratio`): all tensors are copied, one after another, from the device to the host and into a
  new file, and from that file into fresh buffers on the device;
- one buffer (`one_buffer_ratio`): the same number of bytes, already contiguous in host memory, is
  written to a new file in one call and read into one fresh buffer. No file access can cost less. A
  full-size run does not measure the copy of one buffer;
- memory (`memory_ratio`): all tensors are copied to fresh host memory and back, without a file. A
  full-size run does not measure the copy in memory.

A ratio is the time of the whole snapshot, including the front end but without transport, divided by
the time of the copy. Snapshots and copies alternate. Each ratio is the median over pairs of one
snapshot and one copy. If there is a RAM disk, the file is on it (`--folder`), because disk speed is
not part of this measurement. When an operation ends, the measurements are printed to stderr and
saved to the result file (with `complete`: false), at most once per second, so an interrupted run
still leaves results.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# This setting allows `copy_session` below to be sent to the worker.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, run_request, running_engine, save
from lingbot_world import write_checkpoint

TARGET_RATIO = 1.2
RAM_DISK = Path("/dev/shm")
_QUIET_S = 1.0


def copy_session(worker: Any, session_id: str, path: str, what: str) -> float:
    """Run in the worker: copy a session's tensors in one direction, and return the copy's duration
    in milliseconds.

    `what` is `to_file` or `from_file` (which removes the file), `one_to_file` or `one_from_file`
    (the same with contiguous memory), `out` (to fresh host memory), or `back` (from that host
    memory into fresh device memory).
    """
    import torch

    tensors = list(worker.model_runner.sessions.get(session_id).tensors().values())
    cuda = worker.model_runner.device.type == "cuda"
    nbytes = sum(tensor.nbytes for tensor in tensors)

    def as_bytes(host: torch.Tensor) -> Any:
        return host.view(-1).view(torch.uint8).numpy()

    def all_of(call: Any, array: Any) -> None:
        """Repeat a read or write until all bytes are transferred, because one call transfers at
        most 2 GiB.
        """
        done = 0
        while done < len(array):
            done += call(array[done:])

    def to_file() -> None:
        with open(path, "wb", buffering=0) as file:
            for tensor in tensors:
                all_of(file.write, as_bytes(tensor.cpu().contiguous()))

    def from_file() -> list[Any]:
        back = []
        with open(path, "rb", buffering=0) as file:
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype)
                all_of(file.readinto, as_bytes(host))
                back.append(host.to(tensor.device))
        return back

    def one_to_file(whole: Any) -> None:
        with open(path, "wb", buffering=0) as file:
            all_of(file.write, whole)

    def one_from_file() -> Any:
        with open(path, "rb", buffering=0) as file:
            fresh = torch.empty(nbytes, dtype=torch.uint8)
            all_of(file.readinto, as_bytes(fresh))
        return fresh

    def out() -> list[Any]:
        return [torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in tensors]

    def back(host: list[Any]) -> list[Any]:
        return [torch.empty_like(t).copy_(h) for t, h in zip(tensors, host, strict=True)]

    prepared: list[Any] = []
    if what == "one_to_file":
        prepared = [
            torch.cat([t.cpu().contiguous().view(-1).view(torch.uint8) for t in tensors]).numpy()
        ]
    elif what == "back":
        prepared = [out()]
    work: Any = {
        "to_file": to_file,
        "from_file": from_file,
        "one_to_file": one_to_file,
        "one_from_file": one_from_file,
        "out": out,
        "back": back,
    }[what]
    with torch.inference_mode():
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = work(*prepared)
        if cuda:
            torch.cuda.synchronize()
        ms = (time.perf_counter() - start) * 1e3
    del result
    if what.endswith("from_file"):
        os.unlink(path)
    if cuda:
        torch.cuda.empty_cache()  # the next operation starts with an empty cache
    return ms


def timed_call(worker: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """Run in the worker: call one method, and return its result and the milliseconds that it
    took.
    """
    start = time.perf_counter()
    response = getattr(worker, method)(*args)
    return [(time.perf_counter() - start) * 1e3, response]


COPIES = {
    "plain": ("to_file", "from_file"),
    "one_buffer": ("one_to_file", "one_from_file"),
    "memory": ("out", "back"),
}
RATIO_NAMES = {"plain": "ratio", "one_buffer": "one_buffer_ratio", "memory": "memory_ratio"}


class Progress:
    """Measurements so far, saved at most once per second. `samples` contains milliseconds by
    operation name.
    """

    def __init__(self, args: argparse.Namespace, info: dict[str, Any], name: str) -> None:
        self.args, self.info, self.name = args, info, name
        self.samples: dict[str, list[float]] = {}
        self.warm_up: dict[str, list[float]] = {}
        self._start = self._noted = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start

    def say(self, text: str) -> None:
        print(f"[{self.elapsed_s:6.1f} s] {text}", file=sys.stderr, flush=True)

    def note(self, values: dict[str, float], *, warm_up: bool) -> None:
        for name, value in values.items():
            (self.warm_up if warm_up else self.samples).setdefault(name, []).append(value)
        if time.perf_counter() - self._noted < _QUIET_S:
            return  # with small sessions, saving more often would disturb the measurement
        self.say(
            ", ".join(f"{name} {value:.1f} ms" for name, value in values.items())
            + " (warm-up)" * warm_up
        )
        save_quietly(self.name, {"result": self.result(complete=False)}, self.args)
        self._noted = time.perf_counter()

    def result(self, *, complete: bool) -> dict[str, Any]:
        samples = self.samples or self.warm_up
        median = {name: statistics.median(values) for name, values in samples.items()}
        nbytes = self.info.get("file_bytes", 0)
        return {
            **self.info,
            "complete": complete,
            "only_warm_up": not self.samples,
            "repeats": max((len(values) for values in self.samples.values()), default=0),
            "ms": {name: round(value, 3) for name, value in median.items()},
            "gib_per_s": {
                name: round(nbytes / 2**30 / (value / 1e3), 2)
                for name, value in median.items()
                if not name.endswith("_call")
            },
            **{
                RATIO_NAMES[copy]: ratios(samples, *names)
                for copy, names in COPIES.items()
                if f"copy_{names[0]}" in samples
            },
            "target_ratio": TARGET_RATIO,
            "samples_ms": {
                name: [round(value, 3) for value in values] for name, values in self.samples.items()
            },
            "warm_up_ms": {
                name: [round(value, 3) for value in values] for name, values in self.warm_up.items()
            },
        }


def save_quietly(name: str, result: dict[str, Any], args: argparse.Namespace) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        save(name, result, args)


def ratios(samples: dict[str, list[float]], to: str, back: str) -> dict[str, float]:
    """Return the median ratio of the snapshot time to the copy time, for saving, for restoring and
    for both together.
    """
    saved, restored = samples.get("save", []), samples.get("restore", [])
    out, into = samples.get(f"copy_{to}", []), samples.get(f"copy_{back}", [])
    pairs = {
        "save": list(zip(saved, out, strict=False)),
        "restore": list(zip(restored, into, strict=False)),
    }
    pairs["both"] = [
        (a + b, c + d) for (a, c), (b, d) in zip(pairs["save"], pairs["restore"], strict=False)
    ]
    return {
        name: round(statistics.median(ours / plain for ours, plain in values), 3)
        for name, values in pairs.items()
        if values
    }


async def run(model: Path, folder: Path, name: str, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from vllm_omni.inputs import DiffusionParams
    from vllm_omni.session_files.snapshot_exchange import (
        package_version,
        restore_exchange,
        run_exchange_async,
        save_exchange,
    )

    omni: dict[str, Any] = {"height": args.height, "width": args.width, "max_sessions": 4}
    omni["model"] = json.loads(args.model_options)
    engine_args: dict[str, Any] = {"enforce_eager": True}
    if args.full_size:
        engine_args |= {
            "load_format": "dummy",
            "gpu_memory_utilization": args.gpu_memory_utilization,
        }
    image = torch.full((args.height, args.width, 3), 128, dtype=torch.uint8)
    info: dict[str, Any] = {
        "size": [args.height, args.width],
        "chunks": args.chunks,
        "layers": args.layers if args.full_size else None,
        "on_ram_disk": folder.is_relative_to(RAM_DISK),
    }
    progress = Progress(args, info, name)
    progress.say("starting the engine")
    async with running_engine(model, omni, **engine_args) as engine:
        progress.say("the engine is up")
        for index in range(args.chunks):
            params = DiffusionParams(
                session_id="walk",
                chunk_index=index,
                prompt="a coast road" if index == 0 else None,
                seed=1 if index == 0 else None,
                height=args.height,
                width=args.width,
                actions=[["w"], ["w", "j"], []],
            )
            await run_request(
                engine, params, {"image": image} if index == 0 else None, f"walk-{index}"
            )
            progress.say(f"chunk {index} is done")

        async def without_transport(exchange: Any) -> tuple[float, float]:
            """Return the milliseconds that the front end and the worker take, and the milliseconds
            that the caller measures, which include transport.
            """
            inside = waited = 0.0

            async def rpc(call: Any) -> list[Any]:
                nonlocal inside, waited
                requested = time.perf_counter()
                ((ms, response),) = await engine.collective_rpc(
                    timed_call, args=(call.method, call.args)
                )
                waited += (time.perf_counter() - requested) * 1e3
                inside += ms
                return [response]

            start = time.perf_counter()
            await run_exchange_async(exchange, rpc)
            total = (time.perf_counter() - start) * 1e3
            return total - waited + inside, total

        async def copied(what: str) -> dict[str, float]:
            (ms,) = await engine.collective_rpc(
                copy_session, args=("walk", str(folder / "copy"), what)
            )
            return {f"copy_{what}": ms}

        async def saved() -> dict[str, float]:
            inside, total = await without_transport(save_exchange("walk", path, package_version()))
            info["file_bytes"] = path.stat().st_size
            return {"save": inside, "save_call": total}

        async def restored() -> dict[str, float]:
            inside, total = await without_transport(restore_exchange("copy", path))
            await engine.collective_rpc("close_session", args=("copy",))
            return {"restore": inside, "restore_call": total}

        (stats,) = await engine.collective_rpc("session_stats")
        info["session_bytes"] = stats["bytes"]
        reply = (await engine.collective_rpc("describe_session", args=("walk",)))[0]
        if "error" in reply:
            raise RuntimeError(f"the session cannot be saved: {reply['error']}")
        path = folder / "walk.safetensors"
        round_s = 0.0
        for number in range(-args.warm_up, args.repeats):
            if (
                number > -args.warm_up
                and args.time_limit_s
                and progress.elapsed_s + round_s > args.time_limit_s
            ):
                progress.say("no time for another round")
                break
            started = progress.elapsed_s
            for copy in args.copies:
                for what in COPIES[copy] if args.restore else COPIES[copy][:1]:
                    progress.note(await copied(what), warm_up=number < 0)
            progress.note(await saved(), warm_up=number < 0)
            if args.restore:
                progress.note(await restored(), warm_up=number < 0)
            path.unlink()
            round_s = progress.elapsed_s - started
        progress.say("stopping the engine")
    return progress.result(complete=True)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--full-size", action="store_true", help="the released architecture with random weights"
    )
    parser.add_argument("--layers", type=int, default=40, help="of the full-size model")
    parser.add_argument("--height", type=int, help="pixels (default: 64, full size 480)")
    parser.add_argument("--width", type=int, help="pixels (default: 96, full size 832)")
    parser.add_argument(
        "--chunks",
        type=int,
        default=7,
        help="chunks before the snapshot; 7 fill the default window",
    )
    parser.add_argument("--repeats", type=int, help="rounds (default: 21, full size 2)")
    parser.add_argument("--warm-up", type=int, help="rounds before them (default: 3, full size 1)")
    parser.add_argument(
        "--copies",
        nargs="+",
        choices=list(COPIES),
        help="what to compare with (default: all, full size plain)",
    )
    parser.add_argument(
        "--time-limit-s", type=float, help="begin no round that would end later, from the start on"
    )
    parser.add_argument(
        "--no-restore", dest="restore", action="store_false", help="a second session does not fit"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where the file lies (default: a RAM disk, else the temporary folder)",
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.95)
    parser.add_argument(
        "--model-options", default="{}", help="JSON, as under additional_config omni.model"
    )
    parser.add_argument("--name", help="name of the result file")
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    from vllm_omni.model_executor.models.registry import get_family

    args.height = args.height or (480 if args.full_size else 64)
    args.width = args.width or (832 if args.full_size else 96)
    args.repeats = (2 if args.full_size else 21) if args.repeats is None else args.repeats
    args.warm_up = (1 if args.full_size else 3) if args.warm_up is None else args.warm_up
    args.copies = args.copies or (["plain"] if args.full_size else list(COPIES))
    name = args.name or ("session_snapshot_full_size" if args.full_size else "session_snapshot")
    base = args.folder or (RAM_DISK if os.access(RAM_DISK, os.W_OK) else None)
    with (
        tempfile.TemporaryDirectory() as checkpoint,
        tempfile.TemporaryDirectory(dir=base) as folder,
    ):
        model = Path(checkpoint) / "world"
        if args.full_size:
            write_checkpoint(model, "fast", args.layers)
        else:
            get_family("lingbot_world").make_tiny(model, 0, "original")
        result = asyncio.run(run(model, Path(folder), name, args))
    save(name, {"result": result}, args)
    print(
        f"\n{result['file_bytes']} bytes; save {result['ms']['save']} ms, ratios "
        f"{result.get('ratio')} (target <= 1.2)"
    )


if __name__ == "__main__":
    main()
