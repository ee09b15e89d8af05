# SPDX-License-Identifier: Apache-2.0
"""`vllm serve OWNER/NAME --omni` resolves a hub id to the snapshot in Hugging Face's cache.

HF_ENDPOINT points to a local hub server. Every test case runs in its own process, because the hub
library reads HF_ENDPOINT at import.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.hub_server import COMMIT, hub_server
from helpers.waits import seconds

from vllm_omni.entrypoints.cli.checkpoints.make_tiny import write_tiny
from vllm_omni.model_executor.checkpoint.hub import is_hub_id, resolve

PROGRAM = """
import json, sys
from vllm_omni.entrypoints.cli import serve
from vllm_omni.entrypoints.cli.errors import CommandError
try:
    planned = serve.plan([*sys.argv[1:], "--port", "0"], {}, [], on_cpu=True)
except CommandError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"argv": planned.argv, "title": planned.title}))
"""


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return two hub repositories: a speech model, and another model with large files."""
    root = tmp_path_factory.mktemp("repos")
    write_tiny("qwen2_5_omni", root / "omni")
    (root / "other").mkdir()
    (root / "other" / "config.json").write_text('{"model_type": "bert"}')
    (root / "other" / "model.safetensors").write_bytes(b"0" * 1000)
    return {"acme/tiny-omni": root / "omni", "acme/other": root / "other"}


@pytest.fixture(scope="module")
def hub(repos: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    with hub_server(repos) as served:
        yield served


def plan(*argv: str, home: Path, endpoint: str, **variables: str) -> dict[str, object]:
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_ENDPOINT": endpoint,
        "NO_PROXY": "127.0.0.1",
        **variables,
    }
    environment.pop("HF_HUB_CACHE", None)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv],
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds(120),
        check=True,
    )
    planned: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return planned


def test_an_id_is_fetched_once_and_then_served_from_the_cache(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    """A model is downloaded once, and a second start uses the cache even if the hub is offline.
    Clients name the model by its hub id.
    """
    endpoint, fetched = hub
    first = plan("acme/tiny-omni", "--max-model-len", "64", home=tmp_path, endpoint=endpoint)
    argv = first["argv"]
    assert isinstance(argv, list)
    snapshot = tmp_path / "hub" / "models--acme--tiny-omni" / "snapshots" / COMMIT
    assert argv[:5] == [str(snapshot), "--max-model-len", "64", "--port", "0"]
    assert argv[argv.index("--served-model-name") + 1] == "acme/tiny-omni"
    assert "spk_dict.pt" in fetched and "model.safetensors" in fetched
    offline = plan(
        "acme/tiny-omni",
        "--max-model-len",
        "64",
        home=tmp_path,
        endpoint="http://127.0.0.1:9",
        HF_HUB_OFFLINE="1",
    )
    assert offline["argv"] == argv


def test_a_repository_of_another_model_is_refused_before_its_weights(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    """A repository of an unsupported model is refused after its small files have been downloaded,
    but before any weights are downloaded.
    """
    endpoint, fetched = hub
    before = len(fetched)
    error = plan("acme/other", home=tmp_path, endpoint=endpoint)["error"]
    assert "acme/other is not recognised" in str(error) and "\n" not in str(error)
    assert fetched[before:] == ["config.json"]


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        ("acme/nothing", "the hub has no repository acme/nothing"),
        ("no_such_directory", "is not a directory"),
    ],
)
def test_a_missing_model_is_one_line(
    model: str, complaint: str, hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    """A name that is neither a directory nor a repository causes a one-line error."""
    error = str(plan(model, home=tmp_path, endpoint=hub[0])["error"])
    assert complaint in error and "\n" not in error


def test_without_network_and_cache_the_start_says_so(tmp_path: Path) -> None:
    error = str(
        plan("acme/tiny-omni", home=tmp_path, endpoint="http://127.0.0.1:9", HF_HUB_OFFLINE="1")[
            "error"
        ]
    )
    assert error.startswith("acme/tiny-omni could not be fetched (LocalEntryNotFoundError: ")


@pytest.mark.parametrize(
    ("repo", "reason"),
    [
        (
            "robbyant/lingbot-world-fast",
            "a part of a checkpoint: run `vllm-omni download lingbot_world",
        ),
        (
            "Qwen/Qwen2.5-Omni-3B",
            "licence to be accepted .*: run `vllm-omni download qwen2_5_omni_3b DIR`",
        ),
    ],
)
def test_a_release_that_needs_more_than_its_repository_names_the_download(
    repo: str, reason: str
) -> None:
    """A release that needs other repositories or an accepted licence is refused before anything is
    downloaded, and the error names the download command.
    """
    with pytest.raises(ValueError, match=reason):
        resolve(repo)


def test_a_path_that_exists_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert is_hub_id("owner/name") and is_hub_id("Qwen/Qwen2.5-Omni-7B")
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("owner/name")
    assert not any(
        is_hub_id(model) for model in ("my_world", "./my/world", "/srv/models/x", "a/b/c", "../x")
    )
