# SPDX-License-Identifier: Apache-2.0
"""Recommendations by a model's authors for calling its pipeline: sizes by aspect ratio, and quality
phrases by language.

Generic code looks them up by pipeline class. The values of a model are in a module with its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.model_executor.models.diffusers_pipeline import qwen_image


@dataclass(frozen=True)
class PipelineConventions:
    """Recommendations for one pipeline class."""

    aspect_ratios: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(width, height) in pixels by name."""
    prompt_suffixes: Mapping[str, str] = field(default_factory=dict)
    """Text that is added to a prompt, by language."""


_BY_CLASS_PREFIX = {
    "QwenImage": PipelineConventions(qwen_image.ASPECT_RATIOS, qwen_image.PROMPT_SUFFIXES)
}


def conventions_of(pipeline_class: str) -> PipelineConventions:
    """Return the recommendations for a pipeline class, or an empty result if there are none."""
    for prefix, conventions in _BY_CLASS_PREFIX.items():
        if pipeline_class.startswith(prefix):
            return conventions
    return PipelineConventions()


def language_of(prompt: str) -> str:
    """Return `zh` if the prompt has Chinese characters and no kana, otherwise `en`."""
    han = any(
        "\u3400" <= letter <= "\u9fff" or "\U00020000" <= letter <= "\U0003ffff"
        for letter in prompt
    )
    kana = any("\u3040" <= letter <= "\u30ff" for letter in prompt)
    return "zh" if han and not kana else "en"
