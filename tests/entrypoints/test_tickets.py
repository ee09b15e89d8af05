# SPDX-License-Identifier: Apache-2.0
"""A ticket can be used once, within seconds of being issued and from one origin. Any process that
has the same secret accepts it.
"""

import base64
import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni.entrypoints.limits import tickets as tickets_module
from vllm_omni.entrypoints.limits.tickets import (
    SECRET_VARIABLE,
    TicketError,
    TicketOffice,
    derive_secret,
)

ORIGIN = "https://world.example"


class Clock:
    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def office(clock: Clock, secret: bytes = b"secret", **options: int) -> TicketOffice:
    return TicketOffice(secret, 2, now=clock, **options)


def test_a_ticket_identifies_its_key_and_works_once(clock: Clock) -> None:
    """A ticket opens exactly one connection, and that connection gets the key that the ticket was
    issued for.
    """
    tickets = office(clock)
    ticket = tickets.issue(1, ORIGIN)
    assert tickets.redeem_ticket(ticket, ORIGIN) == 1
    with pytest.raises(TicketError, match="used"):
        tickets.redeem_ticket(ticket, ORIGIN)


def test_another_process_with_the_secret_accepts_it(clock: Clock) -> None:
    """Several API server processes accept each other's tickets without communicating."""
    ticket = office(clock).issue(0, None)
    assert office(clock).redeem_ticket(ticket, None) == 0
    with pytest.raises(TicketError, match="signature"):
        office(clock, b"other").redeem_ticket(ticket, None)


@pytest.mark.parametrize(
    "origin", [None, "https://world.example:8443", "http://world.example", "-", ""]
)
def test_a_ticket_is_bound_to_its_origin(clock: Clock, origin: str | None) -> None:
    tickets = office(clock)
    with pytest.raises(TicketError, match="origin"):
        tickets.redeem_ticket(tickets.issue(0, ORIGIN), origin)


def test_a_ticket_expires(clock: Clock) -> None:
    """A ticket expires even if it is never used."""
    tickets = office(clock, ttl_s=30)
    early, late = tickets.issue(0, ORIGIN), tickets.issue(0, ORIGIN)
    clock.now += 29
    assert tickets.redeem_ticket(early, ORIGIN) == 0
    clock.now += 1
    with pytest.raises(TicketError, match="expired"):
        tickets.redeem_ticket(late, ORIGIN)


def test_memory_of_used_tickets_is_bounded_and_fails_closed(clock: Clock) -> None:
    """When the table of used tickets is full, new tickets are refused until some entries expire."""
    tickets = office(clock, ttl_s=30, max_remembered=3)
    used = [tickets.issue(0, ORIGIN) for _ in range(3)]
    for ticket in used:
        tickets.redeem_ticket(ticket, ORIGIN)
    with pytest.raises(TicketError, match="too many"):
        tickets.redeem_ticket(tickets.issue(0, ORIGIN), ORIGIN)
    clock.now += 32
    assert tickets.redeem_ticket(tickets.issue(0, ORIGIN), ORIGIN) == 0
    for ticket in used:
        with pytest.raises(TicketError, match="expired"):
            tickets.redeem_ticket(ticket, ORIGIN)


@given(
    st.text(max_size=80)
    | st.binary(max_size=60).map(lambda data: base64.urlsafe_b64encode(data).decode())
)
def test_nothing_else_is_a_ticket(text: str) -> None:
    """Any text that is not a ticket raises `TicketError`."""
    with pytest.raises(TicketError):
        TicketOffice(b"secret", 1).redeem_ticket(text, None)


