# SPDX-License-Identifier: Apache-2.0
"""For the most recent change of each kind, the files listed in its recipe in CONTRIBUTING.md
exist.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import snippets as docs
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import WebSocketRoute

from vllm_omni.entrypoints.endpoints import ENDPOINTS, WebSocketEndpoint
from vllm_omni.model_executor.models.registry import ARCHITECTURES, family_names

CONTRIBUTING = docs.REPO / "CONTRIBUTING.md"
LAST_ADDED = {
    "Add a model": "wan2_2",
    "Add a WebSocket endpoint": "video",
    "Add an HTTP endpoint": "session",
    "Add a role": "vae",
    "Support a version of vLLM": "0.33",
}
"""For each recipe title, the name of the most recent addition of that kind."""


def recipe(title: str) -> list[str]:
    """Return the first column of a recipe's table, which contains files and folders."""
    section = CONTRIBUTING.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return [
        match[1] for line in section.splitlines() if (match := re.match(r"\| `([^`]+)` \|", line))
    ]


def test_every_recipe_has_an_entry_in_last_added() -> None:
    """Every recipe has an entry in `LAST_ADDED`."""
    assert set(re.findall(r"^## (.*)$", CONTRIBUTING.read_text(), re.M)) == set(LAST_ADDED)


@pytest.mark.parametrize("title", LAST_ADDED)
def test_the_files_of_a_recipe_are_there(title: str) -> None:
    """The files and folders listed in a recipe exist. Paths of folders end with a slash."""
    paths = [path.replace("<name>", LAST_ADDED[title]) for path in recipe(title)]
    assert len(paths) >= 4
    positions = {path: docs.REPO / path for path in paths}
    assert [
        path
        for path, position in positions.items()
        if not (position.is_dir() if path[-1] == "/" else position.is_file())
    ] == []


def test_a_family_is_its_folder_a_tiny_module_and_two_lines_of_the_registry() -> None:
    """A model family consists of its folder, a tiny module and two lines of the registry, as the
    first recipe says.

    The null models are in `testing/` instead, because users cannot serve them.
    """
    models, testing = (
        docs.REPO / "vllm_omni" / "model_executor" / "models",
        docs.REPO / "vllm_omni" / "testing",
    )
    null = {f"null_{path.parent.name}" for path in testing.glob("null/*/family.py")}
    assert null == {"null_world", "null_image"}
    families = set(family_names())
    assert {path.parent.name for path in models.glob("*/family.py")} == families - null
    # Several families share the folder `wan`.
    assert {path.parent.name for path in models.glob("*/__init__.py")} - {"wan"} == families - null
    assert families <= {path.stem for path in testing.glob("tiny/*.py")}
    packages = {position.split(":")[0].rsplit(".", 2)[1] for position in ARCHITECTURES.values()}
    assert packages == families - null | {name.removeprefix("null_") for name in null}


def test_a_model_is_in_the_pages_that_its_recipe_lists() -> None:
    """The site navigation contains the notes on every served family, and the README's table
    contains each family's folder.
    """
    served = [
        name
        for name in family_names()
        if not name.startswith("null_") and name != "diffusers_pipeline"
    ]
    readme, navigation = ((docs.REPO / name).read_text() for name in ("README.md", "mkdocs.yml"))
    folder = "vllm_omni/model_executor/models"
    assert [name for name in served if f"]({folder}/{name})" not in readme] == []
    assert [name for name in served if f"- {folder}/{name}/README.md\n" not in navigation] == []


def test_an_endpoint_is_in_the_pages_that_its_recipe_lists() -> None:
    """The README and the reference contain every WebSocket path in the table of endpoints."""
    pages = {
        path.name: path.read_text() for path in (docs.REPO / "docs" / "reference").glob("*.md")
    }
    readme = (docs.REPO / "README.md").read_text()
    app = FastAPI()
    for endpoint in (create() for create in ENDPOINTS):
        if isinstance(endpoint, WebSocketEndpoint):
            endpoint.add_routes(app)
    paths = {route.path.rstrip("/") for route in app.routes if isinstance(route, WebSocketRoute)}
    assert len(paths) >= 3
    assert [
        path
        for path in paths
        if f"`{path}`" not in readme or not any(path in page for page in pages.values())
    ] == []


def test_an_http_endpoint_is_in_the_pages_and_tests_that_its_recipe_lists(tmp_path: Path) -> None:
    """Every route with an OpenAPI description is documented on a page and covered by the test of
    HTTP methods.
    """
    pages = "".join(path.read_text() for path in (docs.REPO / "docs").rglob("*.md"))
    pages = re.sub(r"\{\w+\}", "{id}", pages)
    app, classes = FastAPI(), set()
    app.state.args = SimpleNamespace(model=str(tmp_path))
    for endpoint in (create() for create in ENDPOINTS):
        before = len(app.routes)
        endpoint.add_routes(app)
        added = [route for route in app.routes[before:] if isinstance(route, APIRoute)]
        if any(route.include_in_schema for route in added):
            classes.add(type(endpoint).__name__)
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    paths = {re.sub(r"\{\w+\}", "{id}", route.path) for route in routes if route.include_in_schema}
    assert {"/v1/videos/{id}", "/v1/sessions/{id}/snapshot"} <= paths
    assert [path for path in paths if path not in pages] == []
    tested = (docs.REPO / "tests" / "entrypoints" / "test_methods.py").read_text()
    assert [name for name in classes if f"    {name}().add_routes(" not in tested] == []
