# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni download lingbot_world_fast` downloads from a hub in this process, with the real hub
client.
"""

import argparse
import json
import os
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from helpers.hub_server import hub_server
from helpers.rank_processes import rank_context
from helpers.waits import seconds

from vllm_omni.model_executor.checkpoint.root_config import ROOT_CONFIG
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
from vllm_omni.model_executor.models.lingbot_world.hub import PIECES, RELEASES, check_complete
from vllm_omni.model_executor.models.wan.checkpoint.layout import TINY_VAE_FILE
from vllm_omni.testing.tiny.lingbot_world import make_tiny

BASE, FAST = (piece.repo for piece in PIECES)


def download(
    endpoint: str, out: Path, tmp_path: Path, model: str = "lingbot_world_fast"
) -> tuple[int, str]:
    """Run the command and return its exit status and output. It runs in a process forked from the
    fork server, which has already imported the libraries.
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
    os.environ.update(environment)  # the hub client reads them when it is imported
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    from huggingface_hub import constants

    from vllm_omni.entrypoints.cli.checkpoints import download
    from vllm_omni.entrypoints.cli.errors import CommandError

    # The released weights take up 86 GB on disk and are transferred in thousands of chunks per
    # file. The stand-in is tiny, so use smaller chunks and skip the disk check.
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
    """Return the content of a release's downloaded files. The function checks that the
    `config.json` for `vllm serve` exists, but does not return it.
    """
    found = contents(folder)
    assert "model_type" in json.loads(found.pop(ROOT_CONFIG))
    return found


def test_a_broken_transfer_resumes_and_the_result_is_a_checkpoint(tmp_path: Path) -> None:
    """Both repositories are downloaded, byte for byte, into one directory with the original layout.
    A truncated download resumes where it stopped, and files that the layout does not use are not
    downloaded.
    """
    base, fast, out = (tmp_path / name for name in ("base", "fast", "world"))
    make_tiny(base, 0, "original")
    (base / TINY_VAE_FILE).unlink()  # part of another project's release
    released = contents(base)
    (base / "lingbot_world_fast").rename(fast)
    (base / "high_noise_model").mkdir()
    (base / "high_noise_model" / "diffusion_pytorch_model.safetensors").write_bytes(b"unused")
    with hub_server({BASE: base, FAST: fast}, cut="Wan2.1_VAE.pth") as (endpoint, fetched):
        status, printed = download(endpoint, out, tmp_path)
        if status:  # the client does not retry, so rerun the command as a user would
            assert "Run the same command again to resume" in printed
            status, printed = download(endpoint, out, tmp_path)
    assert status == 0, printed
    whole, resumed = (name for name in fetched if name.startswith("Wan2.1_VAE.pth"))
    assert whole == "Wan2.1_VAE.pth" and resumed.endswith(":]")
    assert released_contents(out) == released
    find_layout(out).require("transformer", "vae", "text_encoder", "tokenizer")


@pytest.mark.parametrize(
    ("release", "layout", "folder"),
    [
        ("1_3b", "v2_1_3b", "."),
        ("14b", "v2", "transformers"),
        ("14b_diffusers", "diffusers", "transformer"),
    ],
)
def test_releases_of_v2_arrive_as_checkpoints(
    tmp_path: Path, release: str, layout: str, folder: str
) -> None:
    """Every file of a v2 release is downloaded to the path that its layout requires, and the
    directory's name identifies the version.
    """
    source, tiny = RELEASES[f"lingbot_world_v2_{release}"], tmp_path / "tiny"
    make_tiny(tiny, 0, layout)
    (tiny / TINY_VAE_FILE).unlink()
    repos = {item.repo: tmp_path / "hub" / item.repo for item in source.components}
    for file in (path for path in tiny.rglob("*") if path.is_file()):
        name = file.relative_to(tiny).as_posix().removeprefix("assets/")
        shared = "assets" in file.parts or name.startswith(("google", "Wan2", "models_t5"))
        target = repos[source.components[-1 if shared else 0].repo] / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    out = tmp_path / f"lingbot_world_v2_{release}"
    with hub_server(repos) as (endpoint, _):
        status, printed = download(endpoint, out, tmp_path, f"lingbot_world_v2_{release}")
    assert status == 0, printed
    expected: dict[str, bytes] = {}
    for repo in repos.values():
        expected |= contents(repo)
    assert released_contents(out) == expected
    found = find_layout(out)
    found.require("transformer", "vae", "text_encoder", "tokenizer")
    assert (found.transformer, found.version) == ((out / folder), "v2")
    assert found.release() == f"lingbot_world_v2_{release}"
    check_complete(out)
