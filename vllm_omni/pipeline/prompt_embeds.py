# SPDX-License-Identifier: Apache-2.0
"""Hidden states of one engine as the text condition of a diffusion request in another, as tensors all the way.

The text encoder of many image models is a language model (Qwen-Image: Qwen2.5-VL). Served on the AR worker it shares
its weights and batches with chat traffic; its states reach the diffusion engine as the bytes of an envelope, never as
JSON. Held by tests/pipeline/test_encoded_prompts.py.
"""

from typing import Any

import torch
from vllm.sampling_params import SamplingParams

from vllm_omni.hidden_states import FINAL, HiddenStates, HiddenStatesRequest, concat, hidden_states_of
from vllm_omni.pipeline.stage import Stage


def prompt_states_params(layer: int = FINAL) -> SamplingParams:
    """Sampling parameters of a request that only wants the hidden states of its prompt.

    One token is sampled, as vLLM asks for at least one, and dropped.
    """
    extra = HiddenStatesRequest(hidden_states="all", layers=(layer,)).to_extra_args()
    return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)


def prompt_embeds_tensors(
    states: HiddenStates, *, layer: int = FINAL, drop_first: int = 0, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Return `{"prompt_embeds": [L, D], "prompt_embeds_mask": bool [L]}` for `DiffusionParams.to_pooling_params`.

    drop_first: rows of a fixed template in front that the image model was not trained with. prefix: "negative_" for the
    other prompt. Raises ValueError if nothing is left.
    """
    rows = states[layer][drop_first:]
    if not len(rows):
        raise ValueError(f"drop_first={drop_first} leaves nothing of {states.num_rows} rows")
    mask = torch.ones(len(rows), dtype=torch.bool)
    return {f"{prefix}prompt_embeds": rows.contiguous(), f"{prefix}prompt_embeds_mask": mask}


async def encode_prompt(
    stage: Stage, prompt: Any, request_id: str, *, layer: int = FINAL, drop_first: int = 0, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Run `prompt` through an AR stage and return its states as named tensors of a diffusion request."""
    parts: list[HiddenStates | None] = []
    async for output in stage.generate(prompt, prompt_states_params(layer), request_id):
        parts.append(hidden_states_of(output))
    states = concat(parts)
    if states is None:
        raise RuntimeError(
            f"stage {stage.name!r} returned no hidden states: does it run on the AR worker and scheduler?"
        )
    return prompt_embeds_tensors(states, layer=layer, drop_first=drop_first, prefix=prefix)
