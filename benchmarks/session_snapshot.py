# SPDX-License-Identifier: Apache-2.0
"""What it costs to save a session to a file and to restore it, against copying its bytes.

    python benchmarks/session_snapshot.py                       # the tiny LingBot World on this machine
    python benchmarks/session_snapshot.py --height 480 --width 832   # the same with more bytes
    python benchmarks/session_snapshot.py --full-size           # the released architecture, random weights (one GPU)
    python benchmarks/session_snapshot.py --full-size --layers 2 --height 64 --width 96   # try it without a GPU

Saving and restoring go through the real engine (`collective_rpc`). Beside each, in the worker as well, the plainest
copy of the same bytes: every tensor from its device to the host and into a new file in the same directory, one after
the other, and from that file into fresh buffers on the device. That copy has no names, no header and no checks.
`ratio` is the whole snapshot's time without transport, the front end's share included, over the copy's;
`memory_ratio` the same over a copy that leaves the file out. All are medians of pairs taken in turn. The file lies in a
RAM disk if there is one, because the cost of a disk is not ours.
"""

import argparse
import asyncio
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
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `copy_session` below is sent to the worker

sys.path.insert(0, str(Path(__file__).parent))
from common import add_output_arguments, run_request, running_engine, save
from lingbot_world import write_checkpoint

TARGET_RATIO = 1.2
RAM_DISK = Path("/dev/shm")


def copy_session(worker: Any, session_id: str, path: str) -> dict[str, float]:
    """In the worker: ms to copy a session's tensors to a file and back, and to host memory and back."""
    import torch

    tensors = list(worker.model_runner.sessions.get(session_id).tensors().values())
    cuda = worker.model_runner.device.type == "cuda"

    def timed(work: Any) -> tuple[float, Any]:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        result = work()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, result

    def as_bytes(host: torch.Tensor) -> Any:
        return host.view(-1).view(torch.uint8).numpy()

    def to_file() -> None:
        with open(path, "wb", buffering=0) as file:
            for tensor in tensors:
                file.write(as_bytes(tensor.cpu().contiguous()))

    def from_file() -> list[Any]:
        back = []
        with open(path, "rb", buffering=0) as file:
            for tensor in tensors:
                host = torch.empty(tensor.shape, dtype=tensor.dtype)
                file.readinto(as_bytes(host))
                back.append(host.to(tensor.device))
        return back

    def in_memory() -> tuple[float, float]:
        out_ms, host = timed(lambda: [torch.empty(t.shape, dtype=t.dtype).copy_(t) for t in tensors])
        back_ms, _ = timed(lambda: [torch.empty_like(t).copy_(h) for t, h in zip(tensors, host, strict=True)])
        return out_ms, back_ms

    with torch.inference_mode():
        out_ms, back_ms = in_memory()
        to_file_ms, _ = timed(to_file)
        from_file_ms, _ = timed(from_file)
    os.unlink(path)
    return {"out_ms": out_ms, "back_ms": back_ms, "to_file_ms": to_file_ms, "from_file_ms": from_file_ms}


def timed_call(worker: Any, method: str, args: tuple[Any, ...]) -> list[Any]:
    """In the worker: one RPC and its milliseconds."""
    start = time.perf_counter()
    answer = getattr(worker, method)(*args)
    return [(time.perf_counter() - start) * 1e3, answer]


