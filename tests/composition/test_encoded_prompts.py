# SPDX-License-Identifier: Apache-2.0
"""The hidden states of a real AR engine condition a request to a real diffusion engine."""

import asyncio
from pathlib import Path

import pytest
import torch
from helpers.engine_client import running_engine
from helpers.waits import seconds
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from vllm_omni.composition.composed_engine import ComposedEngine
from vllm_omni.composition.prompt_embeds import encode_prompt, prompt_embeds_tensors
from vllm_omni.hidden_states import FINAL, HiddenStates
from vllm_omni.inputs import DiffusionParams, request_tensors

IDS = [5, 9, 14, 3, 7, 11]


@pytest.mark.nightly
def test_hidden_states_are_sent_from_one_engine_to_the_other(
    tiny_language_model: Path, null_world: Path
) -> None:
    """The AR engine's hidden states match those of Hugging Face Transformers. The diffusion request
    receives them unchanged, bit for bit, as prompt embeddings.
    """
    from transformers import AutoModel

    async def scenario() -> None:
        args = AsyncEngineArgs(
            model=str(tiny_language_model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=64,
            worker_cls="vllm_omni.worker.ARGPUWorker",
            scheduler_cls="vllm_omni.core.sched.ARHiddenStatesScheduler",
        )
        encoder = ComposedEngine("text", AsyncLLM.from_engine_args(args))
        try:
            async with running_engine(null_world) as client:
                tensors = await encode_prompt(
                    encoder, tokens_input(prompt_token_ids=IDS), "encode", drop_first=2
                )
                model = AutoModel.from_pretrained(tiny_language_model, dtype=torch.float32)
                with torch.no_grad():
                    expected = model(torch.tensor([IDS])).last_hidden_state[0, 2:]
                torch.testing.assert_close(tensors["prompt_embeds"], expected, atol=1e-4, rtol=0)
                assert tensors["prompt_embeds_mask"].tolist() == [True] * 4

                params = DiffusionParams(session_id="s", prompt="a field", output="latents")
                carried = request_tensors(params.to_pooling_params(tensors).extra_kwargs)
                assert torch.equal(carried["prompt_embeds"], tensors["prompt_embeds"])
                diffusion = ComposedEngine("diffusion", client.engine, owned=False)
                meta, result = await diffusion.encode(params, tensors, "draw")
                assert meta["chunk_index"] == 0 and result["latents"].numel()
        finally:
            encoder.shutdown()

    asyncio.run(asyncio.wait_for(scenario(), seconds(180)))


def test_names_and_mask_of_prompt_embeddings() -> None:
    """`prefix` is prepended to the tensor names, for example to mark a negative prompt. Dropping
    every token of a prompt is an error.
    """
    embeddings = torch.randn(3, 4)
    states = HiddenStates({FINAL: embeddings}, torch.arange(3), torch.arange(3))
    tensors = prompt_embeds_tensors(states, drop_first=1, prefix="negative_")
    assert set(tensors) == {"negative_prompt_embeds", "negative_prompt_embeds_mask"}
    assert torch.equal(tensors["negative_prompt_embeds"], embeddings[1:])
    with pytest.raises(ValueError, match="leaves none"):
        prompt_embeds_tensors(states, drop_first=3)
