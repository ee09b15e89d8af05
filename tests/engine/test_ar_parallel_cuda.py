# SPDX-License-Identifier: Apache-2.0
"""The AR worker on two GPUs with vLLM's tensor, pipeline and data parallelism."""

import asyncio
from pathlib import Path
from typing import Any

from ar_cuda import FINAL, ON_TWO_GPUS, PROMPTS, Engine, Reference, check_all_modes
from ar_engine import params
from helpers.ar_compatibility import feature

pytestmark = ON_TWO_GPUS


@feature("tensor parallelism (TP 2)", "V2")
def test_two_tensor_ranks(cuda_language_model: Path, reference: Reference) -> None:
    """With two tensor-parallel ranks, only the rank that returns outputs copies hidden states."""
    with Engine(cuda_language_model, "V2", tensor_parallel_size=2) as running:
        check_all_modes(running, reference)
        ranks = running.loop.run_until_complete(
            running.engine.collective_rpc("hidden_states_stats")
        )
        assert [rank["bytes_copied"] > 0 for rank in ranks] == [True, False]


@feature("pipeline parallelism (PP 2)", "V2")
def test_two_stages(cuda_language_model: Path, reference: Reference) -> None:
    """With two pipeline stages, the stage that runs layer 0 or 2 retains the hidden states of that
    layer.

    The first stage sends the hidden states of its layers to the last stage as intermediate tensors.
    """
    with Engine(cuda_language_model, "V2", pipeline_parallel_size=2) as running:
        check_all_modes(running, reference)


@feature("data parallelism (DP 2)", "V2")
def test_two_engines(cuda_language_model: Path, reference: Reference) -> None:
    """With two data-parallel engines, requests on both engines receive their hidden states."""
    with Engine(cuda_language_model, "V2", data_parallel_size=2) as running:

        async def one(prompt: str, rank: int) -> Any:
            sampling = params("all", output_kind=FINAL)
            stream = running.engine.generate(
                prompt, sampling, f"{prompt[:3]}-{rank}", data_parallel_rank=rank
            )
            return [output async for output in stream][-1]

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(
                *(one(prompt, rank) for prompt in PROMPTS for rank in (0, 1))
            )

        for output in running.loop.run_until_complete(all_of_them()):
            reference.check(output)
