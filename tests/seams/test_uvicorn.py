# SPDX-License-Identifier: Apache-2.0
"""Tests that uvicorn's classes have the attributes that this package uses. A failing test names the
attribute and the class that uses it.

`uvicorn.Config(ws=..., http=...)` accepts protocol classes, so setting a protocol class is public
API. The attributes that a subclass inherits are not documented, so the tests look for them in the
installed uvicorn's source.
"""

import ast
import inspect
import textwrap

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from vllm_omni.entrypoints import gathered_writes
from vllm_omni.entrypoints.limits import frame_budget, header_limits


def attributes_of(cls: type) -> set[str]:
    """Return the names of a class's methods and of the attributes that these methods set or
    annotate on `self`.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return stored | set(dir(cls))


def used_of(cls: type, owners: set[str]) -> set[str]:
    """Return the protocol attributes that a class's source uses. `owners` are the names that the
    source uses for the protocol.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in owners
    }


@pytest.mark.parametrize(
    ("cls", "owners"),
    [
        (gathered_writes.GatheringProtocol, {"self", "super()"}),
        (frame_budget.BudgetedProtocol, {"self", "super()"}),
        (gathered_writes._Writer, {"protocol", "self._protocol"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_the_websocket_protocol_has_the_attributes_of_its_subclasses(
    cls: type, owners: set[str]
) -> None:
    """uvicorn's protocol has every attribute that this package's subclasses use. Names with a
    leading underscore belong to this package and are not checked.
    """
    used = {name for name in used_of(cls, owners) if not name.startswith("_")}
    assert len(used) > 3
    missing = used - attributes_of(WebSocketsSansIOProtocol)
    assert not missing, (
        f"uvicorn {uvicorn.__version__}: WebSocketsSansIOProtocol lacks {missing}; {cls} uses them"
    )


def test_the_websocket_protocol_calls_overridden_methods() -> None:
    """uvicorn calls the methods that this package overrides. If uvicorn stopped calling one of
    these methods, message floods would no longer be limited, and nothing would report an error.
    """
    source = inspect.getsource(WebSocketsSansIOProtocol)
    for method in ("handle_events", "handle_connect"):
        assert f"self.{method}(" in source, (
            f"uvicorn {uvicorn.__version__} does not call {method} any more"
        )
    for method in ("data_received", "pause_writing", "resume_writing"):  # asyncio calls them
        assert method in vars(WebSocketsSansIOProtocol)


def test_the_config_accepts_protocol_classes() -> None:
    config = uvicorn.Config(lambda: None, ws=frame_budget.BudgetedProtocol, http=H11Protocol)
    config.load()
    assert config.ws_protocol_class is frame_budget.BudgetedProtocol, (
        frame_budget.FrameBudget.apply.__qualname__
    )
    assert config.http_protocol_class is H11Protocol, header_limits.limit_headers.__qualname__
    assert hasattr(config, "loaded_app"), "entrypoints/telemetry/request_id.py wraps it"
