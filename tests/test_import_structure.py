# SPDX-License-Identifier: Apache-2.0
"""Which way imports go: never in a circle, not even for types, and never from the engine's side to a model."""

import ast
import re
from collections.abc import Mapping, Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_omni"


def modules(package: Path) -> dict[str, Path]:
    """`{dotted name: file}` of every module below `package`."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in package.rglob("*.py")
    }


def imports(source: str, known: Set[str]) -> set[str]:
    """The modules of `known` that a file names anywhere: at its top, in functions, for its types."""
    named = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            named |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
    # `from package import module` names the module, not what the package's own file holds.
    return {name for name in named & known if not any(other.startswith(f"{name}.") for other in named & known)}


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """A way from a module back to itself; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        way: list[str] = error.args[1]
        return way
    return []


def test_there_is_no_circle() -> None:
    files = modules(PACKAGE)
    graph = {name: imports(path.read_text(), files.keys()) - {name} for name, path in files.items()}
    assert len(graph) > 300
    assert circle(graph) == []


def test_what_serves_models_imports_none() -> None:
    """But for `entrypoints/speech`, the door of one model."""
    files = modules(PACKAGE)
    models = {name for name in files if name.startswith("vllm_omni.model_executor.models.") and name.count(".") > 3}
    serving = re.compile(r"vllm_omni\.(worker|core|entrypoints(?!\.speech))\b")
    crossing = {
        (name, model)
        for name, path in files.items()
        if serving.match(name)
        for model in imports(path.read_text(), files.keys()) & models
    }
    assert len(models) > 100
    assert crossing == set()


def test_the_executor_without_workers_imports_none_of_them() -> None:
    """What both need lies below them."""
    files = modules(PACKAGE)
    workers = {name for name in files if name.startswith("vllm_omni.worker")}
    executors = {name: path for name, path in files.items() if name.startswith("vllm_omni.executor")}
    assert len(executors) > 8 and len(workers) > 30
    assert {name for name, path in executors.items() if imports(path.read_text(), files.keys()) & workers} == set()


def test_what_serves_imports_no_testing_models() -> None:
    """The command `verify` compares with them."""
    files = modules(PACKAGE)
    testing = {name for name in files if name.startswith("vllm_omni.testing")}
    users = {
        name
        for name, path in files.items()
        if name not in testing and imports(path.read_text(), files.keys()) & testing
    }
    assert len(testing) > 20
    assert users == {"vllm_omni.entrypoints.cli.verify"}


@pytest.mark.parametrize("line", ["from p.b import x", "import p.b", "from p import b", "if 1:\n    from p import b"])
def test_a_circle_is_seen(line: str) -> None:
    known = {"p", "p.a", "p.b"}
    graph = {"p.a": imports(line, known), "p.b": imports("from p.a import y", known)}
    assert set(circle(graph)) == {"p.a", "p.b"}


def test_only_roles_move_a_chunk_on() -> None:
    """`DiffusionRequest.step` is written by what a rank does in an engine step, not by models."""
    writes = re.compile(r"\b(?:request|chunk)\.step(?:, [\w.]+)* [+-]?= ")
    places = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if writes.search(path.read_text())}
    assert places == {f"worker/diffusion/roles/{name}.py" for name in ("with_layers", "temporal", "vae")}