async def run(model: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from vllm_omni.inputs import DiffusionParams
    from vllm_omni.snapshot_exchange import package_version, restore_exchange, run_exchange_async, save_exchange

    omni: dict[str, Any] = {"height": args.height, "width": args.width, "max_sessions": 4}
    omni["model"] = json.loads(args.model_options)
    engine_args: dict[str, Any] = {"enforce_eager": True}
    if args.full_size:
        engine_args |= {"load_format": "dummy", "gpu_memory_utilization": args.gpu_memory_utilization}
    image = torch.full((args.height, args.width, 3), 128, dtype=torch.uint8)
    async with running_engine(model, omni, **engine_args) as engine:
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
            await run_request(engine, params, {"image": image} if index == 0 else None, f"walk-{index}")

        async def without_transport(exchange: Any) -> tuple[float, float]:
            """(ms of the front end and inside the worker, ms for the caller, transport included)."""
            inside = waited = 0.0

            async def rpc(call: Any) -> list[Any]:
                nonlocal inside, waited
                asked = time.perf_counter()
                ((ms, answer),) = await engine.collective_rpc(timed_call, args=(call.method, call.args))
                waited += (time.perf_counter() - asked) * 1e3
                inside += ms
                return [answer]

            start = time.perf_counter()
            await run_exchange_async(exchange, rpc)
            total = (time.perf_counter() - start) * 1e3
            return total - waited + inside, total

        samples: dict[str, list[float]] = {}

        def note(**values: float) -> None:
            for name, value in values.items():
                samples.setdefault(name, []).append(value)

        file_bytes = 0
        for number in range(-args.warm_up, args.repeats):
            path = folder / f"{number}.safetensors"
            (copied,) = await engine.collective_rpc(copy_session, args=("walk", str(folder / "copy")))
            saved = await without_transport(save_exchange("walk", path, package_version()))
            file_bytes = path.stat().st_size
            restored = None
            if args.restore:
                restored = await without_transport(restore_exchange("copy", path))
                await engine.collective_rpc("close_session", args=("copy",))
            path.unlink()
            if number >= 0:
                note(copy_out=copied["out_ms"], copy_back=copied["back_ms"])
                note(copy_to_file=copied["to_file_ms"], copy_from_file=copied["from_file_ms"])
                note(save=saved[0], save_call=saved[1])
                if restored is not None:
                    note(restore=restored[0], restore_call=restored[1])
        (stats,) = await engine.collective_rpc("session_stats")
    median = {name: statistics.median(values) for name, values in samples.items()}

    def ratios(to: str, back: str) -> dict[str, float]:
        """Medians over pairs of our time over a copy's: saving, restoring, both together."""
        pairs = {"save": (samples["save"], samples[to])}
        if args.restore:
            pairs["restore"] = (samples["restore"], samples[back])
            pairs["both"] = (
                [a + b for a, b in zip(samples["save"], samples["restore"], strict=True)],
                [a + b for a, b in zip(samples[to], samples[back], strict=True)],
            )
        return {
            name: round(statistics.median(a / b for a, b in zip(ours, plain, strict=True)), 3)
            for name, (ours, plain) in pairs.items()
        }

    return {
        "size": [args.height, args.width],
        "chunks": args.chunks,
        "layers": args.layers if args.full_size else None,
        "repeats": args.repeats,
        "on_ram_disk": folder.is_relative_to(RAM_DISK),
        "file_bytes": file_bytes,
        "session_bytes": stats["bytes"],
        "ms": {name: round(value, 3) for name, value in median.items()},
        "gib_per_s": {name: round(file_bytes / 2**30 / (median[name] / 1e3), 2) for name in ("copy_to_file", "save")},
        "ratio": ratios("copy_to_file", "copy_from_file"),
        "memory_ratio": ratios("copy_out", "copy_back"),
        "target_ratio": TARGET_RATIO,
    }


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full-size", action="store_true", help="the released architecture with random weights")
    parser.add_argument("--layers", type=int, default=40, help="of the full-size model")
    parser.add_argument("--height", type=int, help="pixels (default: 64, full size 480)")
    parser.add_argument("--width", type=int, help="pixels (default: 96, full size 832)")
    parser.add_argument("--chunks", type=int, default=7, help="chunks before the snapshot; 7 fill the default window")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--no-restore", dest="restore", action="store_false", help="a second session does not fit")
    parser.add_argument(
        "--folder", type=Path, help="where the file lies (default: a RAM disk, else the temporary folder)"
    )
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.95)
    parser.add_argument("--model-options", default="{}", help="JSON, as under additional_config omni.model")
    parser.add_argument("--name", help="name of the result file")
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    from vllm_omni.model_executor.models.registry import get_family

    args.height = args.height or (480 if args.full_size else 64)
    args.width = args.width or (832 if args.full_size else 96)
    base = args.folder or (RAM_DISK if os.access(RAM_DISK, os.W_OK) else None)
    with tempfile.TemporaryDirectory() as checkpoint, tempfile.TemporaryDirectory(dir=base) as folder:
        model = Path(checkpoint) / "world"
        if args.full_size:
            write_checkpoint(model, args.layers)
        else:
            get_family("lingbot_world").make_tiny(model, 0, "original")
        result = asyncio.run(run(model, Path(folder), args))
    name = args.name or ("session_snapshot_full_size" if args.full_size else "session_snapshot")
    save(name, {"result": result}, args)
    print(f"\n{result['file_bytes']} bytes; save {result['ms']['save']} ms, ratios {result['ratio']} (target <= 1.2)")


if __name__ == "__main__":
    main()
