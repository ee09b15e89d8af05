# SPDX-License-Identifier: Apache-2.0
"""What an operator gets from a real `vllm serve --omni`: request ids, spans, quotas, metrics and
logs.

The shared server logs text. The `operated` fixture's server logs JSON, exports spans to a collector
in this process, and has quotas.
"""

import hashlib
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from helpers.fake_engine import FIRST, LATER
from helpers.otlp_collector import CALLER_SPAN, TRACE_ID, Collector
from helpers.served import AUTHORIZED, HEIGHT, KEY, MAX_SESSIONS, WIDTH, Served
from helpers.waits import seconds, wait_until
from prometheus_client.parser import text_string_to_metric_families
from session_calls import call, request
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

SMALL_KEY = "a-key-with-a-small-quota"
SMALL = {"Authorization": f"Bearer {SMALL_KEY}"}
DEPLOY = Path(__file__).parents[3] / "deploy"
TARGET_LABELS = {"instance", "job"}
"""Labels that Prometheus adds to every sample."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def operated(
    null_world: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Served]:
    """Start a server with two API keys, one of which has a small quota."""
    folder = tmp_path_factory.mktemp("operated")
    quotas = folder / "quotas.toml"
    digest = hashlib.sha256(SMALL_KEY.encode()).hexdigest()
    quotas.write_text(f'[keys.small]\nsha256 = "{digest}"\nsessions = 1\nchunks_per_minute = 3\n')
    omni = {"height": HEIGHT, "width": WIDTH, "max_sessions": MAX_SESSIONS, "quotas": str(quotas)}
    flags = [
        "--additional-config",
        json.dumps({"omni": omni}),
        "--logging-config.formatter",
        "json",
    ]
    flags += [
        "--otlp-traces-endpoint",
        f"http://127.0.0.1:{collector.port}",
        "--enable-request-id-headers",
    ]
    flags += ["--api-key", KEY, SMALL_KEY]
    variables = {"VLLM_OMNI_IDLE_TIMEOUT_S": "120", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    variables |= {"VLLM_LOGGING_LEVEL": "INFO"}
    server = Served(null_world, folder, *flags, environ=variables)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def get(server: Served, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=seconds(20))
    connection.request("GET", path, headers=headers)
    response = connection.getresponse()
    response.read()
    return response


def ids(response: http.client.HTTPResponse) -> list[str]:
    return [value for name, value in response.getheaders() if name.lower() == "x-request-id"]


def walk(server: Served, session_id: str, headers: dict[str, str], num_chunks: int = 2) -> None:
    """Generate a session's chunks, one request per chunk, and then close the session."""
    with server.client(**headers) as client:
        for number in range(num_chunks):
            client.send(request(LATER if number else FIRST, session_id=session_id))
            client.frames()
        client.request({"endpoint": "close", "session_id": session_id, "protocol_version": 1})


# -- ids -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["served", "operated"])
def test_every_http_response_carries_one_request_id(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """Every response contains the client's request id or a new one, including responses to refused
    requests and unknown routes. The same is true with vLLM's own flag for request ids, which the
    `operated` server sets.
    """
    server: Served = request.getfixturevalue(kind)
    for path, status in (("/health", 200), ("/v1/models", 401), ("/v1/nothing", 401), ("/", 307)):
        response = get(server, path, **{"X-Request-Id": "mine-1"})
        assert (response.status, ids(response)) == (status, ["mine-1"])
        (made,) = ids(get(server, path))
        assert len(made) == 32
    assert get(server, "/v1/nothing", **AUTHORIZED).status == 404
    (made,) = ids(get(server, "/health", **{"X-Request-Id": "two words"}))
    assert made != "two words"


def test_a_handshake_carries_the_request_id_whether_it_succeeds_or_not(served: Served) -> None:
    url, mine = (
        f"ws://127.0.0.1:{served.port}/v1/realtime/world/camera",
        {"X-Request-Id": "shake-1"},
    )
    with connect(url, additional_headers={**AUTHORIZED, **mine}) as socket:
        assert socket.response is not None and socket.response.headers["X-Request-Id"] == "shake-1"
    for headers, status in (
        ({}, 401),
        ({**AUTHORIZED, "Origin": "https://elsewhere.example"}, 403),
    ):
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers={**headers, **mine})
        assert refused.value.response.status_code == status
        assert refused.value.response.headers["X-Request-Id"] == "shake-1"


