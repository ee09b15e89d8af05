# SPDX-License-Identifier: Apache-2.0
"""Recommendations of a model's authors around a bare pipeline call: sizes by aspect ratio, quality
phrases by language.

Generic code asks this table by pipeline class and names no model; a model's own numbers live in a
file of its name.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm_omni.model_executor.models.diffusers_pipeline import qwen_image


@dataclass(frozen=True)
class Conventions:
    """aspect_ratios: name -> (width, height) in pixels. prompt_suffixes: language -> text added
    to a prompt.
    """

    aspect_ratios: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    prompt_suffixes: Mapping[str, str] = field(default_factory=dict)


_BY_CLASS_PREFIX = {"QwenImage": Conventions(qwen_image.ASPECT_RATIOS, qwen_image.PROMPT_SUFFIXES)}


def conventions_of(pipeline_class: str) -> Conventions:
    """The recommendations for a pipeline class; empty for one that has none."""
    for prefix, conventions in _BY_CLASS_PREFIX.items():
        if pipeline_class.startswith(prefix):
            return conventions
    return Conventions()


def language_of(prompt: str) -> str:
    """`zh` if the prompt holds Chinese characters (without kana, which would make it Japanese),
    else `en`.
    """
    han = any(
        "\u3400" <= letter <= "\u9fff" or "\U00020000" <= letter <= "\U0003ffff"
        for letter in prompt
    )
    kana = any("\u3040" <= letter <= "\u30ff" for letter in prompt)
    return "zh" if han and not kana else "en"
