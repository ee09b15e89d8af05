# SPDX-License-Identifier: Apache-2.0
"""Recommendations of a model's authors for calling its pipeline: image sizes by aspect ratio, and
quality phrases by language.

Generic code looks up the recommendations by pipeline class. The values for a model are in the
module with the model's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.model_executor.models.diffusers_pipeline import qwen_image


@dataclass(frozen=True)
class PipelineConventions:
    """Recommendations for one pipeline class."""

    aspect_ratios: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Image size (width, height) in pixels, by the name of the aspect ratio."""
    prompt_suffixes: Mapping[str, str] = field(default_factory=dict)
    """Text that is appended to a prompt, by language."""


_BY_CLASS_PREFIX = {
    "QwenImage": PipelineConventions(qwen_image.ASPECT_RATIOS, qwen_image.PROMPT_SUFFIXES)
}


def conventions_of(pipeline_class: str) -> PipelineConventions:
    """Return the recommendations for a pipeline class. The result is empty if there are none."""
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
