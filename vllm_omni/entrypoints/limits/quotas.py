# SPDX-License-Identifier: Apache-2.0
"""Quotas for API keys: sessions, chunks per minute and bytes per minute.

The quota file (`omni.quotas`) is in TOML format. It identifies API keys by their SHA-256, so it
contains no secrets, and assigns each key a name for metrics.

        [default]                  # keys without a table; without API keys, every address
        sessions = 4

        [keys.studio]
        sha256 = "..."             # printf %s "$KEY" | sha256sum
        sessions = 2               # at the same time
        chunks_per_minute = 120    # of live sessions; an HTTP generation request counts as one
        bytes_per_minute = 500_000_000

An absent value imposes no limit. `chunks_per_minute` and `bytes_per_minute` are token buckets that
hold one minute's quota, so a client that was idle can use a full minute's quota at once. A request
may start if at least one chunk and one byte are available. Once started, a request is always
finished and charged, even if a bucket's balance becomes negative. The next request must then wait
longer. Each API server process counts separately.

`Quotas.allowance_of` returns a client's `Allowance`. An `Allowance` refuses requests by raising
`EndpointError` with the code `quota_exceeded`.

vLLM's `--api-key` is not sufficient, because it accepts a list of keys but cannot limit what each
key may use.
"""

import functools
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import msgspec
from prometheus_client import Counter, Gauge

from vllm_omni.entrypoints.errors import EndpointError
from vllm_omni.entrypoints.limits.token_bucket import TokenBucket

CODE: Final = "quota_exceeded"
DEFAULT: Final = "default"
_PRINCIPAL_CHARS: Final = 16
"""Number of hexadecimal digits of the key's SHA-256 that form a client's principal
(`connection.principal_of`).
"""
_REMEMBERED: Final = 4096
_MINUTE_S: Final = 60.0
_SESSION_RETRY_S: Final = 1.0
"""Retry interval in seconds, sent to a client whose new session is refused. The interval is fixed,
because only the client can end its sessions.
"""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits for one client. None: only the server's own limits apply."""

    sessions: Count | None = None
    """Maximum number of live sessions."""
    chunks_per_minute: Count | None = None
    """Allowed average number of chunks per minute."""
    bytes_per_minute: Count | None = None
    """Allowed average number of bytes per minute."""


