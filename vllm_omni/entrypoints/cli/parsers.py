# SPDX-License-Identifier: Apache-2.0
"""Create subcommand parsers, each with a summary, a description and examples for `--help`.

The lists of models in `--help` come from the model registry, which imports neither torch nor vLLM.
"""

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

_WIDTH = 100


def add_command(
    subparsers: Any, name: str, summary: str, description: str, examples: Sequence[str]
) -> argparse.ArgumentParser:
    """Add a subcommand.

    Args:
        subparsers: Subparsers of the `vllm-omni` parser.
        name: Name of the subcommand.
        summary: One-line summary for the list of commands.
        description: Paragraphs that `--help` prints after the usage, separated by empty lines.
        examples: Complete command lines.

    Returns:
        The parser, to which the subcommand's module adds its arguments.
    """
    paragraphs = [
        textwrap.fill(" ".join(text.split()), _WIDTH) for text in description.split("\n\n")
    ]
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description="\n\n".join(paragraphs),
        epilog="\n".join(["examples:", *(f"  {example}" for example in examples)]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser


def family_list() -> str:
    """Return the model family names for `--help`."""
    from vllm_omni.model_executor.models.registry import family_names

    return ", ".join(family_names())


def download_list() -> str:
    """Return, for `--help`, the names that `vllm-omni download` accepts."""
    from vllm_omni.model_executor.checkpoint.hub import hub_source
    from vllm_omni.model_executor.models.registry import known_names

    names = []
    for name, family in known_names().items():
        try:
            hub_source(family, name)
        except ValueError:
            continue
        names.append(name)
    return ", ".join(names)
