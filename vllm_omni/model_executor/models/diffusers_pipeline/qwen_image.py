# SPDX-License-Identifier: Apache-2.0
"""Image sizes, quality phrases and the chat template for Qwen-Image.

If a client computes the Qwen2.5-VL hidden states elsewhere, for example in an autoregressive
engine, it can use this module to convert them to `prompt_embeds`. The client runs the encoder on
`templated(prompt)` and passes the hidden states of all tokens, taken after the final norm, to
`prompt_embeds`, which drops those of the system message. The pipeline computes its embeddings in
the same way, with its own encoder (diffusers 0.42 `pipeline_qwenimage.py`,
`_get_qwen_prompt_embeds`).
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
"""Image sizes (width, height) from the model card, keyed by aspect ratio. The first version of the
card listed 1140, which is not a multiple of 16, instead of 1104.
"""

PROMPT_SUFFIXES = {"en": ", Ultra HD, 4K, cinematic composition.", "zh": ", 超清，4K，电影级构图."}
"""Quality phrases, keyed by language and copied from `positive_magic` in the model card."""

DROPPED_TOKENS = 34
"""Number of template tokens before the prompt, in Qwen2.5-VL's vocabulary."""

MAX_PROMPT_TOKENS = 1024

_SYSTEM = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the "
    "objects and background:"
)


def templated(prompt: str) -> str:
    """Return the text to tokenize: the system message, then the prompt as the user message. The
    tokenizer must not add special tokens.
    """
    return (
        f"<|im_start|>system\n{_SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|"
        "im_start|>assistant\n"
    )


def prompt_embeds(states_LD: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert the hidden states of `templated(prompt)` to the tensors for a request.

    Args:
        states_LD: Hidden states after the final norm, floating point, `[L, D]`.

    Returns:
        Two tensors, which are views if possible: `prompt_embeds` `[L - 34, D]`, and
        `prompt_embeds_mask` `[L - 34]`, int64.

    Raises:
        ValueError: No tokens are left after the system message has been dropped.
    """
    if states_LD.dim() != 2 or states_LD.shape[0] <= DROPPED_TOKENS:
        raise ValueError(
            f"hidden states must be [tokens, width], more than {DROPPED_TOKENS} tokens, got "
            f"{tuple(states_LD.shape)}"
        )
    embeds_LD = states_LD[DROPPED_TOKENS : DROPPED_TOKENS + MAX_PROMPT_TOKENS]
    mask_L = torch.ones(embeds_LD.shape[0], dtype=torch.int64, device=embeds_LD.device)
    return {"prompt_embeds": embeds_LD, "prompt_embeds_mask": mask_L}
