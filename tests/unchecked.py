# SPDX-License-Identifier: Apache-2.0
"""Tests that check nothing: only an error of what they call could make them fail.

A function checks if it holds an `assert`, a `raise` of AssertionError (or of a class of the suite
that is one), a call of one of `CHECKS` or of a name that begins with `assert`, or an argument
`check=True`; or if it names a function of the suite that checks: one of its own file, an imported
one, a member of a table, a fixture that it asks for and uses, the context manager of a class, or a
method of any class that its file can reach (methods go by their name alone). A fixture that only
stands in a signature does not count. Held by test_every_test_checks.py.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

CHECKS = frozenset({"raises", "warns", "fail", "raise_for_status", "check_call", "check_output"})
_MANAGER = ("__enter__", "__exit__", "__aenter__", "__aexit__", "__call__")

Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Module:
    """The names of one file. tables: assignments; imported: name here -> module, and name there
    ("" for a module).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        tree = ast.parse(path.read_text())
        self.functions = {node.name: node for node in tree.body if isinstance(node, _FUNCTIONS)}
        self.classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        self.tables: dict[str, ast.expr] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.tables |= {
                    target.id: node.value for target in targets if isinstance(target, ast.Name)
                }
        for statement in ast.walk(tree):
            if isinstance(statement, ast.ImportFrom):
                of = (statement.module or "").rpartition(".")[2]
                self.imported |= {
                    alias.asname or alias.name: (of, alias.name) for alias in statement.names
                }
            elif isinstance(statement, ast.Import):
                self.imported |= {
                    alias.asname or alias.name: (alias.name, "") for alias in statement.names
                }


class Suite:
    """All files below a folder of tests.

    One file name stands for one module (test_suite_layout.py).
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules = {path: Module(path) for path in sorted(root.rglob("*.py"))}
        self._by_name = {
            path.stem: module for path, module in self._modules.items() if path.stem != "conftest"
        }
        self._errors = {"AssertionError"} | {
            name
            for module in self._modules.values()
            for name, node in module.classes.items()
            if any(
                isinstance(base, ast.Name) and base.id == "AssertionError" for base in node.bases
            )
        }
        self._known: dict[ast.AST, bool] = {}

    def unchecked(self) -> list[str]:
        """Names of tests that check nothing, as pytest names them from the folder on."""
        return [
            f"{path.relative_to(self._root).as_posix()}::{name}"
            for path, module in self._modules.items()
            if path.name.startswith("test_")
            for name, test in _tests(module)
            if not self._checks(module, test)
        ]

    def _checks(self, module: Module, node: ast.AST) -> bool:
        if node not in self._known:
            # while it is looked at: what calls itself checks what the rest of it checks
            self._known[node] = False
            self._known[node] = any(map(self._is_check, ast.walk(node))) or any(
                self._checks(owner, named) for owner, named in self._named_in(module, node)
            )
        return self._known[node]

    def _is_check(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Raise):
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            return isinstance(raised, ast.Name) and raised.id in self._errors
        if isinstance(node, ast.Call):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else getattr(node.func, "id", "")
            )
            options = {
                keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords
            }
            return called in CHECKS or called.startswith("assert") or options.get("check") is True
        return isinstance(node, ast.Assert)

    def _named_in(self, module: Module, node: ast.AST) -> Iterator[tuple[Module, ast.AST]]:
        parameters = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                if inner.id in parameters:
                    for owner in (module, *self._conftests(module)):
                        yield from self._resolve(owner, inner.id)
                else:
                    yield from self._resolve(module, inner.id)
            elif isinstance(inner, ast.Attribute):
                of = (
                    module.imported.get(inner.value.id, ("", ""))
                    if isinstance(inner.value, ast.Name)
                    else ("", "")
                )
                if of[0] in self._by_name and of[1] == "":
                    yield from self._resolve(self._by_name[of[0]], inner.attr)
                else:
                    yield from self._methods(module, inner.attr)

    def _resolve(self, module: Module, name: str) -> Iterator[tuple[Module, ast.AST]]:
        if name in module.functions:
            yield module, module.functions[name]
        elif name in module.classes:
            yield from (
                (module, method)
                for method in _methods(module.classes[name])
                if method.name in _MANAGER
            )
        elif name in module.tables:
            yield module, module.tables[name]
        elif name in module.imported:
            of, there = module.imported[name]
            if there and self._by_name.get(of, module) is not module:
                yield from self._resolve(self._by_name[of], there)

    def _methods(self, module: Module, name: str) -> Iterator[tuple[Module, ast.AST]]:
        for owner in self._reachable(module):
            for kind in owner.classes.values():
                yield from ((owner, method) for method in _methods(kind) if method.name == name)

    def _conftests(self, module: Module) -> Iterator[Module]:
        for folder in module.path.parents:
            if (path := folder / "conftest.py") in self._modules:
                yield self._modules[path]

    def _reachable(self, module: Module) -> list[Module]:
        found: list[Module] = []
        frontier = [module, *self._conftests(module)]
        while frontier:
            owner = frontier.pop()
            if owner not in found:
                found.append(owner)
                frontier += (
                    self._by_name[of] for of, _ in owner.imported.values() if of in self._by_name
                )
        return found


def _methods(kind: ast.ClassDef) -> Iterator[Function]:
    return (node for node in kind.body if isinstance(node, _FUNCTIONS))


def _tests(module: Module) -> Iterator[tuple[str, Function]]:
    yield from (
        (name, function) for name, function in module.functions.items() if name.startswith("test_")
    )
    for kind in module.classes.values():
        if kind.name.startswith("Test"):
            yield from (
                (f"{kind.name}::{m.name}", m) for m in _methods(kind) if m.name.startswith("test_")
            )


if __name__ == "__main__":
    print(*Suite(Path(__file__).parent).unchecked(), sep="\n")
