# SPDX-License-Identifier: Apache-2.0
"""Videos and image files belong to the API key that created them. The tests use an engine that
responds instantly.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fastapi import FastAPI
from helpers.instant_engine import InstantEngine
from helpers.waits import wait_until
from starlette.testclient import TestClient

from vllm_omni.entrypoints.limits.access import BrowserAccess
from vllm_omni.entrypoints.openai.limits import MediaLimits
from vllm_omni.entrypoints.openai.routes import OpenAIRoutes
from vllm_omni.entrypoints.openai.served import ServedModel
from vllm_omni.entrypoints.realtime.connection.limits import EndpointLimits
from vllm_omni.testing.null.image.family import CAPABILITIES

ONE, TWO = {"Authorization": "Bearer k1"}, {"Authorization": "Bearer k2"}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[object]:
    """Return a function that starts a server with the image and video routes and the given API
    keys.
    """
    limits, engine = MediaLimits(media_dir=str(tmp_path)), InstantEngine()
    engine.is_world = False
    model = ServedModel(("m",), CAPABILITIES, 160, 96, 256 * 256, 4)
    with ThreadPoolExecutor(2) as executor:

        def make(*keys: str) -> TestClient:
            routes = OpenAIRoutes()
            routes.connect_engine(engine, model, limits, EndpointLimits(), executor)  # type: ignore[arg-type]
            app = FastAPI()
            routes.add_routes(app)
            BrowserAccess(keys, {}).attach_to_app(app)
            return TestClient(app)

        yield make


def test_a_video_is_visible_to_its_key_only(serve: "type[TestClient]") -> None:
    """A different key cannot list, read, download, cancel or delete a video."""
    with serve("k1", "k2") as client:  # type: ignore[arg-type]
        made = client.post(
            "/v1/videos", json={"prompt": "a secret", "seconds": "1"}, headers=ONE
        ).json()["id"]
        path = f"/v1/videos/{made}"
        wait_until(lambda: client.get(path, headers=ONE).json()["status"] == "completed", 30)
        assert client.get("/v1/videos", headers=TWO).json()["data"] == []
        assert (
            client.get(path, headers=TWO).status_code
            == client.get(f"{path}/content", headers=TWO).status_code
            == 404
        )
        assert (
            client.post(f"{path}/cancel", headers=TWO).status_code
            == client.delete(path, headers=TWO).status_code
            == 404
        )
        assert [job["id"] for job in client.get("/v1/videos", headers=ONE).json()["data"]] == [made]
        assert client.get(f"{path}/content", headers=ONE).status_code == 200
        assert client.delete(path, headers=ONE).status_code == 200


@pytest.mark.parametrize(("keys", "status"), [(("k1", "k2"), 404), ((), 200)])
def test_an_image_url_belongs_to_its_key(
    serve: "type[TestClient]", keys: tuple[str, ...], status: int
) -> None:
    """The image at a URL can be read only with the API key that created the image. On a server
    without API keys, every client can read the image at the URL, whatever headers it sends.
    """
    with serve(*keys) as client:  # type: ignore[arg-type]
        requested = {"prompt": "a", "response_format": "url"}
        url = client.post("/v1/images/generations", json=requested, headers=ONE).json()["data"][0][
            "url"
        ]
        assert client.get(url, headers=ONE).status_code == 200
        assert client.get(url, headers=TWO).status_code == status
