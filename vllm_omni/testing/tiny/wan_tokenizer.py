# SPDX-License-Identifier: Apache-2.0
"""A small but real tokenizer with the files, special tokens and byte fallback of umt5-xxl's."""

import io
import json
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}
"""In the order of their ids, 0 to 3."""

_TEXT = """
A lighthouse stands on a cliff above the sea at dawn, gulls circle around it.
Walk forward through a forest of old trees while the sun falls through the leaves.
A city street at night in the rain, neon light on wet stone, people with umbrellas.
The camera turns slowly to the left and shows a wide valley with a river.
A desert road under a blue sky, red rocks on both sides, no cars.
Snow covers the roofs of a small village, smoke rises from the chimneys.
An empty museum hall with marble floor, tall windows and paintings on the walls.
First person view of a boat on a lake, mountains behind the water, morning fog.
A spaceship corridor with white panels, the door at the end opens.
A kitchen with wooden tables, bread, apples and a cat that sleeps near the oven.
The storm comes closer, dark clouds move over the yellow fields of the farm.
A medieval castle on a green hill, flags in the wind, horses in the yard.
Underwater scene with coral, many small fish and rays of light from above.
Look up at the stars, then down at the camp fire between the tents.
A train station in winter, the train waits, the clock shows five past nine.
Run along the beach, waves on the right side, palm trees on the left side.
A library with high shelves, a ladder and a desk lamp with warm light.
The garden behind the house is full of flowers: roses, tulips, lavender.
A bridge of steel over a deep canyon, the view from the middle of the bridge.
Photorealistic video game world, high detail, soft shadows, smooth motion.
"""


def write_tokenizer(folder: Path) -> int:
    """Write `spiece.model`, `tokenizer.json` and their two config files; returns the number of tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_TEXT.strip().splitlines()),
        model_writer=proto,
        vocab_size=480,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "spiece.model").write_bytes(proto.getvalue())
    pieces = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())
    vocabulary = [(pieces.id_to_piece(index), pieces.get_score(index)) for index in range(pieces.vocab_size())]

    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))

    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "tokenizer_class": "T5Tokenizer",
        "model_max_length": 512,
        "extra_ids": 0,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(index): {"content": token, **flags} for index, token in enumerate(_SPECIAL.values())
        },
        **_SPECIAL,
    }
    for name, content in (("tokenizer_config.json", config), ("special_tokens_map.json", _SPECIAL)):
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return len(vocabulary)
