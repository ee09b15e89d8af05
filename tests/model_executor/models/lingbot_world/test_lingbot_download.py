# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni download lingbot_world_fast` against a hub in this process, through the real hub
client.
"""

import argparse
import hashlib
import http.server
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from helpers.rank_processes import rank_context
from helpers.waits import seconds

from vllm_omni.model_executor.checkpoint.root_config import ROOT_CONFIG
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.hub import PIECES, RELEASES, check_complete
from vllm_omni.model_executor.models.wan.checkpoint.layout import TINY_VAE_FILE
from vllm_omni.testing.tiny.lingbot_world import make_tiny

BASE, FAST = (piece.repo for piece in PIECES)


def commit(repo: str) -> str:
    """Each repository has its own: the client takes two of one commit for one and the same."""
    return hashlib.sha1(repo.encode()).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """Serves files as the hub does.

    `cut`: this file's body stops half-way, once. `ranges`: partial requests seen.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, dict[str, bytes]] = {
            BASE: {"README.md": b"base"},
            FAST: {"README.md": b"fast"},
        }
        self.cut: str | None = None
        self.ranges: list[str] = []

    def serve_checkpoint(self, folder: Path) -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                name = path.relative_to(folder).as_posix()
                repo = FAST if name.startswith("lingbot_world_fast/") else BASE
                self.files[repo][name.removeprefix("lingbot_world_fast/")] = path.read_bytes()


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def response(self, with_body: bool) -> None:
        path = self.path.split("?")[0]
        if match := re.match(r"/api/models/([^/]+/[^/]+)/(revision|tree)/", path):
            files = self.server.files[match[1]]
            if match[2] == "tree":
                response: object = [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(data),
                        "oid": hashlib.sha1(data).hexdigest(),
                    }
                    for name, data in files.items()
                ]
            else:
                response = {
                    "id": match[1],
                    "sha": commit(match[1]),
                    "siblings": [{"rfilename": name} for name in files],
                }
            self.send(
                200, json.dumps(response).encode(), {"Content-Type": "application/json"}, with_body
            )
        elif match := re.match(r"/([^/]+/[^/]+)/resolve/[^/]+/(.*)$", path):
            self.send_file(
                match[2], self.server.files[match[1]][match[2]], with_body, commit(match[1])
            )
        else:
            self.send(404, b"", {}, with_body)

    def send_file(self, name: str, data: bytes, with_body: bool, revision: str) -> None:
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"',
            "X-Repo-Commit": revision,
            "Accept-Ranges": "bytes",
        }
        if with_body and (match := re.match(r"bytes=(\d+)-", self.headers.get("Range") or "")):
            start = int(match[1])
            self.server.ranges.append(name)
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self.send(206, data[start:], headers, True)
        elif with_body and name == self.server.cut:
            self.server.cut = None
            self.send(200, data, headers, True, sent=len(data) // 2)
            self.close_connection = True
        else:
            self.send(200, data, headers, with_body)

    def send(
        self,
        status: int,
        data: bytes,
        headers: dict[str, str],
        with_body: bool,
        sent: int | None = None,
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data[:sent])

    def do_GET(self) -> None:
        self.response(True)

    def do_HEAD(self) -> None:
        self.response(False)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def download(
    endpoint: str, out: Path, tmp_path: Path, model: str = "lingbot_world_fast"
) -> tuple[int, str]:
    """The command's status and all that it printed, in a process forked from one that has the
    libraries imported.
    """
    environment = {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    log = tmp_path / "log"
    process = rank_context().Process(target=_download, args=(environment, out, model, log))
    process.start()
    process.join(seconds(120))
    process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, log.read_text()


def _download(environment: dict[str, str], out: Path, model: str, log: Path) -> None:
    os.environ.update(environment)  # the hub's client reads them when it is imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    from huggingface_hub import constants

    from vllm_omni.entrypoints.cli.checkpoints import download
    from vllm_omni.entrypoints.cli.errors import CommandError

    # The released weights need 86 GB of disk and have thousands of transfer chunks a file; the
    # stand-in has neither.
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 16
    download._check_disk = lambda out, gigabytes: None
    with log.open("w") as output, redirect_stdout(output), redirect_stderr(output):
        try:
            status = download.run(
                argparse.Namespace(model=model, out=out, dry_run=False, accept_license=True)
            )
        except CommandError as error:
            print(f"error: {error}")
            status = 1
    sys.exit(status)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


def released_contents(folder: Path) -> dict[str, bytes]:
    """Without the `config.json` by which `vllm serve` knows the directory, which must be there."""
    found = contents(folder)
    assert "model_type" in json.loads(found.pop(ROOT_CONFIG))
    return found


def test_a_broken_transfer_resumes_and_the_result_is_a_checkpoint(hub, tmp_path):
    """Both repositories arrive as one original layout, byte for byte; the cut file goes on where
    it stopped.
    """
    make_tiny(tmp_path / "released", 0, "original")
    # somebody else's release: it is no part of LingBot World's
    (tmp_path / "released" / TINY_VAE_FILE).unlink()
    hub.serve_checkpoint(tmp_path / "released")
    hub.files[BASE]["high_noise_model/diffusion_pytorch_model.safetensors"] = b"not needed"
    hub.cut = "Wan2.1_VAE.pth"
    endpoint, out = f"http://127.0.0.1:{hub.server_port}", tmp_path / "world"
    status, printed = download(endpoint, out, tmp_path)
    if status:  # a client that does not retry by itself: run the command again, as its message says
        assert "Run the same command again to resume" in printed
        status, printed = download(endpoint, out, tmp_path)
    assert status == 0, printed
    assert hub.ranges == ["Wan2.1_VAE.pth"]
    assert released_contents(out) == contents(tmp_path / "released")
    find_layout(out).require("transformer", "vae", "text_encoder", "tokenizer")


def test_a_repository_without_config_gets_the_released_one(hub, tmp_path):
    """The written `config.json` is the released architecture and names its causal window."""
    hub.files[BASE] |= {"Wan2.1_VAE.pth": b"v", "models_t5_umt5-xxl-enc-bf16.pth": b"t"}
    hub.files[FAST]["model.safetensors"] = b"w"
    out = tmp_path / "world"
    status, printed = download(f"http://127.0.0.1:{hub.server_port}", out, tmp_path)
    assert status == 0, printed
    config = LingBotWorldConfig.from_checkpoint(find_layout(out).transformer_config())
    released = LingBotWorldConfig(window_frames=18, sink_frames=9, frames_per_chunk=3)
    assert config == released


@pytest.mark.parametrize(
    ("release", "layout", "folder"),
    [
        ("1_3b", "v2_1_3b", "."),
        ("14b", "v2", "transformers"),
        ("14b_diffusers", "diffusers", "transformer"),
    ],
)
def test_releases_of_v2_arrive_as_checkpoints(hub, tmp_path, release, layout, folder):
    """Every file where the layout has it, the generation by the directory's name, nothing added."""
    source = RELEASES[f"lingbot_world_v2_{release}"]
    make_tiny(tmp_path / "released", 0, layout)
    (tmp_path / "released" / TINY_VAE_FILE).unlink()
    for part in ("assets", "."):
        for path in sorted((tmp_path / "released" / part).rglob("*")):
            name = path.relative_to(tmp_path / "released" / part).as_posix()
            if path.is_file() and not name.startswith("assets/"):
                owner = source.components[
                    0
                    if part == "." and not name.startswith(("google", "Wan2", "models_t5"))
                    else -1
                ]
                hub.files.setdefault(owner.repo, {})[name] = path.read_bytes()
    out = tmp_path / f"lingbot_world_v2_{release}"
    status, printed = download(
        f"http://127.0.0.1:{hub.server_port}", out, tmp_path, f"lingbot_world_v2_{release}"
    )
    assert status == 0, printed
    expected = {
        name: data for item in source.components for name, data in hub.files[item.repo].items()
    }
    assert released_contents(out) == expected
    found = find_layout(out)
    found.require("transformer", "vae", "text_encoder", "tokenizer")
    assert (found.transformer, found.version) == ((out / folder), "v2")
    assert found.release() == f"lingbot_world_v2_{release}"
    check_complete(out)


def test_without_a_hub_every_file_and_its_place_is_named(tmp_path):
    """No connection: the plan, then one line that says how to go on; exit status 1."""
    status, printed = download("http://127.0.0.1:9", tmp_path / "world", tmp_path)
    assert status == 1
    assert (
        f"https://huggingface.co/{FAST} -> {tmp_path / 'world' / 'lingbot_world_fast'}" in printed
    )
    assert "models_t5_umt5-xxl-enc-bf16.pth" in printed
    assert "bring the files listed above" in printed.splitlines()[-1]
