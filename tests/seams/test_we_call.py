# SPDX-License-Identifier: Apache-2.0
"""The installed vLLM accepts every call that this package makes to its functions, classes and
methods.
"""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from call_shapes import CallShape, function_of
from test_overrides import own_classes
from vllm.platforms import current_platform

import vllm_omni

REPO = Path(vllm_omni.__file__).parents[1]
FOLDERS = ("vllm_omni", "examples", "benchmarks", "scripts")
NOT_IN_A_CPU_BUILD = "vllm.vllm_flash_attn."
NOT_IN_EVERY_VERSION = {
    "vllm_omni/compat.py": "each entry is called on the installed version by tests/test_compat.py"
}


class Imports:
    """The names that a module imports from vLLM anywhere in its file."""

    def __init__(self, tree: ast.AST) -> None:
        self.targets: dict[str, tuple[str, str | None]] = {}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").split(".")[0] == "vllm"
                and not node.level
            ):
                for alias in node.names:
                    self.targets[alias.asname or alias.name] = (str(node.module), alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "vllm" and alias.asname is not None:
                        self.targets[alias.asname] = (alias.name, None)

    def resolve(self, expression: ast.expr) -> Any:
        """Return the object that a dotted name refers to, or None if the object is not from vLLM.

        Raises:
            AttributeError: The object does not exist.
        """
        *path, root = reversed(_dotted(expression))
        if root not in self.targets:
            return None
        module_name, name = self.targets[root]
        found: Any = importlib.import_module(module_name)
        for part in ([] if name is None else [name]) + path[::-1]:
            found = _attribute(found, part)
        return found


def _dotted(expression: ast.expr) -> list[str]:
    if isinstance(expression, ast.Name):
        return [expression.id]
    if isinstance(expression, ast.Attribute) and (head := _dotted(expression.value))[0]:
        return [*head, expression.attr]
    return [""]


def _attribute(owner: Any, name: str) -> Any:
    if inspect.ismodule(owner) and not hasattr(owner, name):
        return importlib.import_module(f"{owner.__name__}.{name}")
    return getattr(owner, name)


def sources() -> list[Path]:
    paths = [path for folder in FOLDERS for path in sorted((REPO / folder).rglob("*.py"))]
    return [path for path in paths if "import" in path.read_text() and "vllm" in path.read_text()]


def skipped(imports: Imports, path: Path) -> bool:
    return str(path.relative_to(REPO)) in NOT_IN_EVERY_VERSION


def direct_calls() -> Iterator[tuple[str, Any, CallShape, int]]:
    """Yield (location, callable, shape, implicit arguments) for each direct call into vLLM.

    Direct calls are calls to names imported from vLLM, and calls to methods of objects annotated
    with a vLLM class.
    """
    for path in sources():
        tree = ast.parse(path.read_text())
        imports = Imports(tree)
        if not imports.targets or skipped(imports, path):
            continue
        typed = _annotated(tree, imports)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            where = f"{path.relative_to(REPO)}:{node.lineno} {ast.unparse(node.func)}"
            module = imports.targets.get(_dotted(node.func)[0], ("", None))[0] + "."
            if module.startswith(NOT_IN_A_CPU_BUILD) and current_platform.is_cpu():
                continue
            if (called := imports.resolve(node.func)) is not None:
                yield where, called, CallShape.of(node), 0
            elif isinstance(node.func, ast.Attribute) and (
                owners := typed.get(ast.unparse(node.func.value))
            ):
                name = node.func.attr
                method = next(
                    (m for o in owners if (m := inspect.getattr_static(o, name, None)) is not None),
                    None,
                )
                yield where, function_of(method) or method, CallShape.of(node), 1


def _annotated(tree: ast.AST, imports: Imports) -> dict[str, list[type]]:
    """Return the expressions (`client`, `self._client`) that are annotated with the same vLLM class
    everywhere in the file.

    An attribute assigned from an annotated parameter gets the parameter's class and the classes
    that `isinstance` narrows the parameter to.
    """
    found: dict[str, set[type]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            classes = {
                a.arg: cls for a in arguments if (cls := _class(a.annotation, imports)) is not None
            }
            for argument in arguments:
                found.setdefault(argument.arg, set()).add(classes.get(argument.arg, object))
            for part in ast.walk(node):
                if (
                    isinstance(part, ast.Assign)
                    and isinstance(part.value, ast.Name)
                    and part.value.id in classes
                ):
                    for target in part.targets:
                        if isinstance(target, ast.Attribute):
                            found.setdefault(ast.unparse(target), set()).add(classes[part.value.id])
        elif (
            isinstance(node, ast.AnnAssign)
            and (cls := _class(node.annotation, imports)) is not None
        ):
            found.setdefault(ast.unparse(node.target), set()).add(cls)
    typed = {
        name: list(classes)
        for name, classes in found.items()
        if len(classes) == 1 and object not in classes
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "isinstance"
            and len(node.args) == 2
        ):
            cls = _class(node.args[1], imports)
            if cls is not None and (name := ast.unparse(node.args[0])) in {
                *typed,
                "self._client.engine_core",
            }:
                typed.setdefault(name, []).append(cls)
    return typed


def _class(annotation: ast.expr | None, imports: Imports) -> type | None:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.BinOp):  # `EngineClient | None`
        return _class(annotation.left, imports)
    if not isinstance(annotation, ast.Name | ast.Attribute):
        return None
    found = imports.resolve(annotation)
    return found if isinstance(found, type) else None


def base_calls() -> Iterator[tuple[str, Any, CallShape, int]]:
    """Yield (location, callable, shape, implicit arguments) for each `super().method(...)` that
    resolves to a vLLM method.
    """
    seen = set()
    for cls in own_classes().values():
        order = cls.__mro__
        for position, owner in enumerate(order):
            if not owner.__module__.startswith("vllm_omni"):
                continue
            for name, attribute in vars(owner).items():
                function = function_of(attribute)
                if (
                    function is None
                    or "super" not in function.__code__.co_names
                    or _is_generated(function)
                ):
                    continue
                for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
                    called = _super_method(node)
                    bases = [
                        base
                        for base in order[position + 1 :]
                        if called is not None and called in vars(base)
                    ]
                    if not bases or bases[0].__module__.split(".")[0] != "vllm":
                        continue
                    key = (owner, name, called, bases[0])
                    theirs = function_of(vars(bases[0])[called])
                    if theirs is not None and key not in seen:
                        seen.add(key)
                        where = f"{owner.__name__}.{name} -> {bases[0].__name__}.{called}"
                        yield where, theirs, CallShape.of(node), 1  # type: ignore[arg-type]


def _is_generated(function: Any) -> bool:
    """Return whether a function was generated, for example by `dataclass`, and therefore has no
    source.
    """
    return bool(function.__code__.co_filename.startswith("<"))


def _super_method(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    value = node.func.value
    is_super = (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id == "super"
    )
    return node.func.attr if is_super else None


def refusals(calls: Iterator[tuple[str, Any, CallShape, int]]) -> tuple[dict[str, str], set[str]]:
    refused, taken = {}, set()
    for where, called, shape, bound in calls:
        if called is None:
            refused[where] = "no such method"
            continue
        try:
            signature = inspect.signature(called)
        except ValueError:  # the function is written in C
            continue
        if (reason := shape.refusal(signature, bound)) is not None:
            refused[where] = reason
        taken.add(where.split(" ", 1)[1])
    return refused, taken


def test_vllm_accepts_every_call() -> None:
    """vLLM accepts every call to a function or class imported from it, and every call to a method
    of an object annotated with a vLLM class.
    """
    refused, taken = refusals(direct_calls())
    assert refused == {}
    assert {
        "EngineCoreOutput",
        "get_model_loader",
        "mm_input",
        "PoolingParams",
        "register_config_parser",
        "ModelRegistry.register_model",
        "create_worker_profiler",
        "run_method",
        "AsyncLLM.from_engine_args",
        "self._client.encode",
        "self._client.abort",
        "self._client.collective_rpc",
        "self.engine.generate",
    } <= taken


def test_base_methods_of_vllm_accept_super_calls() -> None:
    """vLLM accepts every `super().method(...)` in a subclass of its classes."""
    refused, taken = refusals(base_calls())
    assert refused == {}
    assert len(taken) > 15


def test_every_import_exists() -> None:
    """Every name imported from vLLM exists, including names imported inside functions and for type
    checkers.
    """
    missing = {}
    for path in sources():
        imports = Imports(ast.parse(path.read_text()))
        for name, (module, attribute) in imports.targets.items():
            if f"{module}.".startswith(NOT_IN_A_CPU_BUILD) or skipped(imports, path):
                continue
            if module.startswith("vllm.v1.worker.cpu") and not current_platform.is_cpu():
                continue
            try:
                found = importlib.import_module(module)
                if attribute is not None:
                    _attribute(found, attribute)
            except (ImportError, AttributeError) as error:
                missing[f"{path.relative_to(REPO)}: {name}"] = str(error)
    assert missing == {}


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("from vllm.inputs import mm_input\nmm_input(prompt=[0])", "prompt"),
        (
            "from vllm import PoolingParams\nPoolingParams(task='plugin', no_such_field=1)",
            "no_such_field",
        ),
        (
            "from vllm.engine.protocol import EngineClient\n"
            "class A:\n  def __init__(self, client: 'EngineClient | None') -> None:\n    self.c = "
            "client\n"
            "  def f(self):\n    self.c.abort()\n",
            "request_id",
        ),
    ],
)
def test_a_call_that_vllm_refuses_is_found(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that vLLM would reject is reported, which shows that the checks above detect invalid
    calls.
    """
    (tmp_path / "vllm_omni").mkdir()
    (tmp_path / "vllm_omni" / "module.py").write_text(code)
    monkeypatch.setattr("test_we_call.REPO", tmp_path)
    refused, _ = refusals(direct_calls())
    assert len(refused) == 1 and reason in next(iter(refused.values()))
