# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image's own numbers: sizes, quality phrases, and the chat template its text conditions come
out of.

A client that has the hidden states of Qwen2.5-VL from elsewhere (an autoregressive engine) makes
`prompt_embeds` of them here: the prompt goes in as `templated(prompt)`, the states of the last
layer, after the final norm, come back for every token, and `prompt_embeds` drops those of the
system message. The pipeline does the same with its own encoder (diffusers 0.42
`pipeline_qwenimage.py`, `_get_qwen_prompt_embeds`). Held by tests/executor/test_prompt_embeds.py.
"""

import torch

ASPECT_RATIOS = {
    "1:1": (1328, 1328),
    "16:9": (1664, 928),
    "9:16": (928, 1664),
    "4:3": (1472, 1104),
    "3:4": (1104, 1472),
    "3:2": (1584, 1056),
    "2:3": (1056, 1584),
}
"""(width, height) of the model card.

Its first version had 1140 in place of 1104, which 16 does not divide.
"""

PROMPT_SUFFIXES = {"en": ", Ultra HD, 4K, cinematic composition.", "zh": ", 超清，4K，电影级构图."}
"""The model card's `positive_magic`."""

DROPPED_TOKENS = 34
"""Tokens of the template in front of the prompt, in Qwen2.5-VL's vocabulary."""

MAX_PROMPT_TOKENS = 1024

_SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the "
    "objects and background:"
)


def templated(prompt: str) -> str:
    """The text to tokenise (without adding special tokens): the prompt as a user's turn behind
    the system message.
    """
    return (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|"
        "im_start|>assistant\n"
    )


def prompt_embeds(states_LD: torch.Tensor) -> dict[str, torch.Tensor]:
    """Turn hidden states of the tokens of `templated(prompt)` into the two tensors of a request.

    states_LD: `[L, D]`, last layer after the final norm, floating point. Returns `prompt_embeds`
    `[L - 34, D]` and `prompt_embeds_mask` `[L - 34]` int64, views where possible. Raises ValueError
    if no token is left.
    """
    if states_LD.dim() != 2 or states_LD.shape[0] <= DROPPED_TOKENS:
        raise ValueError(
            f"hidden states must be [tokens, width], more than {DROPPED_TOKENS} tokens, got "
            f"{tuple(states_LD.shape)}"
        )
    embeds_LD = states_LD[DROPPED_TOKENS : DROPPED_TOKENS + MAX_PROMPT_TOKENS]
    mask_L = torch.ones(embeds_LD.shape[0], dtype=torch.int64, device=embeds_LD.device)
    return {"prompt_embeds": embeds_LD, "prompt_embeds_mask": mask_L}
