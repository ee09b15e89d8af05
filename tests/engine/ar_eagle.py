# SPDX-License-Identifier: Apache-2.0
"""A random EAGLE-3 drafter for a tiny language model, in the published layout."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

BLOCKS = 8
"""Number of decoder blocks of the target model. With eight blocks, a drafter reads three different
layers.
"""
DRAFTER_LAYERS = (2, 4, 5)
"""Layers whose hidden states vLLM's Qwen2 with eight blocks sends to an EAGLE-3 drafter."""


def write_eagle3_drafter(model: Path, out: Path) -> Path:
    """Write a random EAGLE-3 drafter for `model` to `out`.

    The drafter has one block, which reads the token embeddings and the hidden states of three
    layers of `model`. It has its own head and shares the embedding table of `model`.
    """
    target = json.loads((model / "config.json").read_text())
    width, inner = target["hidden_size"], target["intermediate_size"]
    heads, kv_heads = target["num_attention_heads"], target["num_key_value_heads"]
    head = width // heads
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "num_hidden_layers": 1,
        "max_position_embeddings": target["max_position_embeddings"],
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": target["vocab_size"],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": target["dtype"],
    }
    shapes = {
        "fc": (width, len(DRAFTER_LAYERS) * width),
        "lm_head": (target["vocab_size"], width),
        "midlayer.self_attn.q_proj": (heads * head, 2 * width),
        "midlayer.self_attn.k_proj": (kv_heads * head, 2 * width),
        "midlayer.self_attn.v_proj": (kv_heads * head, 2 * width),
        "midlayer.self_attn.o_proj": (width, heads * head),
        "midlayer.mlp.gate_proj": (inner, width),
        "midlayer.mlp.up_proj": (inner, width),
        "midlayer.mlp.down_proj": (width, inner),
    }
    norms = (
        "midlayer.hidden_norm",
        "midlayer.input_layernorm",
        "midlayer.post_attention_layernorm",
        "norm",
    )
    generator = torch.Generator().manual_seed(2)
    tensors = {
        f"{name}.weight": 0.1 * torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }
    tensors |= {f"{name}.weight": torch.ones(width) for name in norms}
    dtype = getattr(torch, target["dtype"])
    out.mkdir(parents=True)
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()}, out / "model.safetensors"
    )
    (out / "config.json").write_text(json.dumps(config))
    return out
