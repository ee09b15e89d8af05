# SPDX-License-Identifier: Apache-2.0
"""Tests of weight names and strict loading. The name tables contain every tensor in the released
checkpoints.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers.golden import golden_folder
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from vllm_omni.model_executor.checkpoint.loading import load_strict, rename, shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import open_tensors
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext, checkpoint_slots
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.models.lingbot_world.transformer import LingBotTransformer
from vllm_omni.model_executor.models.lingbot_world.weights import (
    load_transformer,
    transformer_shapes,
)
from vllm_omni.model_executor.models.wan.checkpoint.component_names import TEXT_RULES, VAE_RULES
from vllm_omni.model_executor.models.wan.checkpoint.loading import load_vae
from vllm_omni.model_executor.models.wan.text_encoder.encoder import load_text_encoder
from vllm_omni.model_executor.models.wan.vae.vae import StreamingWanVAE, VAEConfig

GOLDEN = golden_folder("lingbot")


def tiny_config() -> LingBotWorldConfig:
    from safetensors import safe_open

    with safe_open(GOLDEN / "dit_tiny_weights.safetensors", "pt") as file:
        return LingBotWorldConfig.from_checkpoint(json.loads(file.metadata()["cfg"]))


def tiny_text_config() -> UMT5Config:
    return UMT5Config(vocab_size=48, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)


def wan_text_names(num_layers: int) -> dict[str, str]:
    """Return the name that Transformers uses for each tensor in Wan's text encoder, written out by
    hand.
    """
    names = {
        "token_embedding.weight": "shared.weight",
        "norm.weight": "encoder.final_layer_norm.weight",
    }
    for i in range(num_layers):
        block = f"encoder.block.{i}.layer"
        names |= {
            f"blocks.{i}.norm1.weight": f"{block}.0.layer_norm.weight",
            f"blocks.{i}.norm2.weight": f"{block}.1.layer_norm.weight",
            f"blocks.{i}.pos_embedding."
            "embedding.weight": f"{block}.0.SelfAttention.relative_attention_bias.weight",
            f"blocks.{i}.ffn.gate.0.weight": f"{block}.1.DenseReluDense.wi_0.weight",
            f"blocks.{i}.ffn.fc1.weight": f"{block}.1.DenseReluDense.wi_1.weight",
            f"blocks.{i}.ffn.fc2.weight": f"{block}.1.DenseReluDense.wo.weight",
            **{
                f"blocks.{i}.attn.{p}.weight": f"{block}.0.SelfAttention.{p}.weight" for p in "qkvo"
            },
        }
    return names


def test_vae_rules_map_all_194_names_of_the_original():
    """Each of the 194 original VAE tensor names maps to its verified diffusers name."""
    recorded = json.loads((GOLDEN / "vae_key_map.json").read_text())
    assert len(recorded) == 194
    assert {name: rename(name, VAE_RULES) for name in recorded} == recorded


def test_rules_keep_library_names():
    """Renaming does not change names that diffusers and Transformers use, so both layouts load in
    the same way.
    """
    recorded = json.loads((GOLDEN / "vae_key_map.json").read_text())
    assert [rename(name, VAE_RULES) for name in recorded.values()] == list(recorded.values())
    text = list(wan_text_names(2).values())
    assert [rename(name, TEXT_RULES) for name in text] == text


def test_the_full_size_text_encoder_matches_wans_names():
    """The full-size text encoder, umt5-xxl, has 242 tensors with 5,680,910,336 parameters, and
    Wan's names map to these tensors one to one.
    """
    with torch.device("meta"):
        model = UMT5EncoderModel(
            UMT5Config(
                vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64
            )
        )
    shapes = shapes_of(model)
    assert len(shapes) == 242
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 5_680_910_336
    names = wan_text_names(24)
    assert {rename(name, TEXT_RULES) for name in names} == shapes.keys()
    assert all(rename(name, TEXT_RULES) == target for name, target in names.items())


def test_the_full_size_transformer_table_has_the_published_sizes():
    """The full-size transformer has 1421 tensors with 18,544,332,864 parameters. Each block has
    456,272,384 parameters.
    """
    shapes = transformer_shapes(LingBotWorldConfig())
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    assert len(sizes) == 1421
    assert sum(sizes.values()) == 18_544_332_864
    assert sum(size for name, size in sizes.items() if name.startswith("blocks.7.")) == 456_272_384
    assert (
        sum(size for name, size in sizes.items() if not name.startswith("blocks.")) == 293_437_504
    )
    assert (
        sum(size for name, size in sizes.items() if re.search(r"cam|c2ws", name)) == 4_255_431_680
    )


def test_the_full_size_transformer_matches_the_table():
    """The full-size transformer, built on the meta device, has exactly the tensors listed in the
    table.
    """
    with torch.device("meta"):
        model = LingBotTransformer(LingBotWorldConfig(), ParallelContext())
    assert {
        name: slot.shape for name, slot in checkpoint_slots(model).items()
    } == transformer_shapes(LingBotWorldConfig())


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_pipeline_stages_together_load_every_tensor(num_stages):
    """Every tensor is loaded by at least one pipeline stage, with its full shape."""
    config = LingBotWorldConfig()
    taken: dict[str, tuple[int, ...]] = {}
    for stage in range(num_stages):
        with torch.device("meta"):
            model = LingBotTransformer(config, ParallelContext(stage=stage, num_stages=num_stages))
        taken |= {name: slot.shape for name, slot in checkpoint_slots(model).items()}
    assert taken == transformer_shapes(config)


def test_a_transformer_loads_from_several_files(tmp_path):
    """If there is no index, all weight files in the folder are read."""
    stored = load_file(GOLDEN / "dit_tiny_weights.safetensors")
    names = sorted(stored)
    save_file({name: stored[name] for name in names[:40]}, tmp_path / "a.safetensors")
    save_file({name: stored[name] for name in names[40:]}, tmp_path / "b.safetensors")
    model = LingBotTransformer(tiny_config(), ParallelContext())
    load_transformer(model, tmp_path, tiny_config())
    for name, slot in checkpoint_slots(model).items():
        assert torch.equal(slot.target, stored[name]), name


def test_a_vae_and_each_half_load_from_wans_pth(tmp_path):
    """The whole VAE and each of its halves load the same values from Wan's `.pth` file."""
    stored = load_file(GOLDEN / "vae_tiny_weights_orig_names.safetensors")
    torch.save(stored, tmp_path / "Wan2.1_VAE.pth")
    whole = StreamingWanVAE(VAEConfig(base_dim=4))
    load_vae(whole, tmp_path / "Wan2.1_VAE.pth")
    half = StreamingWanVAE(VAEConfig(base_dim=4), encoder=False)
    load_vae(half, tmp_path / "Wan2.1_VAE.pth")
    assert torch.equal(whole.quant_conv.weight, stored["conv1.weight"].float())
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))


