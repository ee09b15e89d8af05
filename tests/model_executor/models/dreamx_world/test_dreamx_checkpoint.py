# SPDX-License-Identifier: Apache-2.0
"""Tests of the layouts, configs and tensors of DreamX-World checkpoints, including the released
size and damaged files.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from dreamx_driver import latents_of, load_world
from safetensors.torch import load_file, save_file

from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.models.dreamx_world import hub
from vllm_omni.model_executor.models.dreamx_world.checkpoint import (
    LAYOUTS,
    find_layout,
    hf_config,
    is_checkpoint,
    transformer_shapes,
)
from vllm_omni.model_executor.models.dreamx_world.config import DreamXConfig
from vllm_omni.model_executor.models.dreamx_world.transformer import DreamXTransformer
from vllm_omni.model_executor.models.registry import detect_family


@pytest.fixture
def original(layouts: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the original layout."""
    return Path(shutil.copytree(layouts["original"], tmp_path / "world"))


def test_the_released_network_has_the_released_tensors() -> None:
    """The network, built at full size on the meta device, has exactly the released tensors."""
    config = DreamXConfig()
    shapes = transformer_shapes(config)
    assert len(shapes) == 1125
    assert sum(math.prod(shape) for shape in shapes.values()) == 5_283_110_592
    with torch.device("meta"):
        slots = checkpoint_slots(DreamXTransformer(config))
    assert {name: slot.shape for name, slot in slots.items()} == shapes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_found(layouts: dict[str, Path], layout: str) -> None:
    path = layouts[layout]
    assert detect_family(path).name == "dreamx_world"
    values = hf_config(path)
    assert json.loads(json.dumps(values)) == values
    config = DreamXConfig.from_checkpoint(values["dreamx_world"]["transformer"])
    assert config.camera_blocks == (0, 1, 3) and config.camera_dim == 16
    assert (config.window_frames, config.sink_frames) == (12, 3)
    assert find_layout(path).kind == layout
    hub.check_complete(path)


def test_sizes_come_from_the_tensors_without_a_config(tmp_path: Path) -> None:
    """The released directory has no config, so sizes are derived from the tensors on the assumption
    of 128 channels per head.
    """
    config = DreamXConfig(
        dim=256,
        ffn_dim=64,
        num_heads=2,
        num_layers=2,
        freq_dim=32,
        text_dim=32,
        camera_blocks=(1,),
        camera_compression=2,
    )
    tensors = {name: torch.zeros(shape) for name, shape in transformer_shapes(config).items()}
    save_file({f"model.{name}": t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    assert is_checkpoint(tmp_path)
    found = DreamXConfig.from_checkpoint(find_layout(tmp_path).transformer_config())
    assert found == config


def test_names_of_wrappers_are_understood(original: Path, layouts: dict[str, Path]) -> None:
    path = original / "model.safetensors"
    save_file({f"generator.model.{n}": t for n, t in load_file(path).items()}, path)
    chunks = [{"actions": [["w"]] * 3}]
    ours, theirs = (
        latents_of(load_world(each), chunks) for each in (original, layouts["original"])
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("change", ["missing", "unexpected", "misshapen", "non-finite"])
def test_a_damaged_transformer_is_refused(original: Path, change: str) -> None:
    path, name = original / "model.safetensors", "blocks.1.cam_self_attn.norm_q.weight"
    tensors = load_file(path)
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        tensors["blocks.2.cam_self_attn.norm_q.weight"] = tensors[name].clone()
    elif change == "misshapen":
        tensors[name] = torch.ones(8)
    else:
        tensors[name][0] = math.nan
    save_file(tensors, path)
    with pytest.raises(ValueError, match="NaN" if change == "non-finite" else change) as refused:
        load_world(original)
    assert "cam_self_attn.norm_q" in str(refused.value)


def test_another_transformer_is_no_checkpoint(original: Path) -> None:
    path = original / "model.safetensors"
    tensors = {n: t for n, t in load_file(path).items() if "cam_self_attn" not in n}
    save_file(tensors, path)
    (original / "config.json").unlink()
    assert not is_checkpoint(original)
    with pytest.raises(ValueError, match="holds no DreamX-World transformer"):
        find_layout(original)


def test_missing_components_are_named(original: Path) -> None:
    (original / "Wan2.2_VAE.pth").unlink()
    with pytest.raises(ValueError, match=r"lacks vae .*Wan2\.2_VAE\.pth.*download dreamx_world"):
        hub.check_complete(original)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("cam_method", "plucker", "this model implements"),
        ("attn_compress", 8, "must give 4 heads of a multiple of 4 channels"),
        ("cam_self_attn_layers", [4], "must be among 4 layers"),
        ("out_dim", 16, "must be equal"),
        ("swirl", 1, "unknown keys"),
    ],
)
def test_other_configs_are_refused(
    layouts: dict[str, Path], key: str, value: object, reason: str
) -> None:
    stated = json.loads((layouts["original"] / "config.json").read_text())
    with pytest.raises(ValueError, match=reason):
        DreamXConfig.from_checkpoint({**stated, key: value})
