# SPDX-License-Identifier: Apache-2.0
"""Starts at the streaming endpoints wait for a free session, for nothing else, and not longer
than their client.
"""

import time
from collections.abc import Callable

import pytest
from helpers.fake_engine import EndpointServer, FakeEngine
from helpers.live_clients import GenerateClient, VideoClient
from helpers.waits import pause, seconds, wait_until
from prometheus_client import REGISTRY
from test_quotas_at_endpoints import Clock, quotas
from test_video_endpoint import START

MakeEndpoint = Callable[..., EndpointServer]
StreamClient = GenerateClient | VideoClient
ENDPOINTS = {GenerateClient: "realtime_video/generate", VideoClient: "realtime/video"}

both_endpoints = pytest.mark.parametrize("connect", ENDPOINTS)


def start(client: StreamClient) -> None:
    if isinstance(client, VideoClient):
        client.send(START)
    else:
        client.init()


def refusals(connect: type[StreamClient], code: str) -> float:
    labels = {"endpoint": ENDPOINTS[connect], "reason": code}
    return REGISTRY.get_sample_value("omni_rt_sessions_rejected_total", labels) or 0.0


@both_endpoints
@pytest.mark.parametrize("code", ["session_limit", "quota_exceeded", "draining"])
def test_only_a_full_server_is_waited_for(
    make_endpoint: MakeEndpoint, engine: FakeEngine, connect: type[StreamClient], code: str
) -> None:
    """A limit of the client and a stopping server are refused at once; the metrics count one
    refusal.
    """
    engine.delay_s = 0.05
    endpoint = make_endpoint(sessions_per_client=1 if code == "session_limit" else 64)
    if code == "quota_exceeded":
        endpoint.manager.quotas = quotas(Clock(), sessions=1)
    before = refusals(connect, code)
    quota = {"key": "default", "quota": "sessions"}
    quota_before = REGISTRY.get_sample_value("omni_quota_refusals_total", quota) or 0.0
    with connect(endpoint.port) as first, connect(endpoint.port) as second:
        start(first)
        wait_until(lambda: len(endpoint.manager) == 1)
        if code == "draining":
            endpoint.manager.drain.is_draining = True
        started_s = time.monotonic()
        start(second)
        second.close_code()
        assert time.monotonic() - started_s < seconds(3.0)
        wait_until(lambda: refusals(connect, code) == before + 1)
    if code == "quota_exceeded":
        assert REGISTRY.get_sample_value("omni_quota_refusals_total", quota) == quota_before + 1


@both_endpoints
def test_a_start_that_waited_in_vain_counts_once(
    make_endpoint: MakeEndpoint, engine: FakeEngine, connect: type[StreamClient]
) -> None:
    """However often the endpoint looks for a free session meanwhile."""
    endpoint = make_endpoint(info={"max_sessions": 1}, slot_wait_s=0.5)
    engine.delay_s = 0.05
    before = refusals(connect, "capacity")
    with connect(endpoint.port) as first, connect(endpoint.port) as second:
        start(first)
        wait_until(lambda: len(endpoint.manager) == 1)
        start(second)
        second.close_code()
    wait_until(lambda: refusals(connect, "capacity") == before + 1)


@both_endpoints
@pytest.mark.parametrize("how", ["closes", "vanishes"])
def test_a_client_that_leaves_while_it_waits_is_noticed(
    make_endpoint: MakeEndpoint, engine: FakeEngine, connect: type[StreamClient], how: str
) -> None:
    """It gives its connection back at once, and a session that becomes free is not opened for
    it.
    """
    endpoint = make_endpoint(info={"max_sessions": 1})
    engine.delay_s = 0.05
    with connect(endpoint.port) as first:
        start(first)
        wait_until(lambda: len(endpoint.manager) == 1)
        second = connect(endpoint.port)
        start(second)
        pause(0.3)
        assert endpoint.manager.guard.num_connections == 2
        if how == "closes":
            second.connection.close()
        else:
            second.connection.socket.shutdown(2)
        wait_until(lambda: endpoint.manager.guard.num_connections == 1, 3.0)


def test_messages_sent_during_the_wait_arrive_in_order(
    make_endpoint: MakeEndpoint, engine: FakeEngine
) -> None:
    """A client may steer before its session is there; the first chunk already shows it."""
    endpoint = make_endpoint(info={"max_sessions": 1})
    engine.delay_s = 0.05
    with GenerateClient(endpoint.port) as second:
        with GenerateClient(endpoint.port) as first:
            first.init()
            first.chunk()
            second.init(max_chunks=3)
            second.event("prompt", "snow")
            second.event("prompt", "night")
            pause(0.3)
        chunks = [second.chunk() for _ in range(3)]
    assert [chunk.index for chunk in chunks] == [0, 1, 2]
    prompts = [call.params.prompt for call in engine.chunks[-3:]]
    assert prompts == ["a path", "night", None]