def test_a_text_encoder_loads_from_both_layouts(tmp_path):
    """A text encoder loads the same weights from a `.pth` file with Wan's names as from safetensors
    files with Transformers' names.
    """
    reference = UMT5EncoderModel(tiny_text_config())
    tensors = dict(reference.named_parameters())
    torch.save(
        {wan: tensors[hf].detach() for wan, hf in wan_text_names(2).items()}, tmp_path / "t5.pth"
    )
    reference.save_pretrained(tmp_path / "text_encoder")
    for path in (tmp_path / "t5.pth", tmp_path / "text_encoder"):
        model = UMT5EncoderModel(tiny_text_config())
        load_text_encoder(model, path)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, tensors[name]), name


def test_a_tied_embedding_stored_twice_is_loaded_once(tmp_path):
    """Exports that store the embedding as `shared`, as `encoder.embed_tokens`, or as both can be
    loaded.
    """
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in UMT5EncoderModel(tiny_text_config()).named_parameters()
    }
    for stored_names in (
        ("shared.weight", "encoder.embed_tokens.weight"),
        ("encoder.embed_tokens.weight",),
    ):
        stored = {name: tensor for name, tensor in tensors.items() if name != "shared.weight"}
        stored |= {name: tensors["shared.weight"].clone() for name in stored_names}
        save_file(stored, tmp_path / "model.safetensors")
        model = UMT5EncoderModel(tiny_text_config())
        load_text_encoder(model, tmp_path)
        assert torch.equal(model.encoder.embed_tokens.weight, tensors["shared.weight"])


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 1)


def stored_two_layers(tmp_path: Path, change) -> Path:
    tensors = {name: tensor.clone() for name, tensor in TwoLayers().state_dict().items()}
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("first.bias"), r"missing: 1 \(first\.bias\)$"),
        (lambda t: t.update(third=torch.zeros(1)), r"unexpected: 1 \(third\)$"),
        (
            lambda t: t.update({"first.bias": torch.zeros(4)}),
            r"misshapen: 1 \(first\.bias \(4,\) instead of \(3,\)\)$",
        ),
        (
            lambda t: t.clear() or t.update(x=torch.zeros(1)),
            r"missing: 4 \(first.*, \.\.\.\); unexpected: 1 \(x\)$",
        ),
        (lambda t: t["second.weight"].fill_(float("nan")), r"NaN or Inf in 1 \(second\.weight\)"),
        (lambda t: t["second.weight"].fill_(float("-inf")), r"NaN or Inf in 1 \(second\.weight\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_counts_and_examples(tmp_path, change, message):
    """Missing, unexpected, misshapen and non-finite tensors are rejected with an error that states
    their number and up to three examples.
    """
    source = open_tensors(stored_two_layers(tmp_path, change))
    module = TwoLayers()
    with pytest.raises(ValueError, match=message) as caught:
        load_strict(module, source, shapes_of(module), what="test")
    assert "\n" not in str(caught.value)


def test_two_names_for_one_parameter_are_refused(tmp_path):
    """Two names for one parameter are rejected, because the result would depend on which of them is
    read first.
    """
    source = open_tensors(stored_two_layers(tmp_path, lambda t: t.update(bias=torch.zeros(3))))
    module = TwoLayers()
    with pytest.raises(ValueError, match=r"holds 'first\.bias' twice"):
        load_strict(module, source, shapes_of(module), ((r"^bias$", "first.bias"),), what="test")


def test_no_parameter_changes_when_shapes_do_not_fit(tmp_path):
    """If shapes do not fit, no parameter changes, because all shapes are checked before any
    parameter is written.
    """
    source = open_tensors(stored_two_layers(tmp_path, lambda t: t.pop("second.bias")))
    module = TwoLayers()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match="missing"):
        load_strict(module, source, shapes_of(module), what="test")
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
