# SPDX-License-Identifier: Apache-2.0
"""Tests of which media URLs a server fetches, through vLLM's connector registry. No URL is actually
fetched.
"""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from vllm import envs
from vllm.exceptions import VLLMClientError
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from vllm_omni.entrypoints.limits import media_policy


class NoConnection:
    """Records each requested URL, then fails as if the URL's server were down."""

    def __init__(self) -> None:
        self.fetched: list[str] = []

    async def async_get_bytes(self, url: str, **options: Any) -> bytes:
        return self.get_bytes(url, **options)

    def get_bytes(self, url: str, **options: Any) -> bytes:
        assert options["allow_redirects"] is False
        self.fetched.append(url)
        raise ConnectionRefusedError("192.168.1.1")


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that creates the media connector that vLLM's routes use, with the given
    settings.
    """
    for name in ("VLLM_MEDIA_CONNECTOR", "VLLM_MEDIA_URL_ALLOW_REDIRECTS"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "")  # makes monkeypatch restore the variables that `apply` sets
        monkeypatch.delenv(name)
    media_policy.apply_media_policy()
    return lambda **settings: MEDIA_CONNECTOR_REGISTRY.load(
        envs.VLLM_MEDIA_CONNECTOR, connection=NoConnection(), **settings
    )


def refusal(connector: MediaConnector, url: str) -> str:
    """Check that both ways of loading an image fail, and return the error that the client gets."""
    with pytest.raises(VLLMClientError) as failed:
        connector.fetch_image(url)
    with pytest.raises(VLLMClientError):
        asyncio.run(connector.fetch_image_async(url))
    return str(failed.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:8000/a.png", "fetches no URLs"),
        ("HTTPS://example.com/a.png", "fetches no URLs"),
        ("file:///etc/passwd", "reads no local files"),
        ("ftp://example.com/a.png", "must be a data:"),
        ("httpx://example.com/a.png", "must be a data:"),
        ("/etc/passwd", "must be a data:"),
        ("http://[", "must be a data:"),
        ("data:image/png,abc", "cannot be fetched or read"),
    ],
)
def test_by_default_nothing_is_fetched(make: Any, url: str, words: str) -> None:
    connector = make()
    assert words in refusal(connector, url)
    assert connector.connection.fetched == []


def test_listed_domains_are_fetched(make: Any) -> None:
    """URLs in listed domains are fetched. A failed fetch and a URL in any other domain are client
    errors, and their messages contain no IP address.
    """
    connector = make(allowed_media_domains=["example.com"])
    assert "192" not in refusal(connector, "https://example.com/a.png")
    assert connector.connection.fetched == ["https://example.com/a.png"] * 2
    with pytest.raises(ValueError, match="must be from one of the allowed domains"):
        connector.fetch_image("https://example.org/a.png")


def test_files_of_the_allowed_directory_are_read(make: Any, tmp_path: Path) -> None:
    Image.new("RGB", (4, 2)).save(tmp_path / "a.png")
    connector = make(allowed_local_media_path=str(tmp_path))
    assert connector.fetch_image(f"file://{tmp_path}/a.png").size == (4, 2)
    assert str(tmp_path) not in refusal(connector, f"file://{tmp_path}/b.png")


def test_data_urls_are_always_accepted(make: Any) -> None:
    file = io.BytesIO()
    Image.new("RGB", (4, 2)).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    assert make().fetch_image(url).size == (4, 2)


def test_a_configured_connector_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MEDIA_CONNECTOR", "http")
    monkeypatch.setenv("VLLM_MEDIA_URL_ALLOW_REDIRECTS", "1")
    media_policy.apply_media_policy()
    assert (envs.VLLM_MEDIA_CONNECTOR, envs.VLLM_MEDIA_URL_ALLOW_REDIRECTS) == ("http", True)
