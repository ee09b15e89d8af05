# SPDX-License-Identifier: Apache-2.0
"""Lance (tiny) in the real engine: every task, concurrent requests, aborts and invalid requests."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine

from vllm_omni.outputs import RequestFailed

SMALL = {"max_image_pixels": 64 * 96, "max_video_pixels": 64 * 96, "max_num_frames": 9}
TOLERANCE = 1e-4
"""Absolute tolerance for fp32 latents of order 1, required because a shared matrix product sums in
a different order.
"""


def image(seed: int = 0) -> torch.Tensor:
    return torch.randint(
        0, 256, (60, 90, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


CLIP = torch.stack([image(seed) for seed in range(5)])
GENERATION = {"height": 64, "width": 96, "num_inference_steps": 4}
UNDERSTANDING = {"modalities": ["text"], "max_tokens": 12}
REQUESTS: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "t2i": ({"prompt": "a cat", **GENERATION}, {}),
    "image_edit": (
        {"prompt": "no hat", "num_inference_steps": 3, "options": {"resolution": "image_256res"}},
        {"image": image()},
    ),
    "t2v": ({"prompt": "a wave", "num_frames": 9, **GENERATION}, {}),
    "i2v": ({"prompt": "a wave", "num_frames": 9, **GENERATION}, {"image": image()}),
    "video_edit": (
        {
            "prompt": "red",
            "num_inference_steps": 2,
            "options": {"task": "video_edit", "resolution": "video_192p"},
        },
        {"video": CLIP},
    ),
    "x2t_image": (
        {"prompt": "what?", "options": {**UNDERSTANDING, "resolution": "image_256res"}},
        {"image": image()},
    ),
    "x2t_video": (
        {"prompt": "what?", "options": {**UNDERSTANDING, "resolution": "video_192p"}},
        {"video": CLIP},
    ),
}


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("lance", "video")


async def send(client: EngineClient, task: str, name: str, **changes: Any) -> Any:
    fields, tensors = REQUESTS[task]
    fields = {**fields, "session_id": name, "one_shot": True, **changes}
    return await client.send(tensors, request_id=name, **fields)


async def every_task(client: EngineClient) -> None:
    """Check that each task returns its type of result and leaves no session open."""
    shapes = {}
    for task in REQUESTS:
        meta, tensors = await send(client, task, f"solo-{task}")
        assert meta["task"] == task
        shapes[task] = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {
        "t2i": {"images": (1, 64, 96, 3)},
        "image_edit": {"images": (1, 224, 304, 3)},
        "t2v": {"frames": (9, 64, 96, 3)},
        "i2v": {"frames": (9, 64, 96, 3)},
        "video_edit": {"frames": (5, 224, 304, 3)},
        "x2t_image": {"token_ids": (12,)},
        "x2t_video": {"token_ids": (12,)},
    }
    assert (await client.stats())["sessions"] == 0


async def mixed_load(client: EngineClient) -> None:
    """Check that concurrent generation and understanding requests return the same results as
    requests that run by themselves.
    """

    async def all_of(prefix: str, together: bool) -> list[torch.Tensor]:
        calls = [
            send(
                client,
                task,
                f"{prefix}-{task}",
                **({} if task.startswith("x2t") else {"output": "latents"}),
            )
            for task in REQUESTS
        ]
        results = await asyncio.gather(*calls) if together else [await call for call in calls]
        return [next(iter(tensors.values())).clone() for _, tensors in results]

    for alone, shared in zip(
        await all_of("alone", False), await all_of("together", True), strict=True
    ):
        torch.testing.assert_close(shared, alone, atol=TOLERANCE, rtol=0)


async def streamed_response(client: EngineClient) -> None:
    """Check that the streamed texts and tokens of a session add up to the whole response."""
    whole, _ = await send(client, "x2t_image", "whole")
    fields, tensors = REQUESTS["x2t_image"]
    fields = {**fields, "options": {**fields["options"], "chunk_tokens": 5}}
    parts = [await client.send(tensors, session_id="talk", **fields)]
    while parts[-1][0]["finish_reason"] is None:
        parts.append(await client.send(session_id="talk"))
    assert len(parts) == 3
    assert "".join(meta["text"] for meta, _ in parts) == whole["text"]
    assert parts[-1][0]["completion_tokens"] == whole["completion_tokens"] == 12
    await client.send(session_id="talk", op="close")
    assert (await client.stats())["sessions"] == 0


async def aborts(client: EngineClient) -> None:
    """Check that a request can be aborted before its start, while it runs and after its end, and
    that other requests continue.
    """
    expected = (await send(client, "t2i", "reference", output="latents"))[1]["latents"].clone()

    long_response = {**REQUESTS["x2t_image"][0]["options"], "max_tokens": 2000}
    doomed_requests: list[tuple[str, int, dict[str, Any]]] = [
        ("t2i", 0, {"num_inference_steps": 400}),
        ("image_edit", 1, {"num_inference_steps": 400}),
        ("t2v", 1, {"num_inference_steps": 400}),
        ("t2i", 3, {"num_inference_steps": 400}),
        ("x2t_image", 1, {"options": long_response}),
    ]
    for number, (task, step, changes) in enumerate(doomed_requests):
        name = f"doomed-{number}"
        doomed = asyncio.create_task(send(client, task, name, **changes))
        other = asyncio.create_task(send(client, "t2i", f"other-{number}", output="latents"))
        if step:
            await client.until_at_step(name, step)
        else:
            await asyncio.sleep(0)
        await client.engine.abort(name)
        doomed.cancel()
        with contextlib.suppress(asyncio.CancelledError, RequestFailed):
            await doomed
        torch.testing.assert_close((await other)[1]["latents"], expected, atol=TOLERANCE, rtol=0)
        await client.until_disconnected(name)
    await client.engine.abort("reference")  # this request has already finished
    torch.testing.assert_close(
        (await send(client, "t2i", "last", output="latents"))[1]["latents"], expected
    )
    assert (await client.stats())["sessions"] == 0


async def wrong_requests(client: EngineClient) -> None:
    """Check that each invalid request is rejected with a code and a message, and that the engine
    continues.
    """
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({"prompt": ""}, {}, "invalid_request"),
        ({"prompt": "a", "height": 8192, "width": 8192}, {}, "unsupported_size"),
        ({"prompt": "a", "height": 72, "width": 96}, {}, "unsupported_size"),
        ({"prompt": "a", "num_frames": 5000}, {}, "unsupported_size"),
        ({"prompt": "a"}, {"image": torch.zeros(3, dtype=torch.uint8)}, "invalid_image"),
        ({"prompt": "a", "options": {"task": "x2t_video"}}, {"video": CLIP[:0]}, "invalid_video"),
        ({"prompt": "a", "options": {"nonsense": 1}}, {}, "invalid_request"),
        (
            {"prompt": "a", "options": {"modalities": ["text"], "max_tokens": 10**6}},
            {"image": image()},
            "invalid_request",
        ),
    ]
    for number, (fields, tensors, code) in enumerate(cases):
        with pytest.raises(RequestFailed) as failure:
            await client.send(tensors, session_id=f"wrong-{number}", one_shot=True, **fields)
        assert failure.value.code == code and len(failure.value.message) > 20
    await send(client, "t2i", "after-the-wrong-ones")
    assert (await client.stats())["sessions"] == 0


CHECKS: list[Callable[[EngineClient], Coroutine[Any, Any, None]]] = [
    every_task,
    mixed_load,
    streamed_response,
    aborts,
    wrong_requests,
]


@contextlib.asynccontextmanager
async def lance_engine(
    checkpoint: Path, options: Mapping[str, Any] = MappingProxyType({}), **engine_args: Any
) -> AsyncIterator[EngineClient]:
    omni = {
        "batch_invariant": False,
        "max_requests_per_step": 8,
        "max_sessions": 16,
        "model": {**SMALL, **options},
    }
    async with running_engine(checkpoint, omni, **engine_args) as client:
        yield client


def test_lance_through_the_engine(checkpoint: Path, subtests: Any) -> None:
    """All checks pass on one engine. They share it because starting an engine takes longer than the
    checks.
    """

    async def scenario() -> None:
        async with lance_engine(checkpoint) as client:
            for check in CHECKS:
                with subtests.test(check.__doc__):
                    await check(client)

    asyncio.run(scenario())


@pytest.mark.nightly
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tensor", "sequence"])
def test_two_ranks_equal_one(checkpoint: Path, sequence_parallel: bool) -> None:
    """Two ranks return the same latents as one rank to within 1e-4, and exactly the same tokens.

    Tensor parallelism splits heads and columns. Ulysses splits latents.
    """

    async def results(options: dict[str, Any], **engine_args: Any) -> list[torch.Tensor]:
        async with lance_engine(checkpoint, options, **engine_args) as client:
            found = []
            for task in REQUESTS:
                changes = {} if task.startswith("x2t") else {"output": "latents"}
                found.append(
                    next(iter((await send(client, task, task, **changes))[1].values())).clone()
                )
            return found

    options = {"sequence_parallel": sequence_parallel}
    one = asyncio.run(results({}))
    two = asyncio.run(results(options, tensor_parallel_size=2, distributed_executor_backend="mp"))
    for expected, found in zip(one, two, strict=True):
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.nightly
def test_every_task_runs_with_the_other_convention(checkpoint: Path) -> None:
    """With all conventions switched to their alternatives, each task returns a result of its type
    that contains no NaNs.
    """

    async def scenario() -> None:
        async with lance_engine(checkpoint, {"convention": "vllm_omni"}) as client:
            for task, (fields, _) in REQUESTS.items():
                changes: dict[str, Any] = {"output": "latents"}
                if task.startswith("x2t"):  # understanding of a whole clip uses no bucket
                    requested = fields["options"]
                    changes = {"options": UNDERSTANDING if task == "x2t_video" else requested}
                meta, tensors = await send(client, task, f"switched-{task}", **changes)
                (found,) = tensors.values()
                assert meta["task"] == task and found.numel() > 0 and found.isfinite().all()

    asyncio.run(scenario())
