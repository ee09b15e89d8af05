# SPDX-License-Identifier: Apache-2.0
"""One policy for media URLs, which applies to all routes on this package's servers.

`data:` URLs are always accepted. `http:` and `https:` URLs require vLLM's
`--allowed-media-domains`, and `file:` URLs require `--allowed-local-media-path`. Without this
policy, vLLM's own connector would fetch any URL if `--allowed-media-domains` is not set, including
URLs on the server's internal network. If media cannot be fetched or decoded, the response is a
client error (4xx).
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


def apply_media_policy() -> None:
    """If VLLM_MEDIA_CONNECTOR does not select a connector, apply the policy to vLLM's routes.

    Redirects are followed only if VLLM_MEDIA_URL_ALLOW_REDIRECTS allows it, because redirect
    targets are not checked.
    """
    os.environ.setdefault("VLLM_MEDIA_CONNECTOR", _NAME)
    os.environ.setdefault("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "0")


@MEDIA_CONNECTOR_REGISTRY.register(_NAME)
class AllowedMediaConnector(MediaConnector):
    """vLLM's connector, restricted to the allowed URLs."""

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        self._check(url)
        with _client_errors():
            return super().load_from_url(url, media_io, fetch_timeout=fetch_timeout)

    async def load_from_url_async(
        self, url: str, media_io: Any, *, fetch_timeout: int | None = None
    ) -> Any:
        self._check(url)
        with _client_errors():
            return await super().load_from_url_async(url, media_io, fetch_timeout=fetch_timeout)

    def _check(self, url: str) -> None:
        """Check a URL.

        Raises:
            VLLMValidationError: The policy does not allow the URL.
        """
        if url[:5].lower() == "data:":
            return
        try:
            scheme = parse_url(url).scheme or ""
        except LocationParseError:
            scheme = ""
        if scheme in ("http", "https") and not self.allowed_media_domains:
            raise VLLMValidationError(
                "this server fetches no URLs (its operator lists domains with "
                "--allowed-media-domains): send a data: URL",
                parameter=_PARAMETER,
            )
        if scheme == "file" and self.allowed_local_media_path is None:
            raise VLLMValidationError(
                "this server reads no local files (its operator names a directory with "
                "--allowed-local-media-path): send a data: URL",
                parameter=_PARAMETER,
            )
        if scheme not in ("http", "https", "file"):
            raise VLLMValidationError(
                "the URL must be a data:, http:, https: or file: URL", parameter=_PARAMETER
            )


@contextlib.contextmanager
def _client_errors() -> Iterator[None]:
    """Report failures to fetch or decode media as client errors.

    The original error messages may contain paths, so they are logged but not sent to the client.
    """
    try:
        yield
    except (OSError, RuntimeError, aiohttp.ClientError, Image.DecompressionBombError) as error:
        logger.info("media_refused %.300r", error)
        raise VLLMUnprocessableEntityError(
            f"the media cannot be fetched or read ({type(error).__name__})", parameter=_PARAMETER
        ) from error
