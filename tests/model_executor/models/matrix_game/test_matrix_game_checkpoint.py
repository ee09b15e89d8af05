# SPDX-License-Identifier: Apache-2.0
"""Every released Matrix-Game layout is found and loaded. The tests cover variants identified by
their tensors, stale configs, prefixes and missing components.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix_game_driver import latents_of, load_game
from safetensors.torch import load_file, save_file

from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.models.matrix_game import hub
from vllm_omni.model_executor.models.matrix_game.checkpoint import (
    FOLDERS,
    LAYOUTS,
    find_layout,
    hf_config,
    is_checkpoint,
    transformer_shapes,
)
from vllm_omni.model_executor.models.matrix_game.config import MatrixGameConfig
from vllm_omni.model_executor.models.matrix_game.transformer import MatrixGameTransformer
from vllm_omni.model_executor.models.registry import detect_family, get_family

RELEASED: dict[str, tuple[dict[str, Any], int, int]] = {
    "universal": ({}, 1114, 1_619_242_304),
    "gta_drive": ({"keyboard_dim": 2}, 1114, 1_619_238_464),
    "templerun": ({"keyboard_dim": 7, "mouse_dim": 0}, 964, 1_508_715_584),
}


@pytest.fixture
def universal(layouts: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the tiny universal model in the original layout."""
    return Path(shutil.copytree(layouts["original"], tmp_path / "game"))


@pytest.mark.parametrize("name", list(RELEASED))
def test_the_released_network_has_the_released_tensors(name: str) -> None:
    """The network, built at full size on the meta device, has exactly the checkpoint's parameters,
    apart from norm gains that the checkpoint contains but the network does not use.
    """
    changes, tensors, parameters = RELEASED[name]
    config = MatrixGameConfig(**changes)
    assert config.variant.name == name
    shapes = transformer_shapes(config)
    assert (len(shapes), sum(math.prod(shape) for shape in shapes.values())) == (
        tensors,
        parameters,
    )
    with torch.device("meta"):
        slots = checkpoint_slots(MatrixGameTransformer(config))
    unused = {
        name for name in shapes if name.endswith(("attn_q_norm.weight", "attn_k_norm.weight"))
    }
    assert {name: slot.shape for name, slot in slots.items()} == {
        n: s for n, s in shapes.items() if n not in unused
    }
    assert len(unused) == (30 if name == "templerun" else 60)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_found_with_its_variant(layouts: dict[str, Path], layout: str) -> None:
    path = layouts[layout]
    assert detect_family(path).name == "matrix_game"
    values = hf_config(path)
    config = MatrixGameConfig.from_checkpoint(values["matrix_game"]["transformer"])
    variant = {"": "universal", "gta": "gta_drive", "templerun": "templerun"}[
        layout.partition("_")[2]
    ]
    assert config.variant.name == variant
    assert json.loads(json.dumps(values)) == values
    assert find_layout(path).kind == layout.partition("_")[0]
    served = load_game(path)
    assert served.plan.window_frames == {"universal": 6, "gta_drive": 4, "templerun": 6}[variant]
    assert served.schedule.num_steps == (4 if variant == "templerun" else 3)


@pytest.mark.parametrize("variant", ["", "_gta", "_templerun"])
def test_both_layouts_hold_the_same_model(layouts: dict[str, Path], variant: str) -> None:
    ours, theirs = (
        latents_of(load_game(layouts[f"{kind}{variant}"]), [{}] * 2)
        for kind in ("original", "diffusers")
    )
    assert torch.equal(ours, theirs)


def test_names_without_the_prefix_are_accepted(layouts: dict[str, Path], universal: Path) -> None:
    path = universal / "base_distilled_model" / "base_distill.safetensors"
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path
    )
    assert torch.equal(
        latents_of(load_game(universal), [{}]), latents_of(load_game(layouts["original"]), [{}])
    )


