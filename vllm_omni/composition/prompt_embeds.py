# SPDX-License-Identifier: Apache-2.0
"""Hidden states of one engine as the text embeddings of a diffusion request to another engine.

The text encoder of many image models is a language model (for example Qwen2.5-VL for Qwen-Image).
The AR worker serves it, so that weights and batches are shared with chat requests. Its hidden
states are sent to the diffusion engine as the bytes of an envelope, never as JSON.
"""

from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from vllm_omni.composition.composed_engine import ComposedEngine
from vllm_omni.hidden_states import (
    FINAL,
    HiddenStates,
    HiddenStatesRequest,
    concat,
    hidden_states_of,
)


def prompt_states_params(layer: int = FINAL) -> SamplingParams:
    """Return the sampling parameters of a request for the hidden states of its prompt.

    One token is sampled and discarded, because vLLM requires at least one.

    Args:
        layer: Index of the layer.
    """
    extra = HiddenStatesRequest(hidden_states="all", layers=(layer,)).to_extra_args()
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)


def prompt_embeds_tensors(
    states: HiddenStates, *, layer: int = FINAL, drop_first: int = 0, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Return text embeddings as tensors for `DiffusionParams.to_pooling_params`.

    Args:
        states: Hidden states of a prompt.
        layer: Index of the layer.
        drop_first: Number of leading tokens to drop: a fixed template that the image model was not
            trained with.
        prefix: Prefix of the keys, `"negative_"` for the negative prompt.

    Returns:
        `{"prompt_embeds": [L, D], "prompt_embeds_mask": bool [L]}`.

    Raises:
        ValueError: No token is left.
    """
    token_states = states[layer][drop_first:]
    if not len(token_states):
        raise ValueError(f"drop_first={drop_first} leaves none of {states.num_positions} tokens")
    mask = torch.ones(len(token_states), dtype=torch.bool)
    return {
        f"{prefix}prompt_embeds": token_states.contiguous(),
        f"{prefix}prompt_embeds_mask": mask,
    }


async def encode_prompt(
    engine: ComposedEngine,
    prompt: Any,
    request_id: str,
    *,
    layer: int = FINAL,
    drop_first: int = 0,
    prefix: str = "",
) -> dict[str, torch.Tensor]:
    """Run a prompt through an AR engine and return the text embeddings of a diffusion request.

    Args:
        engine: The engine of the language model.
        prompt: Prompt of vLLM.
        request_id: Id of the AR request.
        layer: As for `prompt_embeds_tensors`.
        drop_first: As for `prompt_embeds_tensors`.
        prefix: As for `prompt_embeds_tensors`.

    Raises:
        RuntimeError: The engine returned no hidden states.
    """
    parts: list[HiddenStates | None] = []
    async for output in engine.generate(prompt, prompt_states_params(layer), request_id):
        parts.append(hidden_states_of(output))
    states = concat(parts)
    if states is None:
        raise RuntimeError(
            f"engine {engine.name!r} returned no hidden states: does it run on the AR worker and "
            "scheduler?"
        )
    return prompt_embeds_tensors(states, layer=layer, drop_first=drop_first, prefix=prefix)
