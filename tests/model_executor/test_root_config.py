# SPDX-License-Identifier: Apache-2.0
"""Tests of `vllm serve DIR` without additional flags: the `config.json` at the root, and what vLLM
reads from the directory.
"""

import json
from pathlib import Path

import pytest
from vllm.transformers_utils.config import get_config

import vllm_omni
from vllm_omni.entrypoints.cli.checkpoints.make_tiny import write_tiny
from vllm_omni.entrypoints.cli.checkpoints.make_world import write_world
from vllm_omni.model_executor.checkpoint.root_config import write_root_config
from vllm_omni.model_executor.models.registry import detect_family
from vllm_omni.worlds.manifest import check_files


def assert_found_by_vllm(folder: Path) -> None:
    """Assert that vLLM reads the same config without flags as with `--config-format omni`."""
    vllm_omni.register()
    found = get_config(folder, trust_remote_code=False)
    requested = get_config(folder, trust_remote_code=False, config_format="omni")
    assert found.to_dict() == requested.to_dict()
    assert found.omni_family == detect_family(folder).name


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("null_world", "original"),
        ("null_image", "original"),
        ("causal_wan", "original"),
        ("causal_wan", "diffusers"),
        ("lingbot_world", "v2_1_3b"),
        ("matrix_game", "original"),
        ("abot_world", "original"),
        ("waypoint", "v1"),
        ("wan2_2", "ti2v"),
        ("lance", "image"),
        ("diffusers_pipeline", "flux"),
    ],
)
def test_plain_vllm_reads_directories_of_make_tiny(model: str, layout: str, tmp_path: Path) -> None:
    """Stock vLLM reads layouts that have a released `config.json` at the root, a network at the
    root, or neither.
    """
    write_tiny(model, tmp_path / "tiny", layout=layout)
    assert_found_by_vllm(tmp_path / "tiny")


def test_plain_vllm_reads_directories_of_make_world(tmp_path: Path) -> None:
    """Stock vLLM reads directories that `make_world` has written. The root config is not listed in
    the manifest, so such a directory still passes the manifest check.
    """
    write_world(tmp_path / "world")
    check_files(tmp_path / "world")
    assert_found_by_vllm(tmp_path / "world")


def test_a_config_keeps_its_values_and_its_type(tmp_path: Path) -> None:
    """A model type is added to a released config that has none. A config that has a model type is
    not changed.
    """
    path = tmp_path / "config.json"
    path.write_text('{"model_name": "Lance"}')
    assert write_root_config(tmp_path)
    assert json.loads(path.read_text()) == {"model_name": "Lance", "model_type": "omni_pipeline"}
    assert not write_root_config(tmp_path)
    path.write_text('{"model_type": "t2v"}')
    assert not write_root_config(tmp_path)
    assert path.read_text() == '{"model_type": "t2v"}'
    path.write_text("")
    assert not write_root_config(tmp_path) and path.read_text() == ""


@pytest.mark.parametrize("config", ["{", '{"model_type": "omni_pipeline"}'])
def test_a_directory_that_holds_no_model_is_named(config: str, tmp_path: Path) -> None:
    """If a directory contains no model, the error names the directory, even if its config has a
    model type.
    """
    vllm_omni.register()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises((ValueError, OSError), match=str(tmp_path)):
        get_config(tmp_path, trust_remote_code=False)
