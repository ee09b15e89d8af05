# SPDX-License-Identifier: Apache-2.0
"""Tests of CLIP's vision tower: hidden states, sizes read from its files, strict loading of both
layouts, and image cropping.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from vllm_omni.model_executor.models.wan.architecture import CLIP_VIT_H, clip_tokens
from vllm_omni.model_executor.models.wan.checkpoint.layout import WanComponents, find_components
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_image_encoder
from vllm_omni.model_executor.models.wan.images.files import cut_image, middle_box
from vllm_omni.model_executor.models.wan.images.image_encoder import ImageEncoder, clip_pixels
from vllm_omni.testing.tiny.wan import CLIP, write_diffusers_clip, write_original_clip


@pytest.fixture(scope="module", params=["original", "diffusers"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    (write_original_clip if request.param == "original" else write_diffusers_clip)(out, 0)
    return out


def layout(folder: Path | None) -> WanComponents:
    position = None if folder is None else find_components(folder)["image_encoder"]
    root = Path() if folder is None else folder
    return WanComponents(root, root, None, None, None, image_encoder=position)


def pixels(seed: int = 0) -> torch.Tensor:
    return torch.rand(1, 3, 32, 48, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def loaded(folder: Path) -> ImageEncoder:
    position = layout(folder).image_encoder
    assert position is not None
    encoder = ImageEncoder(CLIP, dtype=torch.float32)
    load_image_encoder(encoder, position)
    return encoder


def test_sizes_are_read_from_the_files(folder: Path) -> None:
    assert layout(folder).clip_config() == CLIP
    assert layout(None).clip_config() == CLIP_VIT_H
    assert (clip_tokens(CLIP), clip_tokens(CLIP_VIT_H)) == (5, 257)


def test_embeddings_are_the_hidden_states_before_the_last_layer(folder: Path) -> None:
    """Image embeddings are the hidden states before the last layer, without the final norm. The
    last layer is not built. Images of any size are stretched to the tower's square input.
    """
    encoder = loaded(folder)
    whole = CLIPVisionModel(CLIPVisionConfig(**CLIP)).eval()
    own: dict[str, Any] = dict(encoder.model.state_dict())
    assert not [name for name in own if name.startswith("encoder.layers.2.")]
    whole.load_state_dict(own, strict=False)
    with torch.no_grad():
        states = whole(
            pixel_values=clip_pixels(pixels(), 28), output_hidden_states=True
        ).hidden_states
    embeddings = encoder.encode(pixels())
    torch.testing.assert_close(embeddings, states[-2][0])
    assert embeddings.shape == (5, CLIP["hidden_size"])
    assert not torch.equal(encoder.encode(pixels(1)), embeddings)


def test_both_layouts_load_the_same_tower(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    write_original_clip(tmp_path / "a", 0)
    write_diffusers_clip(tmp_path / "b", 0)
    assert torch.equal(
        loaded(tmp_path / "a").encode(pixels()), loaded(tmp_path / "b").encode(pixels())
    )


QKV = "visual.transformer.1.attn.to_qkv.weight"


@pytest.mark.parametrize(
    ("damage", "change"),
    [
        ("missing", lambda tensors: tensors.pop(QKV)),
        ("unexpected", lambda tensors: tensors.update({"visual.surprise": torch.zeros(2)})),
        ("misshapen", lambda tensors: tensors.update({QKV: tensors[QKV][:-1]})),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: str, change: Any) -> None:
    write_original_clip(tmp_path, 0)
    path = layout(tmp_path).image_encoder
    assert path is not None
    tensors = torch.load(path, weights_only=True)
    change(tensors)
    torch.save(tensors, path)
    with pytest.raises(ValueError, match=damage):
        load_image_encoder(ImageEncoder(CLIP, dtype=torch.float32), path)


def test_a_file_without_a_tower_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    torch.save({"textual.norm.weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="it is not the file its name says"):
        layout(tmp_path).clip_config()


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((352, 640), (0, 0, 640, 352)),
        ((400, 640), (0, 24, 640, 376)),
        ((45, 61), (0, 6, 61, 39)),
        ((10, 90), (36, 0, 54, 10)),
    ],
)
def test_an_image_is_cropped_to_the_aspect_ratio_of_the_video(
    size: tuple[int, int], box: tuple[int, ...]
) -> None:
    image = torch.zeros(*size, 3, dtype=torch.uint8)
    assert middle_box(image, 352, 640) == box
    image[box[1] : box[3], box[0] : box[2]] = 255
    cut = cut_image(image, 88, 160)
    assert cut.shape == (1, 3, 1, 88, 160)
    assert float(cut.mean()) > 0.99
