# SPDX-License-Identifier: Apache-2.0
"""Measure the end-to-end frame rate of one or several streams, for every supported way to split a
model across several GPUs.

    python benchmarks/pipeline_parallel.py --model causal_wan_1_3b \\
        --rows one_gpu vae_stage ulysses pp2
    python benchmarks/pipeline_parallel.py --model lingbot_world \\
        --rows ulysses4 ulysses4_vae_parallel
    # every row that the machine has GPUs for
    python benchmarks/pipeline_parallel.py --model causal_wan_14b
    # try it without a GPU
    python benchmarks/pipeline_parallel.py --tiny

Random weights with the released shapes give the same times as trained weights. Each chunk is
generated at 480x832 with four denoise steps, a clean-context pass and the exact VAE decode. Chunks
are measured end to end, from the request to the uint8 frames. Each row uses a separate engine and
is saved as soon as it is complete. Rows that an earlier run on the same day wrote to the same
result file are retained. A session requests its next chunk while the previous chunk is running.
Steady-state values are medians over all chunks after the window is full. `latents_digests` are the
digests of the latents of a stream's first two chunks. Rows with the same arithmetic (one GPU,
pipeline stages, a VAE stage) must have equal digests. Rows with different steps or a different
number of ranks within a stage have different digests. (Frames cannot be compared instead, because a
decoder with random weights turns all latents into the same grey.)
"""

import argparse
import asyncio
import dataclasses
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")

