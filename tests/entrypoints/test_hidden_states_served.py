# SPDX-License-Identifier: Apache-2.0
"""Tests of hidden states over HTTP from a stock `vllm serve`, which runs a text model with this
package's worker, scheduler and endpoint plugin.

All tests share one server, which exports spans to a collector in this process. One of the server's
API keys has a small quota.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.otlp_collector import CALLER_SPAN, TRACE_ID, TRACEPARENT, Collector
from helpers.ports import port_for_a_server
from helpers.quick_programs import run_python, stop_server, wait_until_healthy
from helpers.waits import seconds, wait_until

from vllm_omni.hidden_states import HiddenStates, HiddenStatesRequest, from_safetensors

pytestmark = pytest.mark.engine

PROMPT = "the red bird sings"
REQUESTED = {
    "omni": json.dumps(
        HiddenStatesRequest(hidden_states="all", layers=(1, -1)).to_extra_args()["omni"]
    )
}
MAX_BYTES = 200 * 64 * 4
SMALL_KEY = "a-key-with-a-small-quota"


@dataclass
class Server:
    url: str
    model: Path
    log: Path

    def post(self, path: str, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        body = {"model": "tiny", "temperature": 0, "max_tokens": 6, "ignore_eos": True, **body}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=seconds(60))

    def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        response = self.post(path, stream=True, **body)
        assert response.status_code == 200, response.text
        lines = [
            line.removeprefix("data: ")
            for line in response.text.splitlines()
            if line.startswith("data: ")
        ]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def fetch(self, response_id: str, index: int = 0) -> httpx.Response:
        return httpx.get(
            f"{self.url}/v1/hidden_states/{response_id}",
            params={"index": index},
            timeout=seconds(30),
        )

    def states(self, response_id: str, index: int = 0) -> HiddenStates:
        response = self.fetch(response_id, index)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "application/vnd.safetensors"
        return from_safetensors(response.content)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(
    tiny_language_model: Path, tmp_path_factory: pytest.TempPathFactory, collector: Collector
) -> Iterator[Server]:
    port = port_for_a_server()
    folder = tmp_path_factory.mktemp("server")
    log, quotas = folder / "server.log", folder / "quotas.toml"
    digest = hashlib.sha256(SMALL_KEY.encode()).hexdigest()
    quotas.write_text(f'[keys.small]\nsha256 = "{digest}"\nchunks_per_minute = 2\n')
    flags = [
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--served-model-name",
        "tiny",
        "--enforce-eager",
    ]
    flags += ["--max-model-len", "512", "--dtype", "float32", "--max-num-seqs", "4"]
    flags += ["--enable-scale-out"]  # serves /inference/v1/generate
    flags += ["--worker-cls", "vllm_omni.worker.ARGPUWorker"]
    flags += ["--scheduler-cls", "vllm_omni.core.sched.ARHiddenStatesScheduler"]
    flags += [
        "--additional-config",
        json.dumps(
            {
                "omni": {
                    "hidden_state_layers": [1],
                    "max_hidden_states_bytes": MAX_BYTES,
                    "quotas": str(quotas),
                }
            }
        ),
    ]
    flags += ["--otlp-traces-endpoint", f"http://127.0.0.1:{collector.port}"]
    plugins = {
        "VLLM_PLUGINS": "vllm_omni_ar",
        "VLLM_OMNI_HIDDEN_STATES_EXPIRY_S": "60",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            [Path(sys.executable).parent / "vllm", "serve", str(tiny_language_model), *flags],
            # Compiling the sampler for the first request would take half a minute of CPU time.
            env={**os.environ, **plugins, "TORCHDYNAMO_DISABLE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_healthy(process, port, log)
        yield Server(f"http://127.0.0.1:{port}", tiny_language_model, log)
        process.terminate()
        assert process.wait(seconds(30)) == 0
    finally:
        stop_server(process)


def reference(model: Path, token_ids: list[int]) -> tuple[torch.Tensor, ...]:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        states = loaded(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    return tuple(layer[0] for layer in states)


def assert_equal_transformers(server: Server, states: HiddenStates) -> None:
    """Assert that every token except the last has hidden states, and that they match those of a
    forward pass in Hugging Face Transformers (tolerance in fp32: 1e-4).
    """
    expected = reference(server.model, states.token_ids.tolist())
    assert states.positions.tolist() == list(range(len(states.positions)))
    for layer, want in ((1, expected[1]), (-1, expected[-1])):
        torch.testing.assert_close(states[layer], want, atol=1e-4, rtol=1e-4)


def test_a_completion_is_stock_and_its_hidden_states_can_be_fetched(server: Server) -> None:
    """Requesting hidden states does not change the generated text. The hidden states match those of
    a Hugging Face Transformers forward pass over the prompt and the completion.
    """
    plain = server.post("/v1/completions", prompt=PROMPT).json()
    requested = server.post("/v1/completions", prompt=PROMPT, vllm_xargs=REQUESTED).json()
    assert (
        requested["choices"][0]["text"] == plain["choices"][0]["text"]
        and requested.keys() == plain.keys()
    )
    states = server.states(requested["id"])
    assert states.num_positions == requested["usage"]["prompt_tokens"] + 6 - 1
    assert_equal_transformers(server, states)
    again = server.fetch(requested["id"])
    assert again.status_code == 404 and again.json()["error"]["type"] == "not_found"
    assert server.fetch(plain["id"]).status_code == 404


def test_chat_streams_text_and_hidden_states_follow(server: Server) -> None:
    """A streamed chat completion has the same server-sent events as in stock vLLM, and its hidden
    states are available after the last event.
    """
    body = {"messages": [{"role": "user", "content": PROMPT}]}
    plain = server.events("/v1/chat/completions", **body)
    requested = server.events("/v1/chat/completions", vllm_xargs=REQUESTED, **body)

    def text(events: list[dict[str, Any]]) -> str:
        return "".join(
            choice["delta"].get("content") or "" for event in events for choice in event["choices"]
        )

    assert text(requested) == text(plain) != ""
    # The number of events depends on the machine, because tokens that the server has not sent yet
    # are combined into one event.
    reasons = [choice["finish_reason"] for event in requested for choice in event["choices"]]
    assert len(reasons) > 1  # the role arrives before any text
    assert {event["object"] for event in requested} == {"chat.completion.chunk"}
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    states = server.states(requested[0]["id"])
    assert_equal_transformers(server, states)


def test_a_choice_without_hidden_states_gets_none(server: Server) -> None:
    """The completion of the first prompt stops at its first token, so it has no `generated`
    position and no hidden states. The hidden states of the second prompt stay at index 1.
    """
    prompts = ["sea", "the sky"]
    first = server.post(
        "/v1/completions", prompt=prompts, max_tokens=1, return_token_ids=True
    ).json()["choices"]
    stop, goes_on = (choice["token_ids"][0] for choice in first)
    assert stop != goes_on
    requested = {"omni": json.dumps({"hidden_states": "generated"})}
    response = server.post(
        "/v1/completions", prompt=prompts, max_tokens=3, stop_token_ids=[stop], vllm_xargs=requested
    ).json()
    assert server.fetch(response["id"], 0).status_code == 404
    assert server.states(response["id"], 1).positions.tolist()[:1] == [len("the sky")]


@pytest.mark.parametrize(
    ("omni", "status", "named"),
    [
        ("{", 400, "omni"),
        ('{"hidden_states": "some"}', 400, "generated"),
        ('{"hidden_states": "all", "layers": [2]}', 400, "hidden_state_layers"),
        ('{"hidden_states": "all", "layers": [99]}', 400, "4 blocks"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_request_is_a_client_error(
    server: Server, omni: str, status: int, named: str, stream: bool
) -> None:
    """The error for an invalid request states the reason, and other requests are not affected."""
    response = server.post(
        "/v1/completions", prompt=PROMPT, vllm_xargs={"omni": omni}, stream=stream
    )
    if not stream or response.status_code != 200:
        assert response.status_code == status, response.text
    assert named in response.text and '"error"' in response.text
    assert server.post("/v1/completions", prompt=PROMPT).status_code == 200


@dataclass(frozen=True)
class Route:
    """A route that returns hidden states, and a body that generates six tokens."""

    path: str
    body: dict[str, Any]
    id_field: str = "id"
    """Name of the field of the response that contains the response's id."""

    def requesting(self, omni: str) -> dict[str, Any]:
        """Return a body that requests hidden states. `omni` is a JSON string."""
        if "sampling_params" in self.body:
            extra = {"extra_args": {"omni": omni}}
            return {**self.body, "sampling_params": {**self.body["sampling_params"], **extra}}
        return {**self.body, "vllm_xargs": {"omni": omni}}