def test_every_line_of_a_session_names_it_and_the_request(served: Served) -> None:
    """Log lines about a session and about its connection contain the session id and the request id.
    uvicorn's log line about the handshake contains the request id.
    """
    before = len(served.log)
    walk(served, "logged-session", {**AUTHORIZED, "X-Request-Id": "logged-request"})
    wait_until(lambda: "realtime/world/camera ended" in served.log[before:])
    lines = served.log[before:].splitlines()
    own = [
        line
        for line in lines
        if any(
            word in line
            for word in ("session_opened", "session_closed", "realtime/world/camera ended")
        )
    ]
    assert len(own) == 3
    assert all(
        line.endswith(" request_id=logged-request session_id=logged-session") for line in own
    ), own
    (handshake,) = [line for line in lines if '"WebSocket /v1' in line]
    assert handshake.endswith(" request_id=logged-request")


def test_the_fast_paths_are_logged_once_and_listed_when_ready(operated: Served) -> None:
    """The log and the readiness reply list every engine fast path, with the reason if a path is
    off.
    """
    wait_until(lambda: json.loads(call(operated, "GET", "/omni/ready")[1])["fast_paths"])
    found = json.loads(call(operated, "GET", "/omni/ready")[1])["fast_paths"]
    assert {"name": "flash_attention_3", "on": False, "reason": "there is no CUDA GPU"} in found
    assert operated.log.count("fast paths: none") == 1
    for path in found:
        line = f"fast path {path['name']}: off, because {path['reason']}; "
        assert operated.log.count(line) == 1, path


def test_json_lines_have_the_ids_as_fields(operated: Served) -> None:
    before = len(operated.log)
    walk(operated, "json-session", {**AUTHORIZED, "X-Request-Id": "json-request"})
    wait_until(lambda: "realtime/world/camera ended" in operated.log[before:])
    found = [json.loads(line) for line in operated.log[before:].splitlines()]
    own = [
        line
        for line in found
        if line["message"].startswith(("session_opened", "session_closed", "realtime/world/camera"))
    ]
    assert [line["session_id"] for line in own] == ["json-session"] * 3
    assert [line["request_id"] for line in own] == ["json-request"] * 3
    others = [
        line for line in found if line["name"] == "uvicorn.access" or "WebSocket" in line["message"]
    ]
    assert others and all(line["request_id"] == "json-request" for line in others)


# -- spans -----------------------------------------------------------------------------------------