sys.path.insert(0, str(Path(__file__).parent))
import lingbot_world
import streaming_wan
from common import (
    HUGE_PAGES,
    IDLE_S,
    add_output_arguments,
    add_serving_arguments,
    add_tracing_arguments,
    chunk_rate,
    close_session,
    command_line,
    hardware,
    kernel_times,
    precision_of,
    restart_with,
    run_chunks,
    run_request,
    running_engine,
    save,
    trace_folder,
    tracing,
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to use the GPUs. Each stage has `ranks` ranks, which split every layer with sequence
    parallelism (Ulysses) or, if `sequence` is False, with tensor parallelism. If `vae_parallel` is
    set, the ranks also split the decode. Otherwise, only the first of these ranks decodes.
    `replicas` is the number of data-parallel copies across which the `sessions` streams are spread.

    If `matched_steps` is not 0, the stream uses causal Wan's noise-matched cache and this number of
    denoise steps, and keeps `chunks_in_flight` chunks in flight. If it is 0, the model uses its own
    cache and steps. With `temporal`, each stage runs one of the steps.
    """

    ranks: int = 1
    stages: int = 1
    replicas: int = 1
    vae_stage: bool = False
    vae_parallel: bool = False
    sequence: bool = True
    sessions: int = 1
    matched_steps: int = 0
    chunks_in_flight: int = 1
    temporal: bool = False

    @property
    def model_options(self) -> dict[str, Any]:
        if not self.matched_steps:
            return {}
        steps = [1000, 750, 500, 250][: self.matched_steps]
        video_steps = [700, 500, 400, 200][: self.matched_steps]
        return {
            "cache": "noise_matched",
            "denoising_steps": steps,
            "video_denoising_steps": video_steps,
        }

    @property
    def num_gpus(self) -> int:
        return self.ranks * self.stages * self.replicas


ROWS = {
    "one_gpu": Row(),
    "vae_stage": Row(stages=2, vae_stage=True),
    "ulysses": Row(ranks=2),
    "ulysses_vae_parallel": Row(ranks=2, vae_parallel=True),
    "ulysses_vae_parallel_2_replicas": Row(ranks=2, replicas=2, vae_parallel=True, sessions=2),
    "tensor": Row(ranks=2, sequence=False),
    "tensor_vae_parallel": Row(ranks=2, sequence=False, vae_parallel=True),
    "pp2": Row(stages=2),
    "pp2_2_sessions": Row(stages=2, sessions=2),
    "vae_stage_2_sessions": Row(stages=2, vae_stage=True, sessions=2),
    "vae_stage_2_replicas": Row(stages=2, replicas=2, vae_stage=True, sessions=2),
    "pp2_vae_stage_2_sessions": Row(stages=3, vae_stage=True, sessions=2),
    "pp3_vae_stage_3_sessions": Row(stages=4, vae_stage=True, sessions=3),
    "ulysses2_vae_stage": Row(ranks=2, stages=2, vae_stage=True),
    "ulysses2_vae_stage_vae_parallel": Row(ranks=2, stages=2, vae_stage=True, vae_parallel=True),
    "pp2_ulysses2_2_sessions": Row(ranks=2, stages=2, sessions=2),
    "pp2_tensor2_2_sessions": Row(ranks=2, stages=2, sequence=False, sessions=2),
    "ulysses4": Row(ranks=4),
    "ulysses4_vae_parallel": Row(ranks=4, vae_parallel=True),
    "ulysses4_vae_parallel_2_sessions": Row(ranks=4, vae_parallel=True, sessions=2),
    "pp4_4_sessions": Row(stages=4, sessions=4),
    "ulysses4_vae_stage": Row(ranks=4, stages=2, vae_stage=True),
    "matched2_one_gpu": Row(matched_steps=2),
    "matched2_one_gpu_2_chunks": Row(matched_steps=2, chunks_in_flight=2),
    "matched2_pp2_2_chunks": Row(stages=2, matched_steps=2, chunks_in_flight=2),
    "matched2_temporal2": Row(stages=2, matched_steps=2, chunks_in_flight=2, temporal=True),
    "matched2_temporal2_ulysses2": Row(
        ranks=2, stages=2, vae_parallel=True, matched_steps=2, chunks_in_flight=2, temporal=True
    ),
    "matched4_one_gpu": Row(matched_steps=4),
    "matched4_pp2_2_chunks": Row(stages=2, matched_steps=4, chunks_in_flight=2),
    "matched4_pp4_4_chunks": Row(stages=4, matched_steps=4, chunks_in_flight=4),
    "matched4_temporal4": Row(stages=4, matched_steps=4, chunks_in_flight=4, temporal=True),
    "matched2_vae_stage": Row(stages=2, vae_stage=True, matched_steps=2, chunks_in_flight=2),
    "matched2_vae_stage_3_chunks": Row(
        stages=2, vae_stage=True, matched_steps=2, chunks_in_flight=3
    ),
    "matched2_temporal2_vae_stage": Row(
        stages=3, vae_stage=True, matched_steps=2, chunks_in_flight=2, temporal=True
    ),
    "matched3_temporal3_vae_stage": Row(
        stages=4, vae_stage=True, matched_steps=3, chunks_in_flight=3, temporal=True
    ),
    "matched4_pp3_vae_stage": Row(stages=4, vae_stage=True, matched_steps=4, chunks_in_flight=4),
    "matched4_temporal4_one_chunk": Row(stages=4, matched_steps=4, temporal=True),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to measure. `write` creates the checkpoint directory without weights, `options` are
    the options under `omni.model`, and `fields` are the fields that every request contains.
    """

    write: Callable[[Path], None]
    options: dict[str, Any]
    fields: dict[str, Any]
    image: bool = False
    dtype: str = "bfloat16"


def _wan(size: str, dtype: str = "bfloat16") -> Model:
    options = {"window_frames": 9, "sink_frames": 3, "video_input": False}
    return Model(lambda root: streaming_wan.write_checkpoint(root, size), options, {}, dtype=dtype)


MODELS = {
    "causal_wan_1_3b": _wan("1.3B"),
    "causal_wan_14b": _wan("14B"),
    "lingbot_world": Model(
        lambda root: lingbot_world.write_checkpoint(root, "fast"),
        {"text_encoder_device": "cpu"},
        {"actions": [["w"], ["w", "j"], ["w"]]},
        image=True,
    ),
    "tiny": _wan("tiny", "float32"),
}


SHARED_GPUS = {
    "worker_cls": "vllm_omni.worker.SharedGPUWorker",
    "distributed_executor_backend": "mp",
}


class RankClient:
    """Client for one data-parallel rank of an engine. The client calls `add_request`, because
    vLLM's `encode` has no argument for the rank.
    """

    def __init__(self, engine: Any, rank: int) -> None:
        self._engine, self._rank = engine, rank

    async def encode(self, prompt: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        queue = await self._engine.add_request(
            request_id, prompt, params, data_parallel_rank=self._rank
        )
        try:
            yield queue.get_nowait() or await queue.get()
        finally:
            queue.close()


async def measure(
    model: Model, folder: Path, row: Row, traces: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one engine: a warm-up stream, and then `row.sessions` streams at the same time."""
    import torch

    from vllm_omni.inputs import DiffusionParams

    options = {**model.options, **row.model_options, **json.loads(args.model_options)}
    if row.ranks > 1 and row.sequence:
        options["sequence_parallel"] = True
    if not torch.cuda.is_available():
        cores = os.cpu_count() or 1
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = (
            "|".join(str(rank % cores) for rank in range(row.num_gpus))
            if row.num_gpus > 1
            else "auto"
        )
    image = torch.randint(
        0, 256, (args.height, args.width, 3), dtype=torch.uint8, generator=torch.Generator()
    )

    def request(name: str, index: int) -> tuple[dict[str, Any], Any]:
        first = {"prompt": "a coast road in the evening", "seed": 1} if index == 0 else {}
        size = {"height": args.height, "width": args.width}
        return {**model.fields, **size, **first}, {
            "image": image
        } if model.image and index == 0 else None

    def latents_of(name: str, index: int) -> tuple[dict[str, Any], Any]:
        fields, tensors = request(name, index)
        return {**fields, "output": "latents"}, tensors

    async def traced_chunk(index: int) -> None:
        fields, tensors = request("traced", index)
        params = DiffusionParams(session_id="traced", chunk_index=index, **fields)
        await run_request(engine, params, tensors, f"traced-{index}")

    omni = {
        "height": args.height,
        "width": args.width,
        "model": options,
        "max_sessions": row.sessions + 1,
        "vae_stage": row.vae_stage,
        "vae_parallel": row.vae_parallel,
        "chunks_in_flight": row.chunks_in_flight,
        "pipeline": "temporal" if row.temporal else "blocks",
        **json.loads(args.omni_options),
    }
    precision = precision_of(args)
    if args.dtype == "auto":
        precision["dtype"] = model.dtype
    loading = time.perf_counter()
    async with running_engine(
        folder,
        omni,
        enforce_eager=args.eager,
        load_format="dummy",
        tensor_parallel_size=row.ranks,
        pipeline_parallel_size=row.stages,
        data_parallel_size=row.replicas,
        gpu_memory_utilization=args.gpu_memory_utilization,
        **(SHARED_GPUS if args.share_gpus else {}),
        **precision,
        **tracing(args, traces),
    ) as engine:
        load_s = time.perf_counter() - loading
        clients = (
            [RankClient(engine, rank) for rank in range(row.replicas)]
            if row.replicas > 1
            else [engine]
        )
        first, *_ = await asyncio.gather(
            *(run_chunks(client, "first", 2, request) for client in clients)
        )
        await asyncio.gather(*(close_session(client, "first") for client in clients))
        latents, *_ = await asyncio.gather(
            *(run_chunks(client, "latents", 2, latents_of) for client in clients)
        )
        await asyncio.gather(*(close_session(client, "latents") for client in clients))
        await asyncio.sleep(IDLE_S)
        streams = await asyncio.gather(
            *(
                run_chunks(
                    clients[number % len(clients)],
                    f"stream{number}",
                    args.chunks,
                    request,
                    row.chunks_in_flight,
                )
                for number in range(row.sessions)
            )
        )
        memory = await engine.collective_rpc("device_memory")
        sessions = await engine.collective_rpc("session_stats")
        kernels = None
        if args.kernels:
            for number in range(row.sessions):
                await close_session(clients[number % len(clients)], f"stream{number}")
            kernels = await kernel_times(engine, traces, traced_chunk, args.warm_chunks)
    rates = [chunk_rate(stream, args.warm_chunks) for stream in streams]
    return {
        **dataclasses.asdict(row),
        "command": command_line(),
        "hardware": hardware(),
        "num_gpus": row.num_gpus,
        "fps_all_sessions": round(sum(rate["fps"] for rate in rates), 2),
        **rates[0],
        "time_to_first_frame_ms_first_stream": first.time_to_first_frame_ms,
        "latents_digests": [record["digest"] for record in latents.records],
        "load_and_warm_up_s": round(load_s, 1),
        "model_options": options,
        "omni_options": {key: value for key, value in omni.items() if key != "model"},
        "device_memory": memory,
        "session_bytes": [rank["bytes"] for rank in sessions],
        **precision,
        "kernels": kernels,
    }


def earlier_rows(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows that today's result file with this name already contains."""
    path = args.out / f"{datetime.datetime.now(datetime.UTC).date().isoformat()}_{name}.json"
    return (
        json.loads(path.read_text())["result"]["rows"] if path.exists() and not args.no_save else {}
    )


def fits(row: Row, model: Model) -> bool:
    """Return whether the machine has enough GPUs for a row. Without GPUs, at most two ranks are
    allowed, because the CPU cannot run more.

    Also return False if the row is noise-matched and the model does not support noise-matched
    streams.
    """
    import torch

    if row.matched_steps and model.image:
        return False
    return row.num_gpus <= (torch.cuda.device_count() if torch.cuda.is_available() else 2)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="One stream, or several, over GPUs in every way that is built."
    )
    parser.add_argument("--model", choices=list(MODELS), default="causal_wan_1_3b")
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), help="default: all that the machine has GPUs for"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny network at 64x96, few chunks")
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument(
        "--warm-chunks", type=int, default=6, help="chunks before the window is full"
    )
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--width", type=int, default=832)
    add_serving_arguments(parser)
    add_tracing_arguments(parser)
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="whether a row works, not how fast: it may have more ranks than GPUs",
    )
    parser.add_argument(
        "--name",
        help="name of the result file (default: pipeline_parallel_MODEL, shared_gpus_MODEL)",
    )
    add_output_arguments(parser)
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.tiny:
        args.model, args.height, args.width, args.chunks, args.warm_chunks = "tiny", 64, 96, 5, 3
        args.rows, args.eager = args.rows or ["one_gpu", "vae_stage"], True
    if args.chunks <= args.warm_chunks:
        raise SystemExit(
            f"--chunks {args.chunks} leaves nothing after --warm-chunks {args.warm_chunks}"
        )
    restart_with(HUGE_PAGES)
    kind = "shared_gpus" if args.share_gpus else "pipeline_parallel"
    model, name = MODELS[args.model], args.name or f"{kind}_{args.model}"
    rows = earlier_rows(name, args)
    with tempfile.TemporaryDirectory() as folder:
        model.write(Path(folder) / "model")
        for row_name in args.rows or [name for name, row in ROWS.items() if fits(row, model)]:
            try:
                traces = trace_folder(args, Path(folder)) / row_name
                rows[row_name] = asyncio.run(
                    measure(model, Path(folder) / "model", ROWS[row_name], traces, args)
                )
            # A row that cannot run (for example because memory is insufficient or the options are
            # rejected) must not prevent the other rows.
            except Exception as error:
                rows[row_name] = {
                    **dataclasses.asdict(ROWS[row_name]),
                    "error": f"{type(error).__name__}: {error}",
                }
            save(
                name,
                {"result": {"model": args.model, "size": [args.height, args.width], "rows": rows}},
                args,
            )
    for row_name, row in rows.items():
        print(
            row_name,
            row.get("error")
            or f"{row['fps_all_sessions']} FPS, chunk {row['chunk_interval_ms']} ms",
        )


if __name__ == "__main__":
    main()
