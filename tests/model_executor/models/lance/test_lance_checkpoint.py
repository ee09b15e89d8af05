# SPDX-License-Identifier: Apache-2.0
"""Tests of finding a Lance checkpoint's components: repository root, sub-folders, missing
components, and the command line.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.checkpoint.hub import check_complete, hub_source
from vllm_omni.model_executor.models.lance.checkpoint import find_layout, hf_config, is_checkpoint
from vllm_omni.model_executor.models.lance.family import FAMILY
from vllm_omni.model_executor.models.registry import detect_family


@pytest.fixture(scope="module")
def repository(tiny_checkpoint: Callable[..., Path]) -> Path:
    return tiny_checkpoint("lance", "repository")


def test_root_and_folders_lead_to_the_same_checkpoint(repository: Path) -> None:
    """The path to the repository root or to the vision folder selects the image decoder. The path
    to a decoder's folder selects that decoder.
    """
    for path, decoder in (
        (repository, "Lance_3B"),
        (repository / "Lance_3B", "Lance_3B"),
        (repository / "Lance_3B_Video", "Lance_3B_Video"),
        (repository / "Qwen2.5-VL-ViT", "Lance_3B"),
    ):
        layout = find_layout(path)
        assert (layout.root, layout.decoder.name) == (repository, decoder)
        assert layout.vae is not None and layout.vision_weights is not None
        assert detect_family(path).name == "lance"
    assert hf_config(repository)["lance"]["max_latent_frames"] == 1
    assert hf_config(repository / "Lance_3B_Video")["lance"]["max_latent_frames"] == 5


def test_a_decoder_alone_in_its_folder_is_a_checkpoint(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository / "Lance_3B", tmp_path / "flat")
    shutil.copy(repository / "Wan2.2_VAE.pth", tmp_path / "flat")
    layout = find_layout(tmp_path / "flat")
    assert layout.decoder == layout.root == tmp_path / "flat"


@pytest.mark.parametrize(
    "lost", ["Wan2.2_VAE.pth", "Lance_3B/model.safetensors", "Lance_3B/tokenizer.json"]
)
def test_a_missing_part_is_named(repository: Path, tmp_path: Path, lost: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(repository, copy)
    (copy / lost).unlink()
    with pytest.raises(ValueError, match=Path(lost).name.split(".")[0]):
        check_complete("lance", copy)


def test_a_complete_checkpoint_passes_and_names_its_repository(repository: Path) -> None:
    check_complete("lance", repository)
    check_complete("lance", repository / "Lance_3B_Video")
    assert {part.repo for part in hub_source("lance").components} == {"bytedance-research/Lance"}
    assert round(hub_source("lance").gigabytes) == 31


def test_other_directories_are_not_detected(tmp_path: Path) -> None:
    assert not is_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not is_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no Lance decoder"):
        find_layout(tmp_path)


def test_a_config_of_another_network_is_refused(repository: Path, tmp_path: Path) -> None:
    shutil.copytree(repository, tmp_path / "copy")
    path = tmp_path / "copy" / "Lance_3B" / "llm_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "gelu"}))
    with pytest.raises(ValueError, match="hidden_act = 'gelu'"):
        hf_config(tmp_path / "copy")


def test_an_unknown_option_is_refused(repository: Path) -> None:
    assert FAMILY.check_options is not None
    with pytest.raises(ValueError, match=r"allowed keys: .*convention, max_image_pixels"):
        FAMILY.check_options(hf_config(repository), OmniConfig(model={"speed": 11}))


def test_capabilities_follow_the_checkpoint(repository: Path) -> None:
    assert FAMILY.capabilities is not None
    images = FAMILY.capabilities(hf_config(repository), OmniConfig())
    assert images.tasks == ("text_to_image", "image_edit")
    assert (images.height, images.width, images.max_pixels) == (768, 768, 1024 * 1024)
    videos = FAMILY.capabilities(hf_config(repository / "Lance_3B_Video"), OmniConfig())
    assert videos.makes_videos and (
        videos.num_frames,
        videos.max_num_frames,
        videos.frame_stride,
    ) == (17, 17, 4)