def test_spans_of_a_session_belong_to_the_callers_trace(
    operated: Served, collector: Collector
) -> None:
    """The spans of a session belong to the caller's trace. Each span appears once for each of two
    chunks, with the correct parent, and lies within its parent in time.
    """
    walk(operated, "traced", {**AUTHORIZED, "traceparent": f"00-{TRACE_ID}-{CALLER_SPAN}-01"})
    wait_until(lambda: any(span.name == "session" for span in collector.spans(TRACE_ID)), 20)
    wait_until(
        lambda: sum(span.name == "llm_request" for span in collector.spans(TRACE_ID)) == 3, 20
    )
    spans = collector.spans(TRACE_ID)
    (session,) = [span for span in spans if span.name == "session"]
    assert session.parent_span_id.hex() == CALLER_SPAN
    info = {item.key: item.value.string_value for item in session.attributes}
    assert info["omni.session_id"] == "traced" and info["omni.endpoint"] == "realtime/world/camera"
    assert len(info["omni.request_id"]) == 32
    chunks = [span for span in spans if span.name == "chunk"]
    assert len(chunks) == 2
    for chunk in chunks:
        assert chunk.parent_span_id == session.span_id
        below = {span.name: span for span in spans if span.parent_span_id == chunk.span_id}
        assert {
            "queue",
            "encode",
            "denoise",
            "decode",
            "render",
            "transport",
            "llm_request",
        } == set(below)
        for name in ("queue", "encode", "denoise", "decode"):
            stage = below[name]
            assert (
                chunk.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
            )
            assert stage.end_time_unix_nano <= below["render"].start_time_unix_nano
        assert (
            below["render"].end_time_unix_nano
            <= chunk.end_time_unix_nano
            <= session.end_time_unix_nano
        )
    assert [
        span.name for span in spans if span.parent_span_id == session.span_id and span not in chunks
    ] == [
        "llm_request"  # the engine closes the session
    ]
    numbers = [
        item.value.int_value
        for chunk in chunks
        for item in chunk.attributes
        if item.key == "omni.chunk_index"
    ]
    assert sorted(numbers) == [0, 1]


def test_a_traceparent_without_tracing_is_ignored(served: Served) -> None:
    """A `traceparent` sent to a server without tracing causes no error and no warning."""
    before = len(served.log)
    walk(
        served,
        "untraced",
        {**AUTHORIZED, "traceparent": f"00-{TRACE_ID}-{CALLER_SPAN}-01"},
        num_chunks=1,
    )
    assert "tracing" not in served.log[before:].lower()


# -- quotas ----------------------------------------------------------------------------------------


def test_a_key_beyond_its_quota_is_refused_at_the_socket_and_over_http(operated: Served) -> None:
    """A key that exceeds its quota gets a typed error with a retry time for a second session, a
    fourth chunk and an HTTP request. Other keys are not affected. Metrics contain the key's name,
    and the log contains no key.
    """
    with operated.client(**SMALL) as client:
        client.send(request(FIRST, session_id="small"))
        client.frames()
        error = client.request(request(FIRST, session_id="second"))
        assert (error["code"], error["quota"], error["retryable"]) == (
            "quota_exceeded",
            "sessions",
            True,
        )
        client.send(request(2 * LATER, session_id="small"))
        client.frames()
        error = client.request(request(LATER, session_id="small"))
        assert (error["code"], error["quota"]) == ("quota_exceeded", "chunks")
        assert 0 < error["retry_after_ms"] <= 20_000  # three per minute
        connection = http.client.HTTPConnection("127.0.0.1", operated.port, timeout=seconds(20))
        body = json.dumps({"prompt": "a path"})
        connection.request(
            "POST", "/v1/images/generations", body, {**SMALL, "Content-Type": "application/json"}
        )
        response = connection.getresponse()
        error = msgspec.json.decode(response.read())["error"]
        assert (response.status, error["code"]) == (429, "quota_exceeded")
        assert 0 < int(response.headers["Retry-After"]) <= 20
        walk(operated, "free", AUTHORIZED)
        page = metrics(operated)
        client.request({"endpoint": "close", "session_id": "small", "protocol_version": 1})
    assert 'omni_quota_refusals_total{key="small",quota="sessions"} 1.0' in page
    assert 'omni_quota_refusals_total{key="small",quota="chunks"} 2.0' in page
    assert 'omni_quota_chunks_total{key="small"} 3.0' in page
    assert 'omni_quota_sessions{key="small"} 1.0' in page
    for secret in (KEY, SMALL_KEY, hashlib.sha256(SMALL_KEY.encode()).hexdigest()):
        assert secret not in operated.log and secret not in page


