# SPDX-License-Identifier: Apache-2.0
"""Tests of API key quotas: the quota file, the token buckets and the HTTP responses.

realtime/test_quotas_at_endpoints.py tests quotas at the WebSocket endpoints.
"""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import generate_latest
from starlette.requests import HTTPConnection
from starlette.responses import Response

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.limits.quota_guard import QuotaGuard
from vllm_omni.entrypoints.limits.quotas import Allowance, FileQuotas, KeyQuota, Quota, QuotaFile
from vllm_omni.entrypoints.realtime.connection.connection import client_of

KEY = "a-secret-key"
DIGEST = hashlib.sha256(KEY.encode()).hexdigest()


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def quotas(clock: Clock, **limits: int) -> FileQuotas:
    """Return quotas with the same limits for every client."""
    return FileQuotas(QuotaFile(default=Quota(**limits)), clock)


def take(allowance: Allowance, count: int = 1) -> None:
    """Charge `allowance` for a request that generates `count` chunks."""
    allowance.check_chunk()
    allowance.charge_chunks(count)


def refusal(allowance: Allowance) -> tuple[str, dict[str, Any]]:
    with pytest.raises(EndpointError) as refused:
        allowance.check_chunk()
    return refused.value.code, refused.value.details


def test_chunks_of_a_minute_may_be_used_at_once_and_refill_steadily(clock: Clock) -> None:
    allowance = quotas(clock, chunks_per_minute=60).allowance_of("x")
    for _ in range(60):
        take(allowance)
    assert refusal(allowance) == ("quota_exceeded", {"quota": "chunks", "retry_after_ms": 1000})
    clock.now_s += 1.0
    take(allowance)
    assert not allowance.take_chunk()
    clock.now_s += 3600
    for _ in range(60):
        take(allowance)
    assert not allowance.take_chunk()


def test_a_request_of_several_chunks_needs_one_and_delays_the_next(
    clock: Clock,
) -> None:
    allowance = quotas(clock, chunks_per_minute=6).allowance_of("x")
    take(allowance, 12)
    assert refusal(allowance)[1]["retry_after_ms"] == 70_000
    clock.now_s += 70.0
    take(allowance)


def test_bytes_are_charged_afterwards_and_delay_the_next_request(clock: Clock) -> None:
    allowance = quotas(clock, bytes_per_minute=6000).allowance_of("x")
    take(allowance)
    allowance.charge_bytes(6600)
    assert refusal(allowance) == ("quota_exceeded", {"quota": "bytes", "retry_after_ms": 6010})
    clock.now_s += 6.01
    take(allowance)


def test_clients_do_not_share_an_allowance_and_named_keys_have_their_own(clock: Clock) -> None:
    file = QuotaFile(default=Quota(chunks_per_minute=1), keys={})
    found = FileQuotas(file, clock)
    take(found.allowance_of("address 10.0.0.1"))
    take(found.allowance_of("address 10.0.0.2"))
    assert not found.allowance_of("address 10.0.0.1").take_chunk()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default]\nsessions = 0\n", "Expected `int` >= 1"),
        ("[default]\nsesions = 1\n", "unknown field `sesions`"),
        ("[keys.a]\nsessions = 1\n", "missing required field `sha256`"),
        ('[keys.a]\nsha256 = "KEY"\n', "matching regex"),
        ('[keys."a b"]\nsha256 = "' + "0" * 64 + '"\n', "matching regex"),
        ('[keys.default]\nsha256 = "' + "0" * 64 + '"\n', "no key may be called 'default'"),
        (
            '[keys.a]\nsha256 = "' + "0" * 64 + '"\n[keys.b]\nsha256 = "' + "0" * 64 + '"\n',
            "the same sha256",
        ),
        ("sessions\n", "omni.quotas"),
    ],
)
def test_an_invalid_file_is_an_error_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "quotas.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"omni\.quotas") as error:
        QuotaFile.read_file(path)
    assert said in str(error.value) and str(path) in str(error.value)


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        QuotaFile.read_file(tmp_path / "none.toml")


# -- over HTTP -------------------------------------------------------------------------------------


@pytest.fixture
def guarded(clock: Clock) -> FastAPI:
    guard, app = QuotaGuard(), FastAPI()
    guard.quotas = quotas(clock, chunks_per_minute=1, bytes_per_minute=1000)
    app.add_middleware(guard.around)
    app.add_api_route("/v1/images/generations", lambda: Response(b"x" * 10), methods=["POST"])
    app.add_api_route(
        "/v1/files/{name}/content", lambda name: Response(b"x" * 2000), methods=["GET"]
    )
    app.add_api_route("/v1/videos/{name}", lambda name: Response(b""), methods=["GET", "DELETE"])
    app.add_api_route("/health", lambda: Response(b""), methods=["GET"])
    return app


async def call(app: FastAPI, method: str, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, headers={"Authorization": f"Bearer {KEY}"})


def test_http_requests_beyond_a_quota_are_429_with_retry_after(
    guarded: FastAPI, clock: Clock
) -> None:
    async def main() -> None:
        assert (await call(guarded, "POST", "/v1/images/generations")).status_code == 200
        refused = await call(guarded, "POST", "/v1/images/generations")
        assert refused.status_code == 429 and refused.headers["retry-after"] == "60"
        assert refused.json()["error"]["code"] == "quota_exceeded"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        # A download does not count against the chunk quota, because it generates no chunks.
        assert (await call(guarded, "GET", "/v1/files/a/content")).status_code == 200
        refused = await call(guarded, "GET", "/v1/files/a/content")
        assert (
            refused.status_code == 429
            and "1000 bytes a minute" in refused.json()["error"]["message"]
        )
        assert (await call(guarded, "GET", "/health")).status_code == 200
        assert (await call(guarded, "DELETE", "/v1/videos/a")).status_code == 200
        clock.now_s += 3600
        assert (await call(guarded, "GET", "/v1/files/a/content")).status_code == 200

    asyncio.run(main())


def test_a_key_is_identified_by_its_digest(clock: Clock) -> None:
    """The quota file identifies a key by its digest and gives it a larger quota. Metrics contain
    neither the key nor its digest.
    """
    scope = {
        "type": "http",
        "headers": [(b"authorization", f"Bearer {KEY}".encode())],
        "client": ("10.0.0.1", 1),
    }
    client = client_of(HTTPConnection(scope))
    file = QuotaFile(
        default=Quota(chunks_per_minute=1),
        keys={"studio": KeyQuota(sha256=DIGEST, chunks_per_minute=5)},
    )
    found = FileQuotas(file, clock)
    for _ in range(5):
        take(found.allowance_of(client))
    assert refusal(found.allowance_of(client))[1]["quota"] == "chunks"
    page = generate_latest().decode()
    assert 'omni_quota_refusals_total{key="studio",quota="chunks"}' in page
    assert KEY not in page and DIGEST[:16] not in page
