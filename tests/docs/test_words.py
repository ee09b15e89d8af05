# SPDX-License-Identifier: Apache-2.0
"""How the prose reads, as far as that can be counted: "what", where a noun would say it, stays rare.

Counted are the lines of comments and docstrings of Python files and the lines of Markdown outside fenced blocks.
Projects of the field have 0.3 to 0.7 in 1,000 such lines.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import snippets as docs

MOST_PER_1000 = 3.0


def prose_of_python(source: str) -> Iterator[str]:
    """Comments, and the lines of every string that stands as a statement."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from (line for line in lines[node.lineno - 1 : node.end_lineno] if line.strip())


def prose_of_markdown(text: str) -> Iterator[str]:
    fenced = False
    for line in text.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if line.strip() and not fenced and not line.lstrip().startswith("```"):
            yield line


def rate(folder: Path) -> tuple[float, int]:
    """(occurrences of "what" in 1,000 lines of prose, lines of prose)."""
    lines = [line for path in folder.rglob("*.py") for line in prose_of_python(path.read_text())]
    lines += [line for path in folder.rglob("*.md") for line in prose_of_markdown(path.read_text())]
    return 1000 * sum(len(re.findall(r"\bwhat\b", line, re.I)) for line in lines) / len(lines), len(lines)


@pytest.mark.parametrize("name", ["vllm_omni", "docs"])
def test_what_is_rare_in_the_prose(name: str) -> None:
    found, lines = rate(docs.REPO / name)
    assert lines > 2000
    assert found <= MOST_PER_1000


def test_prose_is_told_from_code() -> None:
    source = '"""What a module."""\nx = "what"  # what for\n\n\ndef f():\n    """Two\n\n    lines."""\n'
    assert list(prose_of_python(source)) == ["# what for", '"""What a module."""', '    """Two', '    lines."""']
    assert list(prose_of_markdown("What\n\n```\nwhat\n```\nso\n")) == ["What", "so"]