def test_tensors_take_precedence_over_a_stale_config(universal: Path) -> None:
    """The stale config in this test states a wrong keyboard size, a wrong depth and no window. The
    sizes are read from the tensors instead, and the variant determines the window.
    """
    path = universal / "base_distilled_model" / "config.json"
    stale = json.loads(path.read_text())
    stale["action_config"] |= {"keyboard_dim_in": 6, "blocks": list(range(4))}
    path.write_text(json.dumps(stale | {"num_layers": 30, "local_attn_size": -1}))
    game = load_game(universal)
    assert (game.config.keyboard_dim, game.config.num_layers, game.config.action_blocks) == (
        4,
        4,
        (0, 1),
    )
    assert game.plan.window_frames == 6


def test_a_folder_selects_one_of_several_transformers(
    layouts: dict[str, Path], universal: Path
) -> None:
    """In a repository with several transformers, the path to a transformer's folder selects the
    model.
    """
    folder = "gta_distilled_model"
    shutil.copytree(layouts["original_gta"] / folder, universal / folder)
    assert detect_family(universal).name == "matrix_game"
    with pytest.raises(ValueError, match=r"several transformers.*pass the folder"):
        find_layout(universal)
    layout = find_layout(universal / folder)
    assert layout.root == universal
    assert layout.release() == "matrix_game_gta_drive"
    assert load_game(universal / folder).config.variant.name == "gta_drive"


def test_other_models_are_not_detected(
    lingbot_world: Path, causal_wan: Path, universal: Path, tmp_path: Path
) -> None:
    assert not is_checkpoint(lingbot_world)
    assert not is_checkpoint(causal_wan)
    assert not is_checkpoint(tmp_path / "nothing")
    # `base_model` is the foundation model, which no released code can stream.
    (universal / "base_distilled_model").rename(universal / "base_model")
    assert not is_checkpoint(universal)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "t2v"}, "model_type"),
        ({"qk_norm": False}, "qk_norm"),
        ({"surprise": 1}, "unknown keys"),
        ({"action_config": {"keyboard_dim_in": 6}}, "6 keys; the released"),
        ({"action_config": {"keyboard_dim_in": 7}}, "templerun with 2 mouse values"),
        ({"action_config": {"enable_mouse": False}}, "universal with 0 mouse values"),
        ({"action_config": {"qk_norm": False}}, "action_config has qk_norm"),
        ({"action_config": {"surprise": 1}}, "action_config has unknown keys"),
        ({"action_config": {"heads_num": 3}}, "over 3 heads"),
        ({"action_config": {"blocks": [30]}}, "must be among 30 layers"),
    ],
)
def test_unsupported_architectures_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        MatrixGameConfig.from_checkpoint(changes)


def test_an_image_encoder_of_another_width_is_refused(
    universal: Path, layouts: dict[str, Path]
) -> None:
    name = "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
    tensors = torch.load(universal / name, weights_only=True)
    tensors["visual.patch_embedding.weight"] = torch.zeros(160, 3, 14, 14)
    torch.save(tensors, universal / name)
    with pytest.raises(
        ValueError, match="image encoder gives 5 rows of 160, the transformer takes 5 of 80"
    ):
        hf_config(universal)


@pytest.mark.parametrize(
    "part", ["Wan2.1_VAE.pth", "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"]
)
def test_a_missing_part_is_named_with_the_command_that_fetches_it(
    universal: Path, part: str
) -> None:
    hub.check_complete(universal)
    (universal / part).unlink()
    with pytest.raises(ValueError, match=f"lacks .*{part}.*vllm-omni download matrix_game "):
        hub.check_complete(universal)


def test_downloads_name_every_release() -> None:
    from vllm_omni.model_executor.checkpoint.hub import hub_source

    folders = set()
    for name in ("matrix_game", "matrix_game_gta_drive", "matrix_game_templerun"):
        assert get_family(name).name == "matrix_game"
        source = hub_source("matrix_game", name)
        folders |= {
            pattern.split("/")[0]
            for part in source.components
            for pattern in part.patterns
            if "/" in pattern
        }
        assert source.complete(Path("nowhere")) == []
    assert folders == set(FOLDERS)
