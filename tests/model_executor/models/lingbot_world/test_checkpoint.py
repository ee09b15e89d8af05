# SPDX-License-Identifier: Apache-2.0
"""Every released checkpoint layout of LingBot World is found, and one-line errors name missing
components.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import checkpoint_slots
from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout, find_layout
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.family import FAMILY
from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer
from vllm_omni.model_executor.models.lingbot_world.weights import (
    CAMERA_TENSOR,
    config_of_tensors,
    load_transformer,
    transformer_shapes,
)
from vllm_omni.model_executor.models.registry import detect_family, get_family
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_component_weights
from vllm_omni.model_executor.models.wan.text_encoder.encoder import TextEncoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    folders = {}
    for layout in FAMILY.layouts:
        folders[layout] = tmp_path_factory.mktemp(layout)
        FAMILY.make_tiny(folders[layout], 3, layout)
    return folders


@pytest.fixture
def checkpoints(originals, tmp_path) -> dict[str, Path]:
    """Return copies of the checkpoints. Tests may damage these copies."""
    return {
        name: Path(shutil.copytree(folder, tmp_path / name)) for name, folder in originals.items()
    }


def load(layout: CheckpointLayout) -> dict[str, torch.Tensor]:
    config = LingBotWorldConfig.from_checkpoint(layout.transformer_config())
    transformer = LingBotTransformer(config)
    vae = StreamingWanVAE(layout.vae_config())
    text_encoder = TextEncoder(layout.text_config(), layout.tokenizer, max_tokens=config.text_len)
    load_component_weights(
        layout, lambda: load_transformer(transformer, layout.transformer, config), vae, text_encoder
    )
    tensors = {name: slot.target for name, slot in checkpoint_slots(transformer).items()}
    tensors |= dict(vae.named_parameters(prefix="vae"))
    return tensors | dict(text_encoder.named_parameters(prefix="text"))


def test_all_layouts_load_the_same_model(originals):
    """Every layout loads the same tensors for its transformer, VAE and text encoder. The test
    excludes the layout without a config, whose heads have the released size, and the layouts with
    other controls.
    """
    same = [layout for layout in FAMILY.layouts if layout not in ("v2_1_3b", "act", "world")]
    loaded = [load(find_layout(originals[layout])) for layout in same]
    assert len(loaded) > 2
    for other in loaded[1:]:
        assert other.keys() == loaded[0].keys()
        assert all(torch.equal(tensor, loaded[0][name]) for name, tensor in other.items())


def test_an_unknown_layout_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match="allowed: original, diffusers, v2, v2_1_3b, v2_pretrain, act, world"
    ):
        FAMILY.make_tiny(tmp_path, 0, "gguf")


@pytest.mark.parametrize(
    ("layout", "kind", "version"),
    [
        ("original", "original", "v1"),
        ("diffusers", "diffusers", "v1"),
        ("v2", "original", "v2"),
        ("v2_1_3b", "original", "v2"),
        ("v2_pretrain", "original", "v2"),
        ("act", "original", "v1"),
    ],
)
def test_every_layout_is_detected_with_all_parts(originals, layout, kind, version):
    """`detect_family` recognises each layout's directory, and every component is found."""
    assert detect_family(originals[layout]) is get_family("lingbot_world_fast")
    found = find_layout(originals[layout])
    assert (found.kind, found.version) == (kind, version)
    found.require("transformer", "vae", "text_encoder", "tokenizer")


def test_both_folder_names_and_the_folder_itself_are_found(checkpoints):
    """The folder names `Lingbot-World-Fast` and `lingbot_world_fast` are equivalent. If the path
    names the folder itself, the components next to the folder are found.
    """
    folder = checkpoints["original"] / "lingbot_world_fast"
    other = folder.rename(folder.with_name("Lingbot-World-Fast"))
    assert find_layout(checkpoints["original"]).transformer == other
    direct = find_layout(other)
    assert direct.root == checkpoints["original"]
    direct.require("transformer", "vae", "text_encoder", "tokenizer")


