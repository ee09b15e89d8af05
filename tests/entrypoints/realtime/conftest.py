# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the realtime doors: a fake engine behind a real server."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fake_engine import Client, DoorServer, FakeEngine

from vllm_omni.entrypoints.realtime.facts import WorldFacts
from vllm_omni.entrypoints.realtime.limits import DoorLimits


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def make_door(engine: FakeEngine) -> Iterator[Callable[..., DoorServer]]:
    """`make_door(facts={...}, **limits)` -> a running server; it stops after the test."""
    with ExitStack() as stack:

        def make(facts: dict[str, Any] | None = None, **limits: Any) -> DoorServer:
            world = WorldFacts(**{"height": 32, "width": 48, "model": "null", **(facts or {})})
            return stack.enter_context(DoorServer(engine, DoorLimits(**limits), world))

        yield make


@pytest.fixture
def door(make_door: Callable[..., DoorServer]) -> DoorServer:
    return make_door()


@pytest.fixture
def client(door: DoorServer) -> Iterator[Client]:
    with door.client() as client:
        yield client
