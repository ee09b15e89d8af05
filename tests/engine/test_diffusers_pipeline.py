# SPDX-License-Identifier: Apache-2.0
"""Diffusers pipelines on a real EngineCore: results equal those of diffusers, and requests can be
aborted.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engine_client import EngineClient, running_engine

from vllm_omni.inputs import DiffusionParams, engine_prompt
from vllm_omni.model_executor.models.registry import get_family
from vllm_omni.outputs import unpack

LAYOUTS = get_family("diffusers_pipeline").layouts


def compare(folder: Path, responses: Connection) -> None:
    """For every pipeline layout, compare the engine's result with that of diffusers, and send the
    outcome to the test process.

    Only one engine runs at a time.
    """
    import diffusers
    from vllm import LLM

    equal = {}
    for layout in LAYOUTS:
        path = str(folder / layout)
        llm = LLM(
            model=path,
            config_format="omni",
            skip_tokenizer_init=True,
            enforce_eager=True,
            # Wan is also supported by a model that runs in the worker, so the executor must be
            # selected explicitly.
            distributed_executor_backend="vllm_omni.executor.DiffusersPipelineExecutor",
        )
        fields: dict[str, Any] = {"num_inference_steps": 3, "height": 32, "width": 48}
        if layout == "wan":
            fields["num_frames"] = 5
        params = DiffusionParams(
            session_id="s", one_shot=True, prompt="a red fox", seed=5, **fields
        )
        response = llm.encode(engine_prompt(), params.to_pooling_params(), pooling_task="plugin")[0]
        _, tensors = unpack(response.outputs.data)
        pipeline = diffusers.DiffusionPipeline.from_pretrained(path)
        output = pipeline(
            "a red fox", generator=torch.Generator().manual_seed(5), output_type="pil", **fields
        )
        images = output.frames[0] if layout == "wan" else output.images
        expected = np.stack([np.array(image) for image in images])
        got = tensors["frames" if layout == "wan" else "images"].numpy()
        equal[layout] = bool(np.array_equal(got, expected)) and float(expected.std()) > 1
        del llm
    responses.send(equal)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    for layout in LAYOUTS:
        (folder / layout).mkdir()
        get_family("diffusers_pipeline").make_tiny(folder / layout, 0, layout)
    return folder


def test_every_layout_equals_diffusers_through_llm_encode(
    pipelines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images and videos of Qwen-Image, FLUX, Wan and SD3 equal those of diffusers byte for byte."""
    # The engine cores run in a separate process, so that no engine core stays in the test process.
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=compare, args=(pipelines, sender))
    process.start()
    sender.close()  # `poll` then sees an end of file if the process dies
    try:
        assert receiver.poll(600)
        assert receiver.recv() == dict.fromkeys(LAYOUTS, True)
    finally:
        process.kill()
        process.join()


SMALL: dict[str, Any] = {
    "prompt": "a red fox",
    "height": 32,
    "width": 48,
    "num_inference_steps": 3,
    "one_shot": True,
}
LONG: dict[str, Any] = {**SMALL, "height": 192, "width": 192, "num_inference_steps": 200}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def client(pipelines: Path, loop: asyncio.AbstractEventLoop) -> Iterator[EngineClient]:
    """A client of one engine for the tests below. The pipeline runs in the EngineCore's process."""
    manager = running_engine(pipelines / "qwen_image")
    yield loop.run_until_complete(manager.__aenter__())
    loop.run_until_complete(manager.__aexit__(None, None, None))


def test_an_abort_takes_effect_at_the_next_step(
    client: EngineClient, loop: asyncio.AbstractEventLoop
) -> None:
    """An aborted 200-step request stops after a few steps, and the next request runs
    immediately.
    """

    async def scenario() -> None:
        expected = (await client.send(session_id="before", seed=1, **SMALL))[1]["images"].clone()
        slow = asyncio.create_task(
            client.send(session_id="slow", seed=1, request_id="slow", **LONG)
        )
        now = await client.until_at_step("slow", 3)
        assert now[1] == 200
        started_s, seen = time.monotonic(), now[0]
        now = await client.until_at_step("slow", seen + 5)
        left_s = (time.monotonic() - started_s) / (now[0] - seen) * (200 - now[0])
        waiting = asyncio.create_task(client.send(session_id="next", seed=1, **SMALL))
        started_s = time.monotonic()
        await client.engine.abort("slow")
        result = await waiting
        assert time.monotonic() - started_s < left_s / 2, "the aborted request continued"
        assert torch.equal(result[1]["images"], expected)
        assert await client.progress() == {}
        slow.cancel()

    loop.run_until_complete(scenario())
