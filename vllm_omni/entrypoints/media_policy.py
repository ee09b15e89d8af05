# SPDX-License-Identifier: Apache-2.0
"""One policy for media that clients name by URL, on every route of a server of this package.

`data:` URLs are always taken. `http:` and `https:` URLs need `--allowed-media-domains`, `file:` URLs need
`--allowed-local-media-path`; both flags are vLLM's own. vLLM's connector without the first flag fetches any URL, those
of the server's own network included. Media that cannot be had or read are the request's fault (4xx).
Held by tests/entrypoints/test_media_policy.py.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, Final

import aiohttp
from PIL import Image
from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url
from vllm.exceptions import VLLMUnprocessableEntityError, VLLMValidationError
from vllm.logger import init_logger
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

logger = init_logger("vllm." + __name__)

_NAME: Final = "vllm_omni"
_PARAMETER: Final = "url"


def apply() -> None:
    """Let vLLM's routes load media by this policy, unless the operator has chosen a connector (VLLM_MEDIA_CONNECTOR).

    Redirects are followed only if the operator says so (VLLM_MEDIA_URL_ALLOW_REDIRECTS): they may lead anywhere.
    """
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", _NAME)
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")


@MEDIA_CONNECTOR_REGISTRY.register(_NAME)
class AllowedMediaConnector(MediaConnector):
    """vLLM's connector, for the URLs that the operator allows."""

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        self._check(url)
        with _client_errors():
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        self._check(url)
        with _client_errors():
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)

    def _check(self, url: str) -> None:
        """Raise `VLLMValidationError` for a URL that this server does not read."""
        if url[:5].lower() == "data:":
            return
        try:
            scheme = parse_url(url).scheme or ""
        except LocationParseError:
            scheme = ""
        if scheme in ("http", "https") and not self.allowed_media_domains:
            raise VLLMValidationError(
                "this server fetches no URLs (its operator lists domains with --allowed-media-domains): "
                "send a data: URL",
                parameter=_PARAMETER,
            )
        if scheme == "file" and self.allowed_local_media_path is None:
            raise VLLMValidationError(
                "this server reads no local files (its operator names a directory with --allowed-local-media-path): "
                "send a data: URL",
                parameter=_PARAMETER,
            )
        if scheme not in ("http", "https", "file"):
            raise VLLMValidationError("the URL must be a data:, http:, https: or file: URL", parameter=_PARAMETER)


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    """Turn failures to fetch and to decode into the request's; their texts, which may hold paths, go to the log."""
    try:
        yield
    except (OSError, RuntimeError, aiohttp.ClientError, Image.DecompressionBombError) as error:
        logger.info("media_refused %.300r", error)
        raise VLLMUnprocessableEntityError(
            f"the media cannot be fetched or read ({type(error).__name__})", parameter=_PARAMETER
        ) from error