def expressions() -> Iterator[str]:
    """Yield every PromQL expression in the example rules and dashboard."""
    for group in yaml.safe_load((DEPLOY / "rules.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads((DEPLOY / "grafana-dashboard.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def exported(page: str) -> dict[str, set[str]]:
    """Return {metric: its label names} for all samples on a metrics page."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def unknown_names(expression: str, known: dict[str, set[str]]) -> list[str]:
    """Return the metrics and labels in an expression that are not in `known`."""
    missing = []
    selectors = re.findall(r"\b((?:omni_|vllm:)\w+)(?:\{([^}]*)\})?", expression)
    for name, selector in selectors:
        labels = re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)
        missing += [name] if name not in known else []
        missing += [
            f"{name}{{{label}}}"
            for label in labels
            if label not in known.get(name, set()) | TARGET_LABELS
        ]
    for grouped in re.findall(r"\b(?:by|ignoring|on) \(([^)]*)\)", expression):
        for label in re.split(r",\s*", grouped):
            if not any(label in known.get(name, set()) | TARGET_LABELS for name, _ in selectors):
                missing.append(f"by {label}")
    return missing


def test_the_server_exports_the_metrics_of_rules_and_dashboard(operated: Served) -> None:
    """After failed and late chunks, a refusal and a video job, the server exports every metric and
    label that the example rules and dashboard use.
    """
    with operated.client(**AUTHORIZED, **{"X-Request-Id": "engine-line"}) as client:
        failed = client.request(
            request(FIRST, session_id="failing", options={"fail_in": "denoise"})
        )
        assert failed["code"] == "engine_error"
    (trace,) = [line for line in operated.log.splitlines() if "injected failure" in line]
    assert "-engine-line-failing-" in json.loads(trace)["message"]  # the worker's line has both ids
    with operated.client(**AUTHORIZED) as client:
        client.send(
            request(FIRST + LATER, session_id="late", options={"steps": 2, "step_ms": 400.0})
        )
        client.frames()
    with operated.client(**SMALL) as client:
        responses = [
            client.request(request(FIRST, session_id=f"asking-{number}")) for number in range(2)
        ]
        assert responses[-1]["code"] == "quota_exceeded"
        client.request({"endpoint": "close", "session_id": "asking-0", "protocol_version": 1})
    body = json.dumps({"prompt": "a path", "num_frames": FIRST}).encode()
    status, made, _ = call(
        operated, "POST", "/v1/videos", body, {**AUTHORIZED, "Content-Type": "application/json"}
    )
    assert status == 200, made
    path = f"/v1/videos/{json.loads(made)['id']}"
    wait_until(lambda: json.loads(call(operated, "GET", path)[1])["progress"] == 100)
    known, requested = exported(metrics(operated)), list(expressions())
    assert len(requested) > 30
    assert [
        (expression, missing)
        for expression in requested
        if (missing := unknown_names(expression, known))
    ] == []
    assert unknown_names('sum by (colour) (omni_rt_sessions{place="x"}) / omni_nothing', known) == [
        "omni_rt_sessions{place}",
        "omni_nothing",
        "by colour",
    ]


def metrics(server: Served) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=seconds(20))
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


# -- the start -------------------------------------------------------------------------------------


def test_the_start_is_quiet(operated: Served) -> None:
    """The log of a server start contains the important lines but no traceback, no warning about a
    known variable, no line per route, and no line per refused handshake.
    """
    url = f"ws://127.0.0.1:{operated.port}/v1/realtime/world/camera"
    for headers in ({}, {**AUTHORIZED, "Origin": "https://elsewhere.example"}):
        with pytest.raises(InvalidStatus):
            connect(url, additional_headers=headers)
    log = operated.log
    assert "Traceback" not in log.partition("Application startup complete")[0]
    assert "Chat template warmup failed" not in log
    assert "Unknown vLLM environment variable detected: VLLM_OMNI" not in log
    assert "Route: " not in log
    assert "ASGI callable returned" not in log
    assert "Starting vLLM server on" in log and "origin_refused" in log


def test_the_root_redirects_to_the_page(served: Served) -> None:
    response = get(served, "/")
    assert (response.status, response.headers["Location"]) == (307, "omni/")
    assert get(served, "/omni/").status == 200
