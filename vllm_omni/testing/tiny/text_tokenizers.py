# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers in the layouts of real checkpoints: umt5-xxl's and Qwen2.5-Omni's."""

import json
import shutil
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from vllm_omni import worlds

_VILLAGES = Path(worlds.__file__).parent / "village" / "google" / "umt5-xxl"
_FILES = ("spiece.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")

_TEXT = """
You are Qwen, a virtual human, capable of perceiving auditory and visual inputs, as well as generating text and speech.
system user assistant
Read this text aloud, word for word. What do you hear in the recording? What do you see in the picture?
Good morning, the weather is fine today and the harbour is quiet.
"""  # noqa: E501

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's regular expression for the text boundaries that merges must not cross."""

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<|tts_bos_chelsie|>",
)

_NAMED = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}

DEFAULT_SYSTEM = (
    "You are Qwen, a virtual human, capable of perceiving auditory and visual inputs, "
    "as well as generating text and speech."
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\n"
    + DEFAULT_SYSTEM
    + "<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}"
    "{% if content['type'] in ('image', 'image_url') %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif content['type'] in ('audio', 'audio_url', 'input_audio') "
    "%}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif content['type'] == 'video' %}<|vision_bos|><|VIDEO|><|vision_eos|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_qwen_tokenizer(folder: Path) -> dict[str, int]:
    """Write all files of a Qwen2.5-Omni tokenizer.

    Returns:
        The ids of the special tokens and of `user`. The entry `<|padding|>` is the number of
        tokens, rounded up to a multiple of 64 as in the released embedding table.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator([_TEXT, "user assistant system " * 20], trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in _SPECIAL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    stored = json.loads((folder / "tokenizer.json").read_text())
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]
    ]
    (folder / "vocab.json").write_text(json.dumps(stored["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in _SPECIAL}
    (folder / "added_tokens.json").write_text(json.dumps(ids, indent=2))
    flags = {
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": True,
    }
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "processor_class": "Qwen2_5OmniProcessor",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "added_tokens_decoder": {
            str(index): {"content": token, **flags} for token, index in ids.items()
        },
        "extra_special_tokens": _NAMED,
        "chat_template": CHAT_TEMPLATE,
        **special,
        **_NAMED,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "special_tokens_map.json").write_text(
        json.dumps({**special, **_NAMED}, indent=2) + "\n"
    )
    (folder / "chat_template.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE}, indent=2) + "\n"
    )
    user = tokenizer.encode("user").ids
    return {**ids, "user": user[0], "<|padding|>": -(-tokenizer.get_vocab_size() // 64) * 64}


def write_t5_tokenizer(folder: Path) -> int:
    """Write a tokenizer with the files, special tokens and byte fallback of umt5-xxl's tokenizer.

    The tokenizer is a copy of the demo world's tokenizer, which was trained on twenty sentences
    with sentencepiece 0.2.3. The tokenizer is copied rather than retrained, because another version
    of sentencepiece would produce a different vocabulary, and random checkpoints with the same seed
    would then differ.

    Returns:
        Number of tokens in the vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FILES:
        shutil.copyfile(_VILLAGES / name, folder / name)
    return len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"])
