# SPDX-License-Identifier: Apache-2.0
"""Where the web page is: its path, and the URL that someone at this machine would type. Imports nothing heavy."""

from typing import Final

PAGE_PATH: Final = "/omni"


def page_url(host: str | None, port: int | str, scheme: str = "http", root_path: str = "") -> str:
    """`host`: the server's; a wildcard becomes `localhost`."""
    name = "localhost" if host in (None, "", "0.0.0.0", "::") else host
    return f"{scheme}://{f'[{name}]' if name and ':' in name else name}:{port}{root_path.rstrip('/')}{PAGE_PATH}/"