MESSAGES = [{"role": "user", "content": PROMPT}]
TOKENS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
ROUTES = [
    Route("/v1/completions", {"prompt": PROMPT}),
    Route("/v1/chat/completions", {"messages": MESSAGES}),
    Route("/v1/chat/completions/batch", {"messages": [MESSAGES]}),
    Route("/v1/responses", {"input": PROMPT, "max_output_tokens": 6}),
    Route("/v1/messages", {"messages": MESSAGES}),
    Route(
        "/inference/v1/generate",
        {"token_ids": [5, 6, 7], "sampling_params": TOKENS},
        id_field="request_id",
    ),
]
routes = pytest.mark.parametrize("route", ROUTES, ids=[route.path for route in ROUTES])


@routes
def test_every_route_returns_hidden_states(server: Server, route: Route) -> None:
    """Hidden states can be fetched once by the id of the response, on every route that generates
    text for a client.
    """
    plain = server.post(route.path, **route.body)
    assert plain.status_code == 200, plain.text
    response = server.post(route.path, **route.requesting(REQUESTED["omni"]))
    assert response.status_code == 200, response.text
    assert response.json().keys() == plain.json().keys()
    response_id = response.json()[route.id_field]
    assert_equal_transformers(server, server.states(response_id))
    assert server.fetch(response_id).status_code == 404
    assert server.fetch(plain.json()[route.id_field]).status_code == 404