@pytest.mark.parametrize(
    "config", [None, "{}", '{"_class_name": "WanModelFast"}', '{"eps": 1e-6, "num_heads": 2}']
)
def test_sizes_without_a_config_are_read_from_tensors(checkpoints, config):
    """The 1.3B release has no `config.json`. The width, the number of layers and the type of
    control are therefore derived from the file headers, and a head size of 128 is assumed.
    """
    if config is not None:
        (checkpoints["v2_1_3b"] / "config.json").write_text(config)
    read = LingBotWorldConfig.from_checkpoint(
        find_layout(checkpoints["v2_1_3b"]).transformer_config()
    )
    assert read == LingBotWorldConfig(
        dim=256, num_heads=2, num_layers=2, ffn_dim=112, freq_dim=32, text_dim=32
    )


def test_the_1_3b_has_the_published_size():
    """The 1.3B model has 1071 tensors with 1,709,502,016 parameters. The config derived from the
    tensor shapes equals the config that the shapes were computed from, with 12 heads.
    """
    config = LingBotWorldConfig(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30)
    shapes = transformer_shapes(config)
    assert len(shapes) == 1071
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 1_709_502_016
    assert LingBotWorldConfig.from_checkpoint(config_of_tensors(shapes, "somewhere")) == config


def test_the_error_for_an_unknown_number_of_heads_names_the_config_key(checkpoints):
    """If there is no config and the width is not a multiple of 128, as in a tiny model, the error
    names the config key to add. Adding that key resolves the error.
    """
    config = checkpoints["v2"] / "transformers" / "config.json"
    stated = json.loads(config.read_text())
    config.unlink()
    with pytest.raises(
        ValueError, match=r"width 64 is no multiple of 128.* add a config\.json with num_heads"
    ) as caught:
        find_layout(checkpoints["v2"]).transformer_config()
    assert "\n" not in str(caught.value)
    config.write_text(json.dumps({"num_heads": 4, "text_len": 64}))
    read = LingBotWorldConfig.from_checkpoint(find_layout(checkpoints["v2"]).transformer_config())
    assert replace(
        read, window_frames=18, sink_frames=6, frames_per_chunk=3
    ) == LingBotWorldConfig.from_checkpoint(stated)


def test_sizes_of_other_transformers_are_refused(tmp_path):
    """A set of tensors that contains no Wan transformer is rejected. A transformer with an unknown
    type of control is rejected too.
    """
    with pytest.raises(ValueError, match="somewhere holds no Wan transformer"):
        config_of_tensors({CAMERA_TENSOR: (64, 1536)}, "somewhere")
    shapes = transformer_shapes(LingBotWorldConfig(num_layers=1))
    with pytest.raises(ValueError, match=r"takes 512 inputs; known: 1536 \(cam\)"):
        config_of_tensors({**shapes, CAMERA_TENSOR: (5120, 512)}, "somewhere")


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
def test_a_transformer_in_one_file_may_be_next_to_components(checkpoints, stem):
    """A transformer in `model.safetensors` or `diffusion_pytorch_model.safetensors` is found at the
    root and in the `transformers` and `transformer` folders.
    """
    tensors = {}
    for shard in sorted(checkpoints["v2_1_3b"].glob("*.safetensors")):
        tensors |= load_file(shard)
    at_root = checkpoints["v2_1_3b"] / "assets"
    save_file(tensors, at_root / f"{stem}.safetensors")
    vae = torch.load(at_root / "Wan2.1_VAE.pth", weights_only=True)
    save_file(vae, at_root / "Wan2.1_VAE.safetensors")
    (at_root / "Wan2.1_VAE.pth").unlink()
    whole = load(find_layout(at_root))
    assert whole.keys() == load(find_layout(checkpoints["v2_1_3b"])).keys()
    for folder in ("transformers", "transformer"):
        (at_root / folder).mkdir()
        (at_root / f"{stem}.safetensors").rename(at_root / folder / f"{stem}.safetensors")
        found = find_layout(at_root)
        assert found.transformer == at_root / folder
        assert LingBotWorldConfig.from_checkpoint(found.transformer_config()).dim == 256
        (at_root / folder / f"{stem}.safetensors").rename(at_root / f"{stem}.safetensors")


