# SPDX-License-Identifier: Apache-2.0
"""Use one engine's hidden states as text embeddings for a diffusion request to another engine.

Many image models use a language model as their text encoder (for example Qwen2.5-VL for
Qwen-Image). The AR worker serves the language model, so text encoding shares weights and batches
with chat requests. The hidden states are sent to the diffusion engine in a binary envelope
(`outputs.py`), never as JSON.
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
    """Return the sampling parameters for a request that asks for its prompt's hidden states.

    The request samples one token, because vLLM requires at least one. The token is discarded.

    Args:
        layer: Index of the layer whose hidden states are requested.
    """
    extra = HiddenStatesRequest(hidden_states="all", layers=(layer,)).to_extra_args()
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)


def prompt_embeds_tensors(
    states: HiddenStates, *, layer: int = FINAL, drop_first: int = 0, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Return text embeddings as tensors for `DiffusionParams.to_pooling_params`.

    Args:
        states: Hidden states of a prompt.
        layer: Index of the layer whose hidden states are used.
        drop_first: Number of leading tokens to drop. They belong to a fixed template whose
            embeddings the image model was not trained with.
        prefix: Key prefix, for example `"negative_"` for the negative prompt.

    Returns:
        `{"prompt_embeds": [L, D], "prompt_embeds_mask": bool [L]}`.

    Raises:
        ValueError: No token is left after `drop_first` tokens have been dropped.
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
    """Run a prompt through an AR engine and return the text embeddings for a diffusion request.

    Args:
        engine: The language model's engine.
        prompt: Prompt in any form that vLLM accepts.
        request_id: Id of the AR request.
        layer: Index of the layer; see `prompt_embeds_tensors`.
        drop_first: Number of leading tokens to drop; see `prompt_embeds_tensors`.
        prefix: Key prefix of the result; see `prompt_embeds_tensors`.

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