@given(st.integers(0, 35 * 8 - 1))
def test_no_bit_of_a_ticket_may_change(bit: int) -> None:
    """The signature is computed over the version, expiry, key and nonce, so flipping any bit
    invalidates a ticket.
    """
    tickets = TicketOffice(b"secret", 2)
    data = bytearray(base64.urlsafe_b64decode(tickets.issue(0, ORIGIN) + "="))
    data[bit // 8] ^= 1 << (bit % 8)
    with pytest.raises(TicketError):
        tickets.redeem_ticket(base64.urlsafe_b64encode(data).rstrip(b"=").decode(), ORIGIN)


def test_the_secret_comes_from_keys_and_environment() -> None:
    """Processes with the same keys and environment derive the same secret. A change to the keys, or
    to the shared secret in the environment, changes the derived secret.
    """
    shared = {SECRET_VARIABLE: "0123456789abcdef"}
    assert derive_secret(["a", "b"], shared) == derive_secret(["a", "b"], dict(shared))
    assert derive_secret(["a", "b"], {}) == derive_secret(["a", "b"], {})
    environments = (shared, {}, {SECRET_VARIABLE: "x"})
    secrets = [
        derive_secret(keys, environ)
        for keys in (["a", "b"], ["a"], ["ab"])
        for environ in environments
    ]
    assert len(set(secrets)) == len(secrets)


@pytest.mark.parametrize("spoiler", ["!", "\n", " ", "+"])
def test_a_ticket_has_one_spelling(clock: Clock, spoiler: str) -> None:
    """A ticket has only one valid spelling, because text with characters outside the base64
    alphabet is rejected.
    """
    ticket = office(clock).issue(0, ORIGIN)
    for position in (0, 20, len(ticket)):
        with pytest.raises(TicketError, match=r"^(not base64|signature or origin differs)$"):
            office(clock).redeem_ticket(ticket[:position] + spoiler * 4 + ticket[position:], ORIGIN)
    assert office(clock).redeem_ticket(ticket, ORIGIN) == 0


def test_a_ticket_has_47_characters_that_need_no_escaping(clock: Clock) -> None:
    """A ticket uses the URL-safe base64 alphabet without padding, so it can be used as a
    subprotocol name.
    """
    assert all(
        re.fullmatch(r"[\w-]{47}", office(clock).issue(0, ORIGIN), re.ASCII) for _ in range(50)
    )


def test_a_ticket_for_a_key_that_this_server_does_not_have_is_refused(clock: Clock) -> None:
    """A correctly signed ticket is refused if this server does not have the ticket's key. The test
    includes the smallest out-of-range key index.
    """
    larger = TicketOffice(b"secret", 4, now=clock)
    for key_index in (2, 3):
        with pytest.raises(TicketError, match=r"^issued by another server$"):
            office(clock).redeem_ticket(larger.issue(key_index, ORIGIN), ORIGIN)
    assert office(clock).redeem_ticket(larger.issue(1, ORIGIN), ORIGIN) == 1


def test_a_ticket_of_another_version_is_refused(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correctly signed ticket of another version is refused, because its key index may have a
    different meaning.
    """
    monkeypatch.setattr(tickets_module, "_VERSION", 2)
    ticket = office(clock).issue(0, ORIGIN)
    monkeypatch.undo()
    with pytest.raises(TicketError, match=r"^issued by another server$"):
        office(clock).redeem_ticket(ticket, ORIGIN)


def test_clocks_may_differ_by_a_second(clock: Clock) -> None:
    """The clocks of two processes may differ by one second. A ticket from a process whose clock is
    further ahead would be valid for too long, so it is refused as expired.
    """
    ahead = Clock()
    for seconds, taken in ((1, True), (1.5, True), (2, False)):
        ahead.now = clock.now + seconds
        ticket = office(ahead, ttl_s=30).issue(0, None)
        if taken:
            assert office(clock, ttl_s=30).redeem_ticket(ticket, None) == 0
        else:
            with pytest.raises(TicketError, match=r"^expired$"):
                office(clock, ttl_s=30).redeem_ticket(ticket, None)


def test_a_used_ticket_is_remembered_until_it_expires(clock: Clock) -> None:
    """A used ticket is remembered until the last second of its validity has passed, and is then
    deleted.
    """
    tickets = office(clock, ttl_s=30, max_remembered=1)
    ticket = tickets.issue(0, None)
    tickets.redeem_ticket(ticket, None)
    clock.now += 29.9
    with pytest.raises(TicketError, match=r"^used before$"):
        tickets.redeem_ticket(ticket, None)
    clock.now += 1.1
    with pytest.raises(TicketError, match=r"^too many tickets at once$"):
        tickets.redeem_ticket(tickets.issue(0, None), None)
    clock.now += 0.1
    assert tickets.redeem_ticket(tickets.issue(0, None), None) == 0


def test_a_shared_secret_may_be_any_bytes() -> None:
    """A shared secret can contain any bytes. Python represents environment bytes that are not valid
    UTF-8 as surrogates. Different bytes still yield different secrets.
    """
    secrets = {derive_secret(["a"], {SECRET_VARIABLE: text}) for text in ("\udcff", "\udcfe", "ÿ")}
    assert len(secrets) == 3 and {len(secret) for secret in secrets} == {32}


def test_secrets_without_a_shared_one_are_those_of_earlier_versions() -> None:
    """Without a shared secret, old and new processes derive the same secret during a rolling
    update, because scrypt computes it from the keys' digests with fixed parameters.
    """
    assert derive_secret(["a", "b"], {}) == hashlib.scrypt(
        b"\0".join(hashlib.sha256(key).digest() for key in (b"a", b"b")),
        salt=b"vllm_omni tickets",
        n=16_384,
        r=8,
        p=1,
        dklen=32,
    )
