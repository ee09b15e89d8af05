# SPDX-License-Identifier: Apache-2.0
"""Extracts calls from source code and compares them with function signatures."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


@dataclass(frozen=True)
class CallShape:
    """The arguments of a call in source code. A call that has `*args` or `**kwargs` is
    `open_ended`.
    """

    positional: int
    names: tuple[str, ...]
    open_ended: bool = False

    @classmethod
    def of(cls, call: ast.Call) -> "CallShape":
        stars = any(isinstance(argument, ast.Starred) for argument in call.args)
        double_stars = any(keyword.arg is None for keyword in call.keywords)
        return cls(
            sum(not isinstance(argument, ast.Starred) for argument in call.args),
            tuple(keyword.arg for keyword in call.keywords if keyword.arg is not None),
            stars or double_stars,
        )

    def refusal(self, signature: Signature, bound: int = 0) -> str | None:
        """Return the reason why `signature` does not accept this call, or None if it does.

        Args:
            signature: Signature of the called function.
            bound: Number of implicit arguments, such as `self`.
        """
        bind = signature.bind_partial if self.open_ended else signature.bind
        try:
            bind(*[None] * (bound + self.positional), **dict.fromkeys(self.names))
        except TypeError as error:
            return str(error)
        return None


def refused_calls(ours: Signature, theirs: Signature) -> list[str]:
    """Return the calls that `theirs` accepts but `ours` rejects. For a valid override, the list is
    empty.
    """
    mine = list(ours.parameters.values())
    slots = [parameter.name for parameter in mine if parameter.kind in _POSITIONAL]
    names = {parameter.name for parameter in mine if parameter.kind in _NAMED}
    any_position = any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in mine)
    any_name = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in mine)
    refused = []
    positional = [
        parameter for parameter in theirs.parameters.values() if parameter.kind in _POSITIONAL
    ]
    for index, parameter in enumerate(positional):
        if index >= len(slots) and not any_position:
            refused.append(f"{parameter.name!r} by position")
        elif index < len(slots) and slots[index] != parameter.name and parameter.name in names:
            refused.append(f"{parameter.name!r} at position {index}, where {slots[index]!r} is")
    for parameter in theirs.parameters.values():
        if (
            parameter.kind in _NAMED
            and parameter.name not in names
            and not any_name
            and parameter.name != "self"
        ):
            refused.append(f"{parameter.name!r} by name")
        if parameter.kind is Parameter.VAR_POSITIONAL and not any_position:
            refused.append("any number of positions")
        if parameter.kind is Parameter.VAR_KEYWORD and not any_name:
            refused.append("any name")
    required = {p.name for p in theirs.parameters.values() if p.default is Parameter.empty}
    for index, parameter in enumerate(mine):
        needs = parameter.default is Parameter.empty and parameter.kind in (
            *_POSITIONAL,
            Parameter.KEYWORD_ONLY,
        )
        # A positional call would fill this position under another name. Missing names are reported
        # above.
        known = parameter.name in required or (
            parameter.kind in _POSITIONAL
            and index < len(positional)
            and positional[index].default is Parameter.empty
        )
        if needs and not known:
            refused.append(f"a call without {parameter.name!r}")
    return refused


def function_of(attribute: Any) -> Any:
    """Return the function behind a class's method, class method or static method, or None for other
    attributes.
    """
    function = getattr(attribute, "__func__", attribute)
    return function if inspect.isfunction(function) else None


def calls_of_attribute(tree: ast.AST, owner: str) -> Iterator[tuple[str, CallShape]]:
    """Yield (method, shape) for each call of the form `<...>.owner.method(...)`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Attribute)
            and node.func.value.attr == owner
        ):
            yield node.func.attr, CallShape.of(node)


def remote_calls(tree: ast.AST) -> Iterator[tuple[str, CallShape]]:
    """Yield (method, shape) for each call `collective_rpc("method", args=(...), kwargs={...})`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if (
            node.func.attr != "collective_rpc"
            or not node.args
            or not isinstance(node.args[0], ast.Constant)
        ):
            continue
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        args, kwargs = given.get("args"), given.get("kwargs")
        positional = len(args.elts) if isinstance(args, ast.Tuple) else 0
        names = kwargs.keys if isinstance(kwargs, ast.Dict) else []
        known = (args is None or isinstance(args, ast.Tuple)) and (
            kwargs is None or isinstance(kwargs, ast.Dict)
        )
        yield (
            str(node.args[0].value),
            CallShape(
                positional,
                tuple(ast.literal_eval(name) for name in names if name is not None),
                not known,
            ),
        )


def methods(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (
                part
                for part in node.body
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
            )