@routes
@pytest.mark.parametrize(
    ("omni", "named"),
    [
        ('{"hidden_states": "foo"}', "generated"),
        ('{"hidden_states": "all", "layers": [2]}', "hidden_state_layers"),
    ],
    ids=["malformed", "layer"],
)
def test_every_route_refuses_a_wrong_request(
    server: Server, route: Route, omni: str, named: str
) -> None:
    """A wrong request gets status 400 and the reason on every route."""
    response = server.post(route.path, **route.requesting(omni))
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]["message"]


def test_a_batch_of_chats_numbers_its_choices(server: Server) -> None:
    chats = [MESSAGES, [{"role": "user", "content": "the sky"}]]
    response = server.post("/v1/chat/completions/batch", messages=chats, vllm_xargs=REQUESTED)
    assert response.status_code == 200, response.text
    lengths = [server.states(response.json()["id"], index).num_positions for index in (1, 0)]
    assert lengths[1] - lengths[0] == len(PROMPT) - len("the sky")


@pytest.mark.parametrize("field", ["stream", "background"])
def test_a_response_that_cannot_report_an_error_is_refused(server: Server, field: str) -> None:
    """vLLM cannot report an error in a streamed or background response of `/v1/responses`, so such
    a request for hidden states is refused before it starts.
    """
    body: dict[str, Any] = {"input": PROMPT, "max_output_tokens": 6}
    refused = {**body, field: True, "vllm_xargs": REQUESTED}
    response = server.post("/v1/responses", **refused)
    assert response.status_code == 400
    assert f"`{field}` is false" in response.json()["error"]["message"]
    assert server.post("/v1/responses", **body, stream=True).status_code == 200


def test_too_many_positions_are_a_client_error(server: Server) -> None:
    """A request for the hidden states of more than 200 positions is refused. The same request
    without hidden states succeeds.
    """
    response = server.post("/v1/completions", prompt="sea " * 100, vllm_xargs=REQUESTED)
    assert response.status_code == 400 and "max_hidden_states_bytes" in response.text
    assert server.post("/v1/completions", prompt="sea " * 100).status_code == 200


def test_an_unknown_id_is_not_found(server: Server) -> None:
    assert server.fetch("chatcmpl-nobody").status_code == 404
    assert server.fetch("chatcmpl-nobody", index=-1).status_code == 400


