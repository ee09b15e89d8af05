# SPDX-License-Identifier: Apache-2.0
"""Weight names of LingBot World checkpoints, as tables, and their strict loading.

Every component is compared with its full list of names and shapes before any data is read: missing, unexpected and
misshapen tensors raise. Then only the tensors (and parts of tensors) that this rank holds are read, one at a time.
Knows nothing of folders; `checkpoint.py` finds the files, `tensor_files.py` reads them.
Held by tests/model_executor/models/lingbot_world/test_weights.py.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm_omni.model_executor.layers.parallel import checkpoint_slots
from vllm_omni.model_executor.models.lingbot_world.config import LingBotWorldConfig
from vllm_omni.model_executor.tensor_files import Shape, TensorSource, open_tensors

if TYPE_CHECKING:
    from vllm_omni.model_executor.models.lingbot_world.checkpoint import CheckpointLayout
    from vllm_omni.model_executor.models.wan.text_encoder import TextEncoder
    from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE

Rules = Sequence[tuple[str, str]]
"""(regular expression, replacement), applied in order."""

VAE_RULES: Rules = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"\.middle\.0\.", ".mid_block.resnets.0."),
    (r"\.middle\.1\.", ".mid_block.attentions.0."),
    (r"\.middle\.2\.", ".mid_block.resnets.1."),
    (r"\.downsamples\.(\d+)\.", r".down_blocks.\1."),
    # The decoder's flat list is three residual blocks and an up-sampler for each level.
    *(
        (rf"\.upsamples\.{4 * level + block}\.", f".up_blocks.{level}.resnets.{block}.")
        for level in range(4)
        for block in range(3)
    ),
    *((rf"\.upsamples\.{4 * level + 3}\.", f".up_blocks.{level}.upsamplers.0.") for level in range(3)),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)
"""Wan's own VAE names -> diffusers `AutoencoderKLWan`. Names that are diffusers' already pass unchanged."""

TEXT_RULES: Rules = (
    (r"^encoder\.embed_tokens\.", "shared."),
    (r"^token_embedding\.", "shared."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (r"^blocks\.(\d+)\.norm1\.", r"encoder.block.\1.layer.0.layer_norm."),
    (r"^blocks\.(\d+)\.norm2\.", r"encoder.block.\1.layer.1.layer_norm."),
    (r"^blocks\.(\d+)\.attn\.", r"encoder.block.\1.layer.0.SelfAttention."),
    (r"^blocks\.(\d+)\.pos_embedding\.embedding\.", r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias."),
    (r"^blocks\.(\d+)\.ffn\.gate\.0\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_0."),
    (r"^blocks\.(\d+)\.ffn\.fc1\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_1."),
    (r"^blocks\.(\d+)\.ffn\.fc2\.", r"encoder.block.\1.layer.1.DenseReluDense.wo."),
)
"""Wan's own umt5-xxl names -> transformers `UMT5EncoderModel`. Names that are transformers' already pass unchanged."""

TRANSFORMER_TENSORS = {
    "patch_embedding.weight": ("D", "I", 1, 2, 2),
    "patch_embedding.bias": ("D",),
    "patch_embedding_wancamctrl.weight": ("D", "C"),
    "patch_embedding_wancamctrl.bias": ("D",),
    "c2ws_hidden_states_layer1.weight": ("D", "D"),
    "c2ws_hidden_states_layer1.bias": ("D",),
    "c2ws_hidden_states_layer2.weight": ("D", "D"),
    "c2ws_hidden_states_layer2.bias": ("D",),
    "text_embedding.0.weight": ("D", "X"),
    "text_embedding.0.bias": ("D",),
    "text_embedding.2.weight": ("D", "D"),
    "text_embedding.2.bias": ("D",),
    "time_embedding.0.weight": ("D", "Q"),
    "time_embedding.0.bias": ("D",),
    "time_embedding.2.weight": ("D", "D"),
    "time_embedding.2.bias": ("D",),
    "time_projection.1.weight": ("6D", "D"),
    "time_projection.1.bias": ("6D",),
    "head.modulation": (1, 2, "D"),
    "head.head.weight": ("O", "D"),
    "head.head.bias": ("O",),
}
"""The transformer's tensors outside its blocks. D width, I input channels, C folded camera channels, X text width,
Q time frequencies, O output channels of one 2x2 patch."""

BLOCK_TENSORS = {
    "modulation": (1, 6, "D"),
    **{
        f"{attention}.{layer}.{kind}": ("D", "D") if kind == "weight" else ("D",)
        for attention in ("self_attn", "cross_attn")
        for layer in ("q", "k", "v", "o")
        for kind in ("weight", "bias")
    },
    **{f"{attention}.norm_{qk}.weight": ("D",) for attention in ("self_attn", "cross_attn") for qk in ("q", "k")},
    "norm3.weight": ("D",),
    "norm3.bias": ("D",),
    "ffn.0.weight": ("F", "D"),
    "ffn.0.bias": ("F",),
    "ffn.2.weight": ("D", "F"),
    "ffn.2.bias": ("D",),
    **{
        f"{layer}.{kind}": ("D", "D") if kind == "weight" else ("D",)
        for layer in ("cam_injector_layer1", "cam_injector_layer2", "cam_scale_layer", "cam_shift_layer")
        for kind in ("weight", "bias")
    },
}
"""The tensors of each block, named `blocks.N.<name>`. F width of the feed-forward layer."""


def transformer_shapes(config: LingBotWorldConfig) -> dict[str, Shape]:
    """Return name -> shape of every transformer tensor a checkpoint of this architecture holds (1421 when released)."""
    patch = config.patch_size[1] * config.patch_size[2]
    sizes: dict[int | str, int] = {
        "D": config.dim,
        "6D": 6 * config.dim,
        "F": config.ffn_dim,
        "I": config.in_channels,
        "C": config.camera_channels * patch,
        "X": config.text_dim,
        "Q": config.freq_dim,
        "O": config.out_channels * patch,
    }
    tensors = dict(TRANSFORMER_TENSORS)
    for block in range(config.num_layers):
        tensors |= {f"blocks.{block}.{name}": shape for name, shape in BLOCK_TENSORS.items()}
    return {
        name: tuple(sizes[size] if isinstance(size, str) else size for size in shape) for name, shape in tensors.items()
    }


def rename(name: str, rules: Rules) -> str:
    """Apply every rule to `name`, in order."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def load_strict(
    module: nn.Module,
    source: TensorSource,
    expected: Mapping[str, Shape],
    rules: Rules = (),
    *,
    what: str,
    ignored: Collection[str] = (),
) -> None:
    """Fill every parameter of `module` from `source`; nothing may be left over, on either side.

    expected: name -> shape of the whole component, of which `module` may hold a part (a pipeline stage, a tensor
    parallel slice, one half of a VAE). rules: stored names -> names in `expected`. what: the component, for errors.
    ignored: stored names to leave out.
    Raises ValueError with counts and examples for missing, unexpected, misshapen, repeated and non-finite tensors.
    """
    stored: dict[str, str] = {}
    for name in source.shapes:
        if name in ignored:
            continue
        target = rename(name, rules)
        if target in stored:
            raise ValueError(f"{what}: {source.where} holds {target!r} twice, as {stored[target]!r} and {name!r}")
        stored[target] = name
    check_shapes({target: source.shapes[name] for target, name in stored.items()}, expected, f"{what}: {source.where}")

    slots = {rename(name, rules): slot for name, slot in checkpoint_slots(module).items()}  # tied names become one
    assert slots.keys() <= expected.keys(), f"{what}: the model has parameters that its own list of names lacks"
    targets = {stored[target]: target for target in slots}
    unfilled, non_finite = set(slots), []
    for name, tensor in source.read(targets):
        slot = slots[targets[name]]
        slot.load(tensor)
        unfilled.remove(targets[name])
        if not bool(torch.isfinite(slot.target).all()):
            non_finite.append(name)
    if non_finite:
        raise ValueError(f"{what}: {source.where} has NaN or Inf in {_some(non_finite)}; download it again")
    assert not unfilled, f"{what}: {_some(sorted(unfilled))} left unfilled"