class KeyQuota(Quota, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits for one API key."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
    """SHA-256 of the key, in lower-case hexadecimal digits."""


class QuotaFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Contents of the quota file."""

    default: Quota = Quota()
    """Limits for keys without a table of their own. If the server has no API keys, these limits
    apply to each client address.
    """
    keys: dict[Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")], KeyQuota] = {}
    """Limits for API keys, by key name."""

    @classmethod
    def read_file(cls, path: Path) -> "QuotaFile":
        """Read and check the quota file.

        Raises:
            ValueError: The file cannot be read or is invalid. The message names the file.
        """
        try:
            found = msgspec.toml.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ValueError(f"omni.quotas {path}: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"omni.quotas {path}: {error}") from error
        if DEFAULT in found.keys:
            raise ValueError(
                f"omni.quotas {path}: no key may be called {DEFAULT!r}; that is the table "
                f"[{DEFAULT}]"
            )
        principals = [quota.sha256[:_PRINCIPAL_CHARS] for quota in found.keys.values()]
        if len(set(principals)) != len(principals):
            raise ValueError(f"omni.quotas {path}: two names have the same sha256")
        return found


class QuotaMetrics:
    """Quota metrics, labelled with key names from the quota file and never with keys or
    addresses.
    """

    def __init__(self) -> None:
        self.sessions = Gauge(
            "omni_quota_sessions", "Live sessions, by key.", ("key",), multiprocess_mode="livesum"
        )
        self.chunks = Counter("omni_quota_chunks", "Chunks charged, by key.", ("key",))
        self.bytes = Counter("omni_quota_bytes", "Bytes charged, by key.", ("key",))
        self.refused = Counter(
            "omni_quota_refusals", "Requests refused, by key and quota.", ("key", "quota")
        )


@functools.cache
def quota_metrics() -> QuotaMetrics:
    """Return this process's quota metrics. All callers share one object, because a registry accepts
    each name only once.
    """
    return QuotaMetrics()


def _per_minute(count: int | None, clock: Callable[[], float]) -> TokenBucket:
    """Return a token bucket that holds one minute's quota. If `count` is None, the bucket never
    becomes empty.
    """
    return (
        TokenBucket(0.0, math.inf, clock)
        if count is None
        else TokenBucket(count / _MINUTE_S, count, clock)
    )


class Allowance:
    """Remaining quota of one client. This base class imposes no limits."""

    def check_session(self) -> None:
        """Check whether the client may open another session.

        Raises:
            EndpointError: `quota_exceeded` if the client has used up its quota.
        """

    def open_session(self) -> None:
        """Record that the client has opened a session."""

    def close_session(self) -> None:
        """Record that one of the client's sessions has ended."""

    def take_chunk(self) -> bool:
        """Charge one chunk if it may start now, and return whether it may start."""
        return True

    def check_chunk(self) -> None:
        """Check whether a chunk may start now.

        Raises:
            EndpointError: `quota_exceeded` if the client has used up its quota.
        """

    def check_bytes(self) -> None:
        """Check whether data may be sent now.

        Raises:
            EndpointError: `quota_exceeded` if the client has used up its quota.
        """

    def charge_chunks(self, count: int) -> None:
        """Charge the given number of chunks, which are about to start."""

    def charge_bytes(self, count: int) -> None:
        """Charge response bytes to the client."""


class LimitedAllowance(Allowance):
    """Remaining quota of a client with limits."""

    def __init__(
        self, name: str, quota: Quota, metrics: QuotaMetrics, clock: Callable[[], float]
    ) -> None:
        self._name, self._quota, self._metrics = name, quota, metrics
        self._chunks = _per_minute(quota.chunks_per_minute, clock)
        self._bytes = _per_minute(quota.bytes_per_minute, clock)
        self.num_sessions = 0

    def check_session(self) -> None:
        limit = self._quota.sessions
        if limit is not None and self.num_sessions >= limit:
            raise self._refusal("sessions", f"{limit} live sessions", _SESSION_RETRY_S)

    def open_session(self) -> None:
        self.num_sessions += 1
        self._metrics.sessions.labels(self._name).inc()

    def close_session(self) -> None:
        self.num_sessions -= 1
        self._metrics.sessions.labels(self._name).dec()

    def take_chunk(self) -> bool:
        if self._chunks.wait_s() or self._bytes.wait_s():
            return False
        self.charge_chunks(1)
        return True

    def check_chunk(self) -> None:
        self.check_bytes()
        if (wait_s := self._chunks.wait_s()) > 0:
            raise self._refusal(
                "chunks", f"{self._quota.chunks_per_minute} chunks a minute", wait_s
            )

    def check_bytes(self) -> None:
        if (wait_s := self._bytes.wait_s()) > 0:
            raise self._refusal("bytes", f"{self._quota.bytes_per_minute} bytes a minute", wait_s)

    def charge_chunks(self, count: int) -> None:
        self._chunks.take_tokens(count)
        self._metrics.chunks.labels(self._name).inc(count)

    def charge_bytes(self, count: int) -> None:
        self._bytes.take_tokens(count)
        self._metrics.bytes.labels(self._name).inc(count)

    def _refusal(self, quota: str, limit: str, wait_s: float) -> EndpointError:
        self._metrics.refused.labels(self._name, quota).inc()
        retry_after_ms = math.ceil(wait_s * 1e3)
        return EndpointError(
            CODE,
            f"your quota is {limit}; try again later",
            quota=quota,
            retry_after_ms=retry_after_ms,
        )


UNLIMITED: Final = Allowance()


class Quotas:
    """Allowances for the clients of one API server process. This base class imposes no limits."""

    def allowance_of(self, client: str) -> Allowance:
        """Return a client's allowance.

        Args:
            client: Value of `Connection.client`: an API key's principal, or an address.
        """
        return UNLIMITED


class FileQuotas(Quotas):
    """Allowances from a quota file.

    The allowance of a client with the default quota is retained while the client has a session or
    is among the few thousand most recent clients.
    """

    def __init__(self, file: QuotaFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._default, self._clock, self._metrics = file.default, clock, quota_metrics()
        self._named: dict[str, Allowance] = {
            quota.sha256[:_PRINCIPAL_CHARS]: LimitedAllowance(name, quota, self._metrics, clock)
            for name, quota in file.keys.items()
        }
        self._others: OrderedDict[str, LimitedAllowance] = OrderedDict()

    def allowance_of(self, client: str) -> Allowance:
        if (named := self._named.get(client)) is not None:
            return named
        allowance = self._others.get(client)
        if allowance is None:
            allowance = LimitedAllowance(DEFAULT, self._default, self._metrics, self._clock)
            self._others[client] = allowance
            self._evict_idle()
        self._others.move_to_end(client)
        return allowance

    def _evict_idle(self) -> None:
        for client in list(self._others)[: len(self._others) - _REMEMBERED]:
            if self._others[client].num_sessions == 0:
                del self._others[client]