def test_responses_and_log_lines_have_the_request_id(server: Server) -> None:
    """The client's request id, or a new id if the client sends none, appears in the access log and
    in responses from both vLLM's and this package's routes.
    """
    mine = {"X-Request-Id": "mine-1"}
    responses = [
        server.post("/v1/completions", mine, prompt=PROMPT, vllm_xargs=REQUESTED),
        httpx.get(server.url + "/v1/hidden_states/nobody", headers=mine),
        httpx.get(server.url + "/v1/nothing", headers=mine),
    ]
    assert [response.status_code for response in responses] == [200, 404, 404]
    assert [response.headers.get_list("x-request-id") for response in responses] == [["mine-1"]] * 3
    assert server.fetch(responses[0].json()["id"]).status_code == 200
    (made,) = server.fetch("nobody").headers.get_list("x-request-id")
    assert len(made) == 32
    wait_until(lambda: f"request_id={made}" in server.log.read_text())
    accesses = [
        line for line in server.log.read_text().splitlines() if line.endswith(" request_id=mine-1")
    ]
    assert [line.split('"')[1].split()[1] for line in accesses if "HTTP/1.1" in line] == [
        "/v1/completions",
        "/v1/hidden_states/nobody",
        "/v1/nothing",
    ]


def test_a_request_is_a_span_of_the_callers_trace(server: Server, collector: Collector) -> None:
    """vLLM's own span for a request is a child of the caller's span."""
    response = server.post(
        "/v1/completions", {"traceparent": TRACEPARENT}, prompt=PROMPT, vllm_xargs=REQUESTED
    )
    assert server.fetch(response.json()["id"]).status_code == 200
    wait_until(lambda: bool(collector.spans(TRACE_ID)), 20)
    assert [(span.name, span.parent_span_id.hex()) for span in collector.spans(TRACE_ID)] == [
        ("llm_request", CALLER_SPAN)
    ]


def test_a_key_beyond_its_quota_is_refused(server: Server) -> None:
    """The third request within a minute gets 429 and a retry time. Other clients are not
    affected.
    """
    small = {"Authorization": f"Bearer {SMALL_KEY}"}
    responses = [server.post("/v1/completions", small, prompt=PROMPT) for _ in range(3)]
    assert [response.status_code for response in responses] == [200, 200, 429]
    assert (
        responses[2].json()["error"]["code"] == "quota_exceeded"
        and int(responses[2].headers["Retry-After"]) > 0
    )
    assert server.post("/v1/completions", prompt=PROMPT).status_code == 200
    metrics = httpx.get(server.url + "/metrics").text
    assert 'omni_quota_refusals_total{key="small",quota="chunks"} 1.0' in metrics


def test_a_client_that_leaves_frees_its_request(server: Server) -> None:
    """A disconnect aborts the request as in stock vLLM and leaves no hidden states in the store.

    The request has many choices, of which only four run at a time. On any machine, the last choice
    therefore starts several seconds after the first token.
    """
    choices = 64
    body = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 480,
        "ignore_eos": True,
        "stream": True,
        "n": choices,
    }
    omni = {"omni": '{"hidden_states": "last"}'}
    with httpx.stream(
        "POST",
        server.url + "/v1/completions",
        json={**body, "temperature": 1, "vllm_xargs": omni},
        timeout=seconds(60),
    ) as stream:
        lines = (
            stream.iter_lines()
        )  # keep a reference: httpx closes the connection with the iterator
        first = json.loads(next(lines).removeprefix("data: "))
        assert server.fetch(first["id"], choices - 1).status_code == 409
    wait_until(lambda: server.fetch(first["id"], choices - 1).status_code != 409, 60, every_s=0.1)
    assert server.fetch(first["id"], choices - 1).status_code == 404


def test_the_online_example_prints_text_and_shapes(server: Server, tmp_path: Path) -> None:
    """The online example, run from the command line, prints text and shapes and writes a readable
    file.
    """
    script = Path(__file__).parents[2] / "examples" / "online_serving" / "hidden_states.py"
    out = tmp_path / "states.safetensors"
    command = [
        str(script),
        PROMPT,
        "--url",
        server.url,
        "--layers",
        "1",
        "-1",
        "--max-tokens",
        "5",
    ]
    done = run_python(*command, "--out", out, limit_s=600)
    assert done.returncode == 0, done.stderr[-2000:]
    states = from_safetensors(out.read_bytes())
    assert f"layer -1: {tuple(states[-1].shape)}" in done.stdout and set(states) == {-1, 1}
    wrong = run_python(*command, "--layers", "3", limit_s=600)
    assert wrong.returncode == 1 and "hidden_state_layers" in wrong.stderr
