# SPDX-License-Identifier: Apache-2.0
"""Check SDP offers from untrusted clients before a library parses them.

The numbers of bytes, lines, media sections and candidates in an offer are limited. Each media
section takes up sockets, and each candidate makes the server send packets to an address that the
client has chosen.
"""

import re
from dataclasses import dataclass
from typing import Final

from vllm_omni.entrypoints.errors import EndpointError

CONTENT_TYPE: Final = "application/sdp"
MAX_OFFER_BYTES: Final = 64 * 1024
_MAX_LINES: Final = 1024
_MAX_LINE_CHARS: Final = 2048
_MAX_SECTIONS: Final = 4
_MAX_CANDIDATES: Final = 64
_H264: Final = re.compile(r"a=rtpmap:\d+ H264/90000", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Offer:
    """An offer of bounded size that requests one video track."""

    sdp: str
    """The offer's session description."""
    has_channel: bool
    """Whether the client opens a data channel. A client without one can only watch."""


def read_offer(body: bytes) -> Offer:
    """Check an offer.

    Raises:
        EndpointError: `invalid_offer` if the text is not a valid offer or is too large, or
            `unsupported_codec` if the client cannot receive H.264.
    """
    if len(body) > MAX_OFFER_BYTES:
        raise _invalid(f"the offer has more than {MAX_OFFER_BYTES} bytes")
    try:
        sdp = body.decode()
    except UnicodeDecodeError:
        raise _invalid("the offer is not UTF-8") from None
    lines = sdp.splitlines()
    if not lines or lines[0] != "v=0":
        raise _invalid("the body is not a session description: its first line must be v=0")
    if len(lines) > _MAX_LINES or max(map(len, lines)) > _MAX_LINE_CHARS:
        raise _invalid(
            f"the offer exceeds {_MAX_LINES} lines or {_MAX_LINE_CHARS} characters in a line"
        )
    kinds = [line[2:].split(" ", 1)[0] for line in lines if line.startswith("m=")]
    if len(kinds) > _MAX_SECTIONS:
        raise _invalid(f"the offer has {len(kinds)} media sections; at most {_MAX_SECTIONS}")
    if sum(line.startswith("a=candidate:") for line in lines) > _MAX_CANDIDATES:
        raise _invalid(f"the offer has more than {_MAX_CANDIDATES} candidates")
    if kinds.count("video") != 1 or kinds.count("application") > 1:
        raise _invalid("the offer must have one video section and at most one data channel")
    if not any(_H264.match(line) for line in lines):
        raise EndpointError("unsupported_codec", "the offer must contain H.264", param="video")
    return Offer(sdp, has_channel="application" in kinds)


def _invalid(message: str) -> EndpointError:
    return EndpointError("invalid_offer", message)
