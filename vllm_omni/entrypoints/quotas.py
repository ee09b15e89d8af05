# SPDX-License-Identifier: Apache-2.0
"""Quotas: how many sessions, chunks a minute and bytes a minute one API key may have.

The file (`omni.quotas`) is TOML. It names keys by their SHA-256, so it holds none, and gives each a name for metrics:

    [default]                  # every key without a table of its own; on a server without keys, every address
    sessions = 4

    [keys.studio]
    sha256 = "..."             # printf %s "$KEY" | sha256sum
    sessions = 2               # live at once
    chunks_per_minute = 120    # of live sessions; an HTTP request that makes something counts as one
    bytes_per_minute = 500_000_000

A bound that is not set is no limit. The last two are token buckets that hold a minute's worth: a client that was idle
may spend that at once. A request begins when one chunk and one byte are available, and is finished and charged even
if it takes a bucket below zero; the next one then waits longer. Each API server process counts for itself.

Knows no route and no door: `of` gives each client's `Allowance`, whose refusals are `DoorError` `quota_exceeded`. Held
by tests/entrypoints/test_quotas.py and realtime/test_quotas_at_doors.py.

Why not vLLM's `--api-key`: it has a list of keys and no limits.
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

from vllm_omni.entrypoints.realtime.errors import DoorError
from vllm_omni.entrypoints.token_bucket import TokenBucket

CODE: Final = "quota_exceeded"
DEFAULT: Final = "default"
_PRINCIPAL_CHARS: Final = 16
"""Hexadecimal digits of a key's SHA-256 in a client's principal (`connection.principal_of`)."""
_REMEMBERED: Final = 4096
_MINUTE_S: Final = 60.0
_SESSION_RETRY_S: Final = 1.0
"""When a session of the client's own ends is up to the client."""

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]


class Quota(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one client; None = only the server's own."""

    sessions: Count | None = None
    chunks_per_minute: Count | None = None
    bytes_per_minute: Count | None = None


class KeyQuota(Quota, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """sha256: of the key, in lower-case hexadecimal digits."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class QuotaFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    default: Quota = Quota()
    keys: dict[Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}\Z")], KeyQuota] = {}

    @classmethod
    def read(cls, path: Path) -> "QuotaFile":
        """Raises ValueError, naming the file, when it cannot be read or holds something else."""
        try:
            found = msgspec.toml.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ValueError(f"omni.quotas {path}: {error.strerror}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"omni.quotas {path}: {error}") from error
        if DEFAULT in found.keys:
            raise ValueError(f"omni.quotas {path}: no key may be called {DEFAULT!r}; that is the table [{DEFAULT}]")
        principals = [quota.sha256[:_PRINCIPAL_CHARS] for quota in found.keys.values()]
        if len(set(principals)) != len(principals):
            raise ValueError(f"omni.quotas {path}: two names have the same sha256")
        return found


class QuotaMetrics:
    """Labels are the file's names of keys, never a key and never a client's address."""

    def __init__(self) -> None:
        self.sessions = Gauge("omni_quota_sessions", "Live sessions, by key.", ("key",), multiprocess_mode="livesum")
        self.chunks = Counter("omni_quota_chunks", "Chunks charged, by key.", ("key",))
        self.bytes = Counter("omni_quota_bytes", "Bytes charged, by key.", ("key",))
        self.refused = Counter("omni_quota_refusals", "Requests refused, by key and quota.", ("key", "quota"))


@functools.cache
def quota_metrics() -> QuotaMetrics:
    """The metrics of this process: a registry takes each name once."""
    return QuotaMetrics()


def _per_minute(count: int | None, clock: Callable[[], float]) -> TokenBucket:
    """Fills by `count` a minute and holds as much; None = never empty."""
    return TokenBucket(0.0, math.inf, clock) if count is None else TokenBucket(count / _MINUTE_S, count, clock)


class Allowance:
    """One client's remaining quota. This class has no bound: the allowance of a server without quotas."""

    def check_session(self) -> None:
        """Raise `DoorError` unless one more session may be live."""

    def open_session(self) -> None:
        """One more session is live."""

    def close_session(self) -> None:
        """One session has ended."""

    def take_chunk(self) -> bool:
        """Whether a chunk may begin now; if so, it is charged."""
        return True

    def check_chunk(self) -> None:
        """Raise `DoorError` unless a chunk may begin now."""

    def check_bytes(self) -> None:
        """Raise `DoorError` unless something may be sent now."""

    def charge_chunks(self, count: int) -> None:
        """So many chunks begin."""

    def charge_bytes(self, count: int) -> None:
        """So many bytes were made for the client."""


class LimitedAllowance(Allowance):
    def __init__(self, name: str, quota: Quota, metrics: QuotaMetrics, clock: Callable[[], float]) -> None:
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
            raise self._refusal("chunks", f"{self._quota.chunks_per_minute} chunks a minute", wait_s)

    def check_bytes(self) -> None:
        if (wait_s := self._bytes.wait_s()) > 0:
            raise self._refusal("bytes", f"{self._quota.bytes_per_minute} bytes a minute", wait_s)

    def charge_chunks(self, count: int) -> None:
        self._chunks.take(count)
        self._metrics.chunks.labels(self._name).inc(count)

    def charge_bytes(self, count: int) -> None:
        self._bytes.take(count)
        self._metrics.bytes.labels(self._name).inc(count)

    def _refusal(self, quota: str, limit: str, wait_s: float) -> DoorError:
        self._metrics.refused.labels(self._name, quota).inc()
        retry_after_ms = math.ceil(wait_s * 1e3)
        return DoorError(CODE, f"your quota is {limit}; try again later", quota=quota, retry_after_ms=retry_after_ms)


UNLIMITED: Final = Allowance()


class Quotas:
    """The allowances of one API server process. This class limits nobody."""

    def of(self, client: str) -> Allowance:
        """client: as `Connection.client` names it: a key's principal, or an address."""
        return UNLIMITED


class FileQuotas(Quotas):
    """As a file says. Of clients with the default quota the last few thousand are remembered,
    and all that have a session."""

    def __init__(self, file: QuotaFile, clock: Callable[[], float] = time.monotonic) -> None:
        self._default, self._clock, self._metrics = file.default, clock, quota_metrics()
        self._named: dict[str, Allowance] = {
            quota.sha256[:_PRINCIPAL_CHARS]: LimitedAllowance(name, quota, self._metrics, clock)
            for name, quota in file.keys.items()
        }
        self._others: OrderedDict[str, LimitedAllowance] = OrderedDict()

    def of(self, client: str) -> Allowance:
        if (named := self._named.get(client)) is not None:
            return named
        allowance = self._others.get(client)
        if allowance is None:
            allowance = LimitedAllowance(DEFAULT, self._default, self._metrics, self._clock)
            self._others[client] = allowance
            self._forget()
        self._others.move_to_end(client)
        return allowance

    def _forget(self) -> None:
        for client in list(self._others)[: len(self._others) - _REMEMBERED]:
            if self._others[client].num_sessions == 0:
                del self._others[client]
