# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are stored quantized, through the real engine on a CPU: in vLLM's kernels, and
read back.

Wan 2.2 with both experts from tests/golden/quantized, in every format of which vLLM has a CPU
kernel. Formats for GPUs alone are refused (tests/model_executor/test_checkpoint_quantization.py)
and run by benchmarks/fp8.py.
"""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine_client import EngineClient, running_engine
from helpers.quantized import QUANTIZED, with_transformer, write_pipeline

FP8_ERROR, INT8_ERROR, FP4_ERROR = 0.15, 0.05, 0.4
"""Of a video's latents after four steps; 0.064, 0.017 and 0.26 were seen."""
VIDEO: dict[str, Any] = {
    "one_shot": True,
    "prompt": "a field",
    "output": "latents",
    "seed": 1,
    "num_frames": 5,
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("wan2_2"))


async def video(client: EngineClient, session: str = "a") -> torch.Tensor:
    _, tensors = await client.send(session_id=session, num_inference_steps=4, **VIDEO)
    return tensors["latents"].float().clone()


async def served(path: Path, **settings: Any) -> torch.Tensor:
    async with running_engine(path, dtype="bfloat16", **settings) as client:
        return await video(client)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def exact(pipeline: Path) -> torch.Tensor:
    return asyncio.run(served(pipeline))


def test_vllm_computes_in_stored_fp8_and_loads_it_again(
    pipeline: Path, exact: torch.Tensor, tmp_path: Path
) -> None:
    """Close to the plain weights' video, not equal; the same bits after a reload."""

    async def scenario() -> None:
        path = with_transformer(pipeline, QUANTIZED / "llmcompressor_fp8", tmp_path)
        async with running_engine(path, dtype="bfloat16") as client:
            found = await video(client)
            assert 1e-3 < error(found, exact) < FP8_ERROR
            await client.engine.collective_rpc("reload_weights")
            assert torch.equal(await video(client, "b"), found)

    asyncio.run(scenario())


def test_vllm_computes_in_stored_int8(pipeline: Path, exact: torch.Tensor, tmp_path: Path) -> None:
    """A reload gives the same bits, or is refused and changes nothing.

    vLLM's kernel for AMX keeps the weights, its oneDNN kernel drops them. Without VNNI a CPU adds
    int8 products in 16 bits and cuts the largest sums off: 0.065 was seen.
    """
    allowed = INT8_ERROR if torch.cpu._is_vnni_supported() else 0.15

    async def scenario() -> None:
        path = with_transformer(pipeline, QUANTIZED / "llmcompressor_int8", tmp_path)
        async with running_engine(path, dtype="bfloat16") as client:
            found = await video(client)
            assert 1e-3 < error(found, exact) < allowed
            refused = pytest.raises(Exception, match="start the server anew")
            with nullcontext() if torch.cpu._is_amx_tile_supported() else refused:
                await client.engine.collective_rpc("reload_weights")
            assert torch.equal(await video(client, "b"), found)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("modelopt_fp8", FP8_ERROR), ("modelopt_nvfp4", FP4_ERROR), ("torchao_int8", INT8_ERROR)],
)
@pytest.mark.nightly
def test_weights_are_read_back_where_vllm_has_no_kernel(
    pipeline: Path, exact: torch.Tensor, tmp_path: Path, name: str, allowed: float
) -> None:
    path = with_transformer(pipeline, QUANTIZED / name, tmp_path)
    assert 1e-3 < error(asyncio.run(served(path, omni={"dequantize": True})), exact) < allowed
