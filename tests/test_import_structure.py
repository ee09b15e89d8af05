# SPDX-License-Identifier: Apache-2.0
"""Imports are free of cycles, including type-checking imports, and generic modules import no
models.
"""

import ast
import re
from collections.abc import Mapping, Set
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.source

PACKAGE = Path(__file__).parents[1] / "vllm_omni"
NAMED_MODEL = r"model_executor\.models\.\w+\.\w+"
"""Regular expression for modules inside a model's folder. It does not match the `registry` and
`capabilities` modules, which are next to these folders.
"""


def modules(package: Path) -> dict[str, Path]:
    """Return `{dotted name: file}` for all modules in `package`."""
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in package.rglob("*.py")
    }


def imports(source: str, known: Set[str]) -> set[str]:
    """Return the modules in `known` that a file imports at its top, inside functions, or for type
    checking.
    """
    named = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            named |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
    # `from package import module` imports the module, not a name from the package's `__init__`.
    return {
        name
        for name in named & known
        if not any(other.startswith(f"{name}.") for other in named & known)
    }


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Return an import cycle, or an empty list if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        way: list[str] = error.args[1]
        return way
    return []


@cache
def graph() -> dict[str, set[str]]:
    """Return `{module: modules that it imports}` for the package's modules."""
    files = modules(PACKAGE)
    return {name: imports(path.read_text(), files.keys()) - {name} for name, path in files.items()}


def arrows(importers: str, imported: str) -> set[tuple[str, str]]:
    """Return `(importer, imported)` for each import in which the importing and the imported module
    match the respective regular expression.

    The expressions are matched against module names without the prefix `vllm_omni.`.
    """
    sources, targets = (
        re.compile(rf"vllm_omni\.({importers})\b"),
        re.compile(rf"vllm_omni\.({imported})\b"),
    )
    assert any(map(sources.match, graph())) and any(map(targets.match, graph()))
    return {
        (name, other)
        for name in graph()
        if sources.match(name)
        for other in graph()[name]
        if targets.match(other)
    }


def test_there_are_no_circular_imports() -> None:
    assert len(graph()) > 300
    assert circle(graph()) == []


@pytest.mark.parametrize(
    "package", ["worker", "core", "entrypoints", "planning", "composition", "session_files"]
)
def test_serving_code_imports_no_model_directly(package: str) -> None:
    """The serving code imports no model directly. It uses the model families in the registry
    instead.
    """
    assert arrows(package, NAMED_MODEL) == set()


def test_outside_the_models_only_the_executor_imports_a_model() -> None:
    """Outside the models' own folders, only the executor that runs without workers imports a model
    family, namely the family of diffusers pipelines.
    """
    crossing = arrows("(?!testing|model_executor)", NAMED_MODEL)
    assert {name.split(".")[1] for name, _ in crossing} == {"executor"}
    assert {model.split(".")[3] for _, model in crossing} == {"diffusers_pipeline"}


def test_modules_that_models_share_import_no_model_but_wan() -> None:
    """Modules shared by models import no model except `wan`, which several models use."""
    shared = r"model_executor\.(?!models\b)|model_executor\.models\.(registry|capabilities|wan)"
    assert arrows(shared, NAMED_MODEL.replace(r"\w+", r"(?!wan\b)\w+", 1)) == set()


def test_the_executor_without_workers_imports_no_worker_module() -> None:
    """The executor that runs without workers imports no worker module, because code that both need
    is in lower-level modules.
    """
    assert arrows("executor", "worker") == set()


def test_models_do_not_import_the_module_for_snapshot_files() -> None:
    """Of the snapshot code, models import only `saved_tensors`, which describes the saved state,
    and not the module that reads and writes snapshot files.
    """
    assert arrows("model_executor", "session_files") == set()


def test_only_the_verify_command_imports_testing_code() -> None:
    """Of the serving code, only the `verify` command imports `testing`."""
    assert {name for name, _ in arrows("(?!testing)", "testing")} == {
        "vllm_omni.entrypoints.cli.checkpoints.verify"
    }


@pytest.mark.parametrize(
    "line", ["from p.b import x", "import p.b", "from p import b", "if 1:\n    from p import b"]
)
def test_a_circular_import_is_detected(line: str) -> None:
    known = {"p", "p.a", "p.b"}
    named = {"p.a": imports(line, known), "p.b": imports("from p.a import y", known)}
    assert set(circle(named)) == {"p.a", "p.b"}


def test_only_roles_advance_the_step_of_a_chunk() -> None:
    """Only roles assign `DiffusionRequest.step`. Models do not."""
    writes = re.compile(r"\b(?:request|chunk)\.step(?:, [\w.]+)* [+-]?= ")
    positions = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if writes.search(path.read_text())
    }
    assert positions == {
        f"worker/diffusion/roles/{name}.py" for name in ("single", "with_layers", "temporal", "vae")
    }
