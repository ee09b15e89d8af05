# SPDX-License-Identifier: Apache-2.0
"""The server's HTTP parser: h11, in uvicorn's own protocol class.

uvicorn prefers httptools if it is installed. httptools stops reading a request that offers an
unknown upgrade, so it loses the body of every request of Java's HttpClient, which offers `Upgrade:
h2c` by default. RFC 9110 allows servers to ignore such an offer, and h11 does. h11 also limits the
bytes of headers (`limits/header_limits.py`).
"""

from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from vllm_omni.entrypoints.lifespan import run_before_serving


def use_h11(app: FastAPI) -> None:
    """Select h11 before the server listens."""

    def select(starting: FastAPI) -> None:
        starting.state.server.config.http_protocol_class = H11Protocol

    run_before_serving(app, select)
