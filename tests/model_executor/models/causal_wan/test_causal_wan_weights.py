# SPDX-License-Identifier: Apache-2.0
"""Causal Wan's weight tables contain every tensor for both model sizes and both naming styles, and
loading is strict.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from causal_wan_driver import load_model
from diffusers import WanTransformer3DModel
from helpers.golden import golden_folder

from vllm_omni.model_executor.checkpoint.hub import check_complete
from vllm_omni.model_executor.checkpoint.loading import rename, shapes_of
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.models.causal_wan.checkpoint.layout import (
    find_layout,
    hf_config,
)
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig
from vllm_omni.model_executor.models.causal_wan.transformer import CausalWanTransformer
from vllm_omni.model_executor.models.registry import detect_family, get_family
from vllm_omni.model_executor.models.wan.transformer.weights import (
    TRANSFORMER_RULES,
    transformer_shapes,
)
from vllm_omni.testing.tiny.wan import DIFFUSERS_NAMES

GOLDEN = golden_folder("wan_causal")
SIZES = {
    "1.3B": (CausalWanConfig(), 825, 1_418_996_800),
    "14B": (
        CausalWanConfig(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40),
        1095,
        14_288_491_584,
    ),
}
FAMILY = get_family("causal_wan")


@pytest.mark.parametrize("size", SIZES)
def test_full_size_models_match_the_table(size: str) -> None:
    config, num_tensors, num_parameters = SIZES[size]
    shapes = transformer_shapes(config)
    assert (len(shapes), sum(torch.Size(shape).numel() for shape in shapes.values())) == (
        num_tensors,
        num_parameters,
    )
    with torch.device("meta"):
        model = CausalWanTransformer(config)
    assert {name: slot.shape for name, slot in checkpoint_slots(model).items()} == shapes


@pytest.mark.parametrize("size", SIZES)
def test_diffusers_names_and_shapes_map_one_to_one(size: str) -> None:
    """For each size, the renamed tensors of diffusers' transformer are exactly the tensors in the
    weight table.
    """
    config, *_ = SIZES[size]
    with torch.device("meta"):
        theirs = WanTransformer3DModel(
            num_attention_heads=config.num_heads,
            ffn_dim=config.ffn_dim,
            num_layers=config.num_layers,
        )
    shapes = shapes_of(theirs)
    assert {
        rename(name, TRANSFORMER_RULES): shape for name, shape in shapes.items()
    } == transformer_shapes(config)
    assert {rename(name, DIFFUSERS_NAMES) for name in transformer_shapes(config)} == shapes.keys()


def test_the_recorded_names_match_the_table() -> None:
    recorded = json.loads((GOLDEN / "key_map_orig_to_diffusers.json").read_text())
    assert {theirs: rename(theirs, TRANSFORMER_RULES) for theirs in recorded.values()} == {
        theirs: ours for ours, theirs in recorded.items()
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for layout in FAMILY.layouts:
        folders[layout] = tmp_path_factory.mktemp(layout)
        FAMILY.make_tiny(folders[layout], 3, layout)
    return folders


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = load_model(folder)
    return {**dict(model.named_parameters())}


def test_every_layout_loads_the_same_model(checkpoints: dict[str, Path]) -> None:
    """Every layout loads the same model. Self-Forcing's file contains two networks, and the EMA
    network is loaded.
    """
    expected = weights(checkpoints["original"])
    for folder in checkpoints.values():
        assert detect_family(folder).name == "causal_wan"
        check_complete("causal_wan", folder)
        found = weights(folder)
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in expected
        )
    state = torch.load(
        checkpoints["original"] / "checkpoints" / "self_forcing_dmd.pt", weights_only=True
    )
    name = "blocks.1.ffn.0.weight"
    assert torch.equal(expected[f"transformer.{name}"], state["generator_ema"][f"model.{name}"])
    assert not torch.equal(expected[f"transformer.{name}"], state["generator"][f"model.{name}"])


def test_sizes_are_read_from_tensor_shapes_without_a_config(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").mkdir()
    config = {
        "dim": 256,
        "ffn_dim": 64,
        "freq_dim": 16,
        "text_dim": 4096,
        "num_heads": 2,
        "num_layers": 1,
    }
    tensors = {
        f"model.{name}": torch.zeros(shape)
        for name, shape in transformer_shapes(CausalWanConfig.from_checkpoint(config)).items()
    }
    torch.save({"generator_ema": tensors}, tmp_path / "checkpoints" / "self_forcing_dmd.pt")
    assert find_layout(tmp_path).transformer_config() == {**config, "in_dim": 16}
    assert hf_config(tmp_path)["num_hidden_layers"] == 1


def damage(folder: Path, target: Path, change: Any) -> Path:
    copy = Path(shutil.copytree(folder, target / "copy"))
    path = copy / "checkpoints" / "self_forcing_dmd.pt"
    state = torch.load(path, weights_only=True)
    change(state["generator_ema"])
    torch.save(state, path)
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.head.head.bias"), r"missing: 1 \(head\.head\.bias\)"),
        (
            lambda t: t.update({"model.img_emb.proj.0.weight": torch.zeros(2)}),
            r"unexpected: 1 \(img_emb",
        ),
        (
            lambda t: t.update({"model.head.head.bias": torch.zeros(3)}),
            r"misshapen: 1 \(head\.head\.bias \(3,\)",
        ),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_missing_unexpected_and_misshapen_tensors_are_refused(
    change: Any, message: str, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        check_complete("causal_wan", damage(checkpoints["original"], tmp_path, change))


def test_other_families_and_bidirectional_wan_are_not_detected(tmp_path: Path) -> None:
    get_family("lingbot_world").make_tiny(tmp_path / "lingbot", 0, "diffusers")
    assert detect_family(tmp_path / "lingbot").name == "lingbot_world"
    plain = tmp_path / "wan"
    (plain / "transformer").mkdir(parents=True)
    (plain / "transformer" / "config.json").write_text(
        json.dumps({"_class_name": "WanTransformer3DModel"})
    )
    (plain / "model_index.json").write_text(json.dumps({"_class_name": "WanPipeline"}))
    assert not FAMILY.detect(plain)
    (plain / "model_index.json").write_text(json.dumps({"_class_name": "WanCausalDMDPipeline"}))
    assert FAMILY.detect(plain)