def check_shapes(found: Mapping[str, Shape], expected: Mapping[str, Shape], where: str) -> None:
    """Raise ValueError with counts and three examples of each kind unless both maps are equal."""
    problems = {
        "missing": [name for name in expected if name not in found],
        "unexpected": [name for name in found if name not in expected],
        "misshapen": [
            f"{name} {tuple(found[name])} instead of {shape}"
            for name, shape in expected.items()
            if name in found and tuple(found[name]) != shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{kind}: {_some(names)}" for kind, names in problems.items() if names)
        raise ValueError(f"{where} does not fit this model ({len(expected)} tensors expected): {listed}")


def load_pipeline_weights(
    layout: "CheckpointLayout",
    config: LingBotWorldConfig,
    transformer: nn.Module,
    vae: "StreamingWanVAE | None" = None,
    text_encoder: "TextEncoder | None" = None,
) -> None:
    """Fill every component this rank has (None = not here); a missing piece is reported before anything is read."""
    if text_encoder is not None:
        layout.require("text_encoder", "tokenizer")
    if vae is not None:
        layout.require("vae")
    layout.require("transformer")
    load_transformer(transformer, layout.transformer, config)
    if vae is not None and layout.vae is not None:
        load_vae(vae, layout.vae)
    if text_encoder is not None and layout.text_encoder is not None:
        load_text_encoder(text_encoder.model, layout.text_encoder)
        text_encoder.forget()


def load_transformer(transformer: nn.Module, path: Path, config: LingBotWorldConfig) -> None:
    """Load the transformer, or the stage and slice of it that `transformer` is, from a folder of safetensors."""
    load_strict(transformer, open_tensors(path), transformer_shapes(config), what="transformer")


def load_text_encoder(model: nn.Module, path: Path) -> None:
    """Load transformers' `UMT5EncoderModel` from Wan's `.pth` or from a transformers folder."""
    source = open_tensors(path)
    tied = "encoder.embed_tokens.weight"  # the same matrix as shared.weight; some exports hold it twice
    ignored = [tied] if {tied, "shared.weight"} <= source.shapes.keys() else []
    load_strict(model, source, shapes_of(model), TEXT_RULES, what="text encoder", ignored=ignored)


def load_vae(vae: "StreamingWanVAE", path: Path) -> None:
    """Load a VAE, or the half of it that `vae` is, from Wan's `.pth` or from a diffusers folder."""
    from vllm_omni.model_executor.models.wan.vae import StreamingWanVAE

    with torch.device("meta"):
        whole = StreamingWanVAE(vae.config)
    load_strict(vae, open_tensors(path), shapes_of(whole), VAE_RULES, what="VAE")


def shapes_of(module: nn.Module) -> dict[str, Shape]:
    """Return name -> shape of a module's parameters (tied ones once)."""
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _some(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
