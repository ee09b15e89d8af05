# SPDX-License-Identifier: Apache-2.0
"""The degradations that a single chunk supports (`omni.degradations`), by the model's options."""

from vllm_omni.config import Degradation
from vllm_omni.model_executor.models.causal_wan.config import CausalWanOptions

FEWER_STEPS: Degradation = "fewer_steps"
TINY_VAE: Degradation = "tiny_vae"


def refuse_degradation(name: str, options: CausalWanOptions) -> str | None:
    """Return why chunks do not support the degradation `name`, or None if they do."""
    if name == TINY_VAE:
        return (
            "omni.model.decoder 'tiny' decodes all chunks with it"
            if options.decoder == "tiny"
            else None
        )
    assert name == FEWER_STEPS
    if options.cache != "strict":
        return (
            f"cache {options.cache!r} keeps a window for every step, so each chunk needs "
            "all of them"
        )
    return None if options.text_schedule().num_steps > 1 else "denoising_steps has one entry"
