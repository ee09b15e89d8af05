# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny language model with random weights and a tokenizer, in transformers' layout.

vLLM loads the model like any other checkpoint. Attention heads have 32 channels, because vLLM's CPU
kernels require at least this many. The hidden-states example, its benchmark and tests use the
model.
"""

from pathlib import Path
from typing import Any, Final

import torch

_SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_EOS: Final = 0
_CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_language_model(
    out: Path, *, seed: int = 0, dtype: str = "float32", **config: Any
) -> Path:
    """Write a random Qwen2 model to the directory `out` and return the directory.

    Args:
        out: Directory to write the model to.
        seed: Seed of the weights.
        dtype: Dtype of the weights.
        **config: Fields of `Qwen2Config` to change. By default, the model has four blocks of width
            64.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    fields: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": _EOS,
        "pad_token_id": _EOS,
        **config,
    }
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(**fields, dtype=dtype)).to(getattr(torch, dtype)).eval()
    for name, parameter in model.named_parameters():
        # Large values make the hidden states differ and keep greedy decoding from repeating one
        # token.
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 0.05)
    model.generation_config.eos_token_id = _EOS
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def _tokenizer() -> Any:
    """Return a tokenizer with one token per byte. The tokenizer can encode any text and decode any
    token.
    """
    from tokenizers import pre_tokenizers
    from transformers import Qwen2Tokenizer

    symbols = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[])
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