def test_components_may_be_shared_by_a_link_named_assets(checkpoints, tmp_path):
    """Missing components are looked up in `assets`, but components in the directory itself take
    precedence.
    """
    bare = checkpoints["v2_1_3b"]
    shutil.rmtree(bare / "assets")
    with pytest.raises(
        ValueError,
        match=r"lacks vae, text_encoder.* below assets/.* download lingbot_world_v2_1_3b ",
    ):
        find_layout(bare).require("transformer", "vae", "text_encoder", "tokenizer")
    (bare / "assets").symlink_to(checkpoints["original"])
    found = find_layout(bare)
    found.require("transformer", "vae", "text_encoder", "tokenizer")
    assert found.vae == bare / "assets" / "Wan2.1_VAE.pth"
    assert load(found)
    shutil.copy(found.vae, bare / "Wan2.1_VAE.pth")
    assert find_layout(bare).vae == bare / "Wan2.1_VAE.pth"


def test_the_generation_of_a_bare_repository_follows_from_name_or_width(checkpoints):
    """The version (v1 or v2) is derived from the directory's name or from the model's width. The
    width is sufficient, because v1 was released in only one width.
    """
    bare = checkpoints["v2_1_3b"]
    for width, version in ((1536, "v2"), (5120, "v1")):
        (bare / "config.json").write_text(
            json.dumps({"_class_name": "WanModelFast", "dim": width, "num_layers": 30})
        )
        assert find_layout(bare).version == version
    assert find_layout(bare.rename(bare.with_name("lingbot_world_v2_14b"))).version == "v2"


def test_the_base_models_experts_are_not_detected_as_the_fast_model(checkpoints):
    """`high_noise_model/` has the same keys as the fast model but is neither distilled nor causal,
    so it is not detected.
    """
    folder = checkpoints["original"] / "lingbot_world_fast"
    expert = folder.rename(folder.with_name("high_noise_model"))
    assert not FAMILY.detect(checkpoints["original"])
    assert not FAMILY.detect(expert)


@pytest.mark.parametrize(
    "content", [{}, {"config.json": '{"model_type": "llama"}'}, {"config.json": "{"}]
)
def test_other_directories_are_not_detected(tmp_path, content):
    """Other directories are not detected. Detection never raises an exception, whatever a directory
    contains.
    """
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    assert not FAMILY.detect(tmp_path)
    assert not FAMILY.detect(tmp_path / "absent")
    with pytest.raises(ValueError, match="holds no LingBot World transformer"):
        find_layout(tmp_path) if content != {"config.json": "{"} else find_layout(
            tmp_path / "absent"
        )


@pytest.mark.parametrize(
    ("layout", "gone", "message"),
    [
        ("original", "Wan2.1_VAE.pth", r"lacks vae .*Wan2\.1_VAE\.pth.*vllm-omni download"),
        ("original", "models_t5_umt5-xxl-enc-bf16.pth", r"lacks text_encoder .*models_t5"),
        ("original", "google/umt5-xxl", r"lacks tokenizer .*google/umt5-xxl"),
        ("diffusers", "vae/diffusion_pytorch_model.safetensors", "lacks vae"),
        ("diffusers", "text_encoder/model.safetensors", "lacks text_encoder"),
        ("diffusers", "tokenizer", "lacks tokenizer"),
    ],
)
def test_a_missing_component_is_named_before_anything_is_read(checkpoints, layout, gone, message):
    """A one-line error names the missing component, the searched paths and the download command."""
    path = checkpoints[layout] / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = find_layout(checkpoints[layout])
    with pytest.raises(ValueError, match=message) as caught:
        found.require("transformer", "vae", "text_encoder", "tokenizer")
    assert "\n" not in str(caught.value)


