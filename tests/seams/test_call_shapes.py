# SPDX-License-Identifier: Apache-2.0
"""Tests of the comparison of calls with signatures: which differences are reported, and which are
accepted.
"""

import ast
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from call_shapes import CallShape, calls_of_attribute, refused_calls, remote_calls


def theirs(
    self: Any, is_start: bool = True, prefix: str | None = None, *, delay: int | None = None
) -> None: ...
def same(
    self: Any, is_start: bool = True, prefix: str | None = None, *, delay: int | None = None
) -> None: ...
def wider(self: Any, *args: Any, **kwargs: Any) -> None: ...
def extra(
    self: Any,
    is_start: bool = True,
    prefix: str | None = None,
    delay: int | None = None,
    x: int = 1,
) -> None: ...
def older(self: Any, is_start: bool = True, prefix: str | None = None) -> None: ...
def shorter(
    self: Any, is_start: bool = True, *, prefix: str | None = None, delay: int | None = None
) -> None: ...
def renamed(
    self: Any, start: bool = True, prefix: str | None = None, *, delay: int | None = None
) -> None: ...
def swapped(
    self: Any, prefix: str | None = None, is_start: bool = True, *, delay: int | None = None
) -> None: ...
def demands(
    self: Any, is_start: bool, prefix: str | None = None, *, delay: int | None = None
) -> None: ...
def demands_more(
    self: Any, is_start: bool = True, prefix: str | None = None, *, delay: int | None = None, x: int
) -> None: ...


@pytest.mark.parametrize(
    ("override", "refused"),
    [
        (same, []),
        (wider, []),
        (extra, []),
        (older, ["'delay' by name"]),
        (shorter, ["'prefix' by position"]),
        (renamed, ["'is_start' by name"]),
        (
            swapped,
            [
                "'is_start' at position 1, where 'prefix' is",
                "'prefix' at position 2, where 'is_start' is",
            ],
        ),
        (demands, ["a call without 'is_start'"]),
        (demands_more, ["a call without 'x'"]),
    ],
)
def test_incompatible_overrides_are_found(override: Callable[..., Any], refused: list[str]) -> None:
    """An override is reported if a changed parameter name, position, order or default would make a
    call raise TypeError.
    """
    assert refused_calls(inspect.signature(override), inspect.signature(theirs)) == refused


def test_star_arguments_of_the_base_are_required() -> None:
    """If a function has star arguments, an override must have them too, because the overridden
    function accepts any arguments.
    """
    assert refused_calls(inspect.signature(same), inspect.signature(wider)) == [
        "any number of positions",
        "any name",
    ]


def test_calls_are_read_as_written() -> None:
    """Calls are extracted from source code with their positional arguments, keyword names and star
    arguments.
    """
    source = """
self.model_runner.load_model(dummy, eager=True)
self.model_runner.reload_weights(*args, **kwargs)
self.other.load_model()
executor.collective_rpc("sleep", args=(level, mode))
executor.collective_rpc(
    # a comment
    "reload", kwargs={"path": p}, args=(1,))
executor.collective_rpc("profile", args=(1, 2), kwargs=kwargs)
executor.collective_rpc(method)
"""
    assert dict(calls_of_attribute(ast.parse(source), "model_runner")) == {
        "load_model": CallShape(1, ("eager",)),
        "reload_weights": CallShape(0, (), open_ended=True),
    }
    assert dict(remote_calls(ast.parse(source))) == {
        "sleep": CallShape(2, ()),
        "reload": CallShape(1, ("path",)),
        "profile": CallShape(2, (), open_ended=True),
    }


def test_a_refused_call_has_a_reason() -> None:
    """Too many, unknown or missing arguments are reported. In an open-ended call, missing arguments
    are accepted, because star arguments may supply them.
    """
    signature = inspect.signature(lambda self, layout, *, size=1: None)
    assert CallShape(1, ("size",)).refusal(signature, bound=1) is None
    assert CallShape(2, ()).refusal(signature, bound=1) == "too many positional arguments"
    assert (
        CallShape(1, ("name",)).refusal(signature, bound=1)
        == "got an unexpected keyword argument 'name'"
    )
    assert CallShape(0, ()).refusal(signature, bound=1) == "missing a required argument: 'layout'"
    assert CallShape(0, (), open_ended=True).refusal(signature, bound=1) is None
