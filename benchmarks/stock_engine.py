# SPDX-License-Identifier: Apache-2.0
"""Baselines for benchmarks/engine_overhead.py: vLLM's own engine steps, and a copy between two
processes.
"""

import gc
import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

STEPS = 5
_STEP_TOKENS = 16
"""Number of tokens per engine step. A prompt with `STEPS` times this number of tokens takes five
steps.
"""


def time_forwards(worker: Any) -> None:
    """Run in the worker: record the time of every forward pass of the worker's model."""
    model = worker.model_runner.get_model()
    model.forward_s = []
    started: list[float] = []
    model.register_forward_pre_hook(lambda *_: started.append(time.perf_counter()))
    model.register_forward_hook(
        lambda *_: model.forward_s.append(time.perf_counter() - started.pop())
    )


def take_forwards(worker: Any) -> list[float]:
    """Run in the worker: return the durations in seconds of all forward passes since the last
    call.
    """
    model = worker.model_runner.get_model()
    taken, model.forward_s = model.forward_s, []
    return taken  # type: ignore[no-any-return]


async def five_steps_ms(folder: Path, requests: int, executor: str) -> list[float]:
    """For each pooling request of five engine steps, return the milliseconds that stock vLLM takes,
    minus the time of the model's forward passes.

    A tiny language model pools one vector. The prompt consists of five prefill chunks, so the
    engine schedules, runs and collects five times and responds once. The front end, EngineCore and
    workers are the same as for this package's models.
    """
    from vllm import PoolingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_omni.testing.tiny.language_model import write_tiny_language_model

    model = write_tiny_language_model(folder / "language_model", num_hidden_layers=1)
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            runner="pooling",
            convert="embed",
            enforce_eager=True,
            max_model_len=STEPS * _STEP_TOKENS,
            max_num_seqs=1,
            max_num_batched_tokens=_STEP_TOKENS,
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.1,
            distributed_executor_backend=executor,
        )
    )
    found = []
    warm_up = 5
    try:
        await engine.collective_rpc(time_forwards)
        for index in range(requests + warm_up):
            prompt = {
                "prompt_token_ids": [1 + (index + n) % 200 for n in range(STEPS * _STEP_TOKENS)]
            }
            start = time.perf_counter()
            async for _ in engine.encode(prompt, PoolingParams(task="embed"), f"stock-{index}"):
                pass
            elapsed = time.perf_counter() - start
            (forwards,) = await engine.collective_rpc(take_forwards)
            if len(forwards) != STEPS:
                raise RuntimeError(
                    f"a request took {len(forwards)} steps; {STEPS} are to be compared"
                )
            if index >= warm_up:
                found.append((elapsed - sum(forwards)) * 1e3)
    finally:
        engine.shutdown()
        del engine
        gc.collect()  # the finaliser must run before interpreter shutdown
    return found


def copy_ms(size: int, count: int) -> list[float]:
    """Copy `size` bytes `count` times from another process to this process, over ZeroMQ, which vLLM
    also uses between its processes. Return the milliseconds that each copy takes.

    The time runs from the request for the bytes to their arrival. The sender does not copy the
    bytes, and the receiver gets them in one buffer.
    """
    import zmq

    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(
        target=_send_bytes, args=(there, size), daemon=True
    )
    child.start()
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.PAIR)
    socket.connect(here.recv())
    found = []
    for _ in range(count + 5):
        start = time.perf_counter()
        socket.send(b"next")
        _, data = socket.recv_multipart(copy=False)
        if len(data.buffer) != size:
            raise RuntimeError(f"{len(data.buffer)} bytes came, {size} were sent")
        found.append((time.perf_counter() - start) * 1e3)
    socket.send(b"")
    child.join()
    context.destroy(linger=0)
    return found[5:]


def _send_bytes(address: Connection, size: int) -> None:
    import tempfile

    import numpy
    import zmq

    data = numpy.random.default_rng(0).integers(0, 256, size, dtype=numpy.uint8)
    with tempfile.TemporaryDirectory() as folder:
        context: zmq.Context[Any] = zmq.Context()
        socket = context.socket(zmq.PAIR)
        socket.bind(f"ipc://{folder}/copy")
        address.send(f"ipc://{folder}/copy")
        while socket.recv():
            socket.send_multipart([b"answer", data], copy=False)
        context.destroy(linger=0)