def test_a_wrong_file_under_the_vaes_name_is_refused(checkpoints):
    """A wrong file that has the VAE's file name, for example the text encoder's file, is
    rejected.
    """
    shutil.copy(
        checkpoints["original"] / "models_t5_umt5-xxl-enc-bf16.pth",
        checkpoints["original"] / "Wan2.1_VAE.pth",
    )
    with pytest.raises(ValueError, match="not the file its name says"):
        find_layout(checkpoints["original"]).vae_config()


@pytest.mark.parametrize("layout", FAMILY.layouts)
def test_hf_config_is_plain_json_and_complete(originals, layout):
    """`hf_config` is plain JSON, which vLLM can send to workers, and contains everything needed to
    build the pipeline.
    """
    config = FAMILY.hf_config(originals[layout])
    assert json.loads(json.dumps(config)) == config
    assert config["architectures"] == [
        f"LingBot{'Pretrain' if layout == 'v2_pretrain' else 'World'}Pipeline"
    ]
    unstated = layout == "v2_1_3b"
    assert config["dtype"] == ("bfloat16" if unstated else "float32")
    sizes = (config["num_attention_heads"], config["num_hidden_layers"], config["hidden_size"])
    assert sizes == ((2, 2, 256) if unstated else (4, 4, 64))
    world = config["lingbot_world"]
    assert VAEConfig.from_dict(world["vae"]) == VAEConfig(base_dim=4)
    assert TextEncoder(world["umt5"], None).text_dim == 32
    assert LingBotWorldConfig.from_checkpoint(world["transformer"]).num_layers == sizes[1]


def test_hf_config_needs_no_weight_files(tmp_path):
    """For a directory that contains only a config (dummy weights), the released sizes and bfloat16
    are assumed.
    """
    (tmp_path / "lingbot_world_fast").mkdir()
    (tmp_path / "lingbot_world_fast" / "config.json").write_text('{"_class_name": "WanModelFast"}')
    assert FAMILY.detect(tmp_path)
    config = FAMILY.hf_config(tmp_path)
    assert config["dtype"] == "bfloat16"
    assert (config["num_attention_heads"], config["num_hidden_layers"], config["vocab_size"]) == (
        40,
        40,
        256384,
    )
    assert VAEConfig.from_dict(config["lingbot_world"]["vae"]) == VAEConfig()


def test_components_of_different_checkpoints_are_refused(checkpoints):
    """Components from different checkpoints, for example a text encoder with another width, are
    rejected when the server starts rather than at the first request.
    """
    path = checkpoints["original"] / "lingbot_world_fast" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "text_dim": 4096}))
    with pytest.raises(ValueError, match="gives rows of 32, the transformer takes 4096"):
        FAMILY.hf_config(checkpoints["original"])


def test_a_damaged_config_is_refused_by_file_name(checkpoints):
    """A checkpoint directory with a corrupt config is still recognised as LingBot World, and the
    error names the corrupt file.
    """
    (checkpoints["original"] / "lingbot_world_fast" / "config.json").write_text("{")
    assert FAMILY.detect(checkpoints["original"])
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        FAMILY.hf_config(checkpoints["original"])


@pytest.mark.parametrize(
    ("omni", "message"),
    [
        ({"model": {"windw_frames": 5}}, "windw_frames"),
        ({"model": {"window_frames": 4}}, "leaves no room"),
        ({"height": 470}, "multiples of 16"),
    ],
)
def test_options_that_contradict_the_checkpoint_are_refused_at_start(originals, omni, message):
    """Options that contradict the checkpoint are rejected before any process starts."""
    assert FAMILY.check_options is not None
    config = FAMILY.hf_config(originals["original"])
    FAMILY.check_options(config, OmniConfig())
    with pytest.raises(ValueError, match=message):
        FAMILY.check_options(config, OmniConfig.from_additional_config({"omni": omni}))
