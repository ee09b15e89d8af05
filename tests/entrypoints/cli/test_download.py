# SPDX-License-Identifier: Apache-2.0
"""`vllm-omni download` stores each component in its directory. The hub is a fake, so nothing is
downloaded.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from vllm_omni.entrypoints.cli.checkpoints import download
from vllm_omni.entrypoints.cli.errors import CommandError
from vllm_omni.model_executor.checkpoint.hub import hub_source
from vllm_omni.model_executor.models.causal_wan.checkpoint import releases


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(download, "_check_disk", lambda out, gigabytes: None)
    return argparse.Namespace(
        model="lingbot_world", out=tmp_path / "world", dry_run=False, accept_license=False
    )


@pytest.fixture(autouse=True)
def _light_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace model families with objects that have only a name, because the command reads no other
    attribute in these tests.
    """
    from vllm_omni.model_executor.models import registry

    def named(name: str) -> argparse.Namespace:
        return argparse.Namespace(name=registry._ALIASES.get(name, name))

    monkeypatch.setattr(registry, "get_family", named)


def test_each_component_is_stored_in_its_directory(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text encoder and the VAE are stored at the top level and the transformer in a sub-folder.
    The transformer gets a `config.json` if its repository has none.
    """
    calls: dict[str, Any] = {}

    def fetch(repo: str, *, allow_patterns: list[str], local_dir: Path) -> str:
        calls[repo] = (allow_patterns, local_dir)
        local_dir.mkdir(parents=True, exist_ok=True)
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert download.run(arguments) == 0
    transformer = arguments.out / "lingbot_world_fast"
    assert calls["robbyant/lingbot-world-fast"] == (["*.safetensors", "*.json"], transformer)
    patterns, folder = calls["robbyant/lingbot-world-base-cam"]
    assert folder == arguments.out
    assert "Wan2.1_VAE.pth" in patterns
    assert not any("noise_model" in pattern for pattern in patterns)
    assert json.loads((transformer / "config.json").read_text())["num_layers"] == 40
    assert json.loads((arguments.out / "config.json").read_text()) == {
        "model_type": "omni_pipeline"
    }


def test_a_downloaded_config_is_not_replaced(
    arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fetch(repo: str, *, allow_patterns: list[str], local_dir: Path) -> str:
        local_dir.mkdir(parents=True, exist_ok=True)
        (local_dir / "config.json").write_text('{"num_layers": 2}')
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert download.run(arguments) == 0
    assert json.loads((arguments.out / "lingbot_world_fast" / "config.json").read_text()) == {
        "num_layers": 2
    }


RELEASES = ["1_3b", "14b", "14b_diffusers", "14b_pretrain"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_licence_must_be_accepted_before_the_first_byte(
    release: str,
    arguments: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """LingBot World v2 is licensed under CC BY-NC-SA. The plan shows this licence, and the download
    requires `--accept-license`.
    """
    fetched: list[tuple[str, Path]] = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda repo, *, allow_patterns, local_dir: (
            fetched.append((repo, local_dir)) or str(local_dir)
        ),
    )
    monkeypatch.setattr(
        download,
        "_check_disk",
        lambda out, gigabytes: (
            pytest.fail("not even the disk") if not arguments.accept_license else None
        ),
    )
    arguments.model = f"lingbot_world_v2_{release}"
    with pytest.raises(
        CommandError, match=r"no file was fetched; .*--accept-license \(CC BY-NC-SA 4"
    ) as refused:
        download.run(arguments)
    assert "\n" not in str(refused.value)
    assert not fetched and not arguments.out.exists()
    assert "licence of the weights: CC BY-NC-SA 4.0" in capsys.readouterr().out
    arguments.dry_run = True
    assert download.run(arguments) == 0 and not fetched
    arguments.dry_run, arguments.accept_license = False, True
    assert download.run(arguments) == 0
    assert fetched and all(repo.startswith("robbyant/lingbot-world-v2-") for repo, _ in fetched)
    assert {folder for _, folder in fetched} == {arguments.out}


@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda release: release.download_name)
def test_a_downloaded_release_is_recognised(
    release: releases.PublishedNetwork,
    arguments: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A downloaded causal Wan release is recognised by its layout, which also locates the
    checkpoint files and the LoRA.
    """

    def fetch(repo: str, *, allow_patterns: list[str], local_dir: Path) -> str:
        for pattern in allow_patterns:
            file = local_dir / pattern
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    arguments.model, arguments.accept_license = release.download_name, True
    assert download.run(arguments) == 0
    assert (found := releases.find_release(arguments.out)) is not None and found[0] is release
    assert (release.find_lora(arguments.out) is not None) == bool(release.loras)


@pytest.mark.parametrize(
    ("release", "licence"),
    [("causvid", "CC BY-NC-SA 4.0"), ("longlive", "CC BY-NC-SA"), ("reward_forcing", "no licence")],
)
def test_restricted_causal_wan_releases_require_the_flag(
    release: str, licence: str, arguments: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `--accept-license`, no part of a restricted release is downloaded."""
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("fetched")
    )
    arguments.model = release
    with pytest.raises(CommandError, match=rf"--accept-license \({licence}"):
        download.run(arguments)


def test_without_a_network_the_files_are_listed(
    arguments: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Without a network connection, the command still prints which files to download, from which
    addresses, and into which folders.
    """

    def fetch(repo: str, **options: Any) -> None:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(CommandError, match=r"could not be fetched.*bring the files listed above"):
        download.run(arguments)
    out = capsys.readouterr().out
    for part in hub_source("lingbot_world").components:
        assert f"https://huggingface.co/{part.repo} -> {arguments.out / part.folder}" in out
        assert ", ".join(part.patterns) in out


def test_a_disk_that_is_too_small_is_found_first(tmp_path: Path) -> None:
    """The free disk space is checked before the download. Files that already exist need no
    additional space.
    """
    with pytest.raises(CommandError, match=r"GB are still missing, but .* GB free"):
        download._check_disk(tmp_path / "new" / "world", 1e9)
    download._check_disk(tmp_path / "new" / "world", 1e-6)
