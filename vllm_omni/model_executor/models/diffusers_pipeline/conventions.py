# SPDX-License-Identifier: Apache-2.0
"""What a model's authors recommend for calling its pipeline: image sizes by aspect ratio, and
quality phrases by language.

Generic code looks up the recommendations by pipeline class. Each model's values are in the module
named after the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.model_executor.models.diffusers_pipeline import qwen_image


@dataclass(frozen=True)
class PipelineConventions:
    """Recommendations for one pipeline class."""

    aspect_ratios: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Image size (width, height) in pixels, keyed by aspect ratio name."""
    prompt_suffixes: Mapping[str, str] = field(default_factory=dict)
    """Text appended to a prompt, keyed by language."""


_BY_CLASS_PREFIX = {
    "QwenImage": PipelineConventions(qwen_image.ASPECT_RATIOS, qwen_image.PROMPT_SUFFIXES)
}


def conventions_of(pipeline_class: str) -> PipelineConventions:
    """Return the recommendations for a pipeline class, or empty recommendations if the table has no
    entry for the class.
    """
    for prefix, conventions in _BY_CLASS_PREFIX.items():
        if pipeline_class.startswith(prefix):
            return conventions
    return PipelineConventions()


def language_of(prompt: str) -> str:
    """Return `zh` if the prompt contains Chinese characters and no kana, otherwise `en`."""
    han = any(
        "\u3400" <= letter <= "\u9fff" or "\U00020000" <= letter <= "\U0003ffff"
        for letter in prompt
    )
    kana = any("\u3040" <= letter <= "\u30ff" for letter in prompt)
    return "zh" if han and not kana else "en"
