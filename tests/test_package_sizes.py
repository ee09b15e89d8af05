# SPDX-License-Identifier: Apache-2.0
"""Tests that limit the number of code lines in files, in functions and in the runner. Docstrings do
not count.
"""

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

REPO = Path(__file__).parents[1]
PACKAGE = REPO / "vllm_omni"
FILE_LINES, FUNCTION_LINES = 560, 120
RUNNER, RUNNER_LINES = PACKAGE / "worker" / "diffusion" / "runner.py", 210
TOPOLOGY = {
    "first_stage",
    "is_first_rank",
    "is_last_rank",
    "is_vae_stage",
    "last_stage",
    "num_stages",
    "world_size",
}
"""Attributes that describe a rank's position in the topology."""


def code_lines(path: Path) -> int:
    """Return the number of code lines in a module, excluding docstrings and field docstrings."""
    source = path.read_text()
    texts = sum(
        node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        if node.end_lineno is not None
    )
    return len(source.splitlines()) - texts


def test_no_file_of_the_package_is_long() -> None:
    lengths = {path: code_lines(path) for path in PACKAGE.rglob("*.py")}
    assert len(lengths) > 300
    assert {
        str(path.relative_to(REPO)): lines for path, lines in lengths.items() if lines > FILE_LINES
    } == {}


def test_no_function_of_the_package_is_long() -> None:
    long = {
        f"{path.relative_to(REPO)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= FUNCTION_LINES
    }
    assert long == set()


def test_the_runner_is_short_and_knows_no_topology() -> None:
    """The runner is short and does not read the topology, because only the roles depend on the
    topology.
    """
    source = RUNNER.read_text()
    assert code_lines(RUNNER) <= RUNNER_LINES
    named = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    assert named & TOPOLOGY == set()
