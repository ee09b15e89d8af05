# SPDX-License-Identifier: Apache-2.0
"""Implements the degradations for late chunks (`omni.degradations`) for all streaming models.

A degraded chunk uses values of the family's `realtime` preset: the `fewer_steps` degradation uses
the preset's number of denoise steps, and `tiny_vae` uses the preset's decoder. `StreamingModel`
applies both. A family calls `ladder_refusals` to declare which degradations are impossible with its
options.
"""

from collections.abc import Mapping
from typing import Any, Final

from vllm_omni.config import Degradation, OmniConfig
from vllm_omni.model_executor.models.capabilities import Refusal
from vllm_omni.model_executor.presets import DEGRADED_PRESET
from vllm_omni.model_executor.streaming.options import StreamingOptions
from vllm_omni.model_executor.streaming.stream import StreamModelSetup

FEWER_STEPS: Final[Degradation] = "fewer_steps"
TINY_VAE: Final[Degradation] = "tiny_vae"


def degraded_options(options: StreamingOptions) -> Mapping[str, Any]:
    """Return the options of `DEGRADED_PRESET`. The result is empty if the family has no preset with
    this name.
    """
    preset = options.presets.get(DEGRADED_PRESET)
    return {} if preset is None else preset.model


def degraded_steps(options: StreamingOptions) -> int | None:
    """Return the maximum number of denoise steps for a chunk with the `fewer_steps` degradation."""
    steps: int | None = degraded_options(options).get("max_steps")
    return steps


def ladder_refusals(stream: StreamModelSetup[Any, Any]) -> dict[str, Refusal | None]:
    """Return the fields of `Refusals` that state whether each degradation is refused."""
    options, present = stream.options, stream.few_steps
    steps, fewer_steps, tiny_vae = degraded_steps(options), None, None
    if present is None or steps is None:
        fewer_steps = Refusal("it always needs all its denoise steps")
    elif present <= steps:
        fewer_steps = Refusal(f"its chunks have {present} of at most {steps} denoise steps already")
    if options.decoder == degraded_options(options).get("decoder"):
        tiny_vae = Refusal(f"omni.model.decoder {options.decoder!r} decodes all chunks with it")
    return {FEWER_STEPS: fewer_steps, TINY_VAE: tiny_vae}


def needs_tiny_decoder(options: StreamingOptions, omni: OmniConfig) -> str | None:
    """Return the option that requires the tiny decoder, as a user would write it, or None if no
    option requires it.
    """
    if options.decoder == "tiny":
        preset = options.presets[options.preset].model.get("decoder") == "tiny"
        source = f" (preset {options.preset!r})" if preset and "decoder" not in omni.model else ""
        return f"omni.model.decoder 'tiny'{source}"
    return f"omni.degradations {TINY_VAE!r}" if TINY_VAE in omni.degradations else None
