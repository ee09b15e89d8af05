# SPDX-License-Identifier: Apache-2.0
"""Path and local URL of the web page. This module imports only the standard library."""

from typing import Final

PAGE_PATH: Final = "/omni"


def page_url(host: str | None, port: int | str, scheme: str = "http", root_path: str = "") -> str:
    """Return the URL of the web page.

    Args:
        host: Host that the server listens on. A wildcard address becomes `localhost`.
        port: Server port.
        scheme: `http` or `https`.
        root_path: The server's root path.
    """
    name = "localhost" if host in (None, "", "0.0.0.0", "::") else host
    return f"{scheme}://{f'[{name}]' if name and ':' in name else name}:{port}{root_path.rstrip('/')}{PAGE_PATH}/"  # noqa: E501
