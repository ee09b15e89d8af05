# SPDX-License-Identifier: Apache-2.0
"""Prompt encoding: pad-free rows equal padded ones, prompts are cleaned as the original does,
the cache is bounded.
"""

import re

import pytest
import sentencepiece
import torch
from helpers.host_capture import hold
from transformers import AutoTokenizer

from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs
from vllm_omni.model_executor.models.lingbot_world.checkpoint import find_layout
from vllm_omni.model_executor.models.wan.text_encoder.encoder import (
    TextEncoder,
    clean_prompt,
    load_text_encoder,
    open_tokenizer,
    padded_lengths,
)
from vllm_omni.testing.tiny.lingbot_world import make_tiny

PROMPT = "A lighthouse on a cliff, the camera turns left."


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, 0, "original")
    return find_layout(folder)


def build(layout, **options) -> TextEncoder:
    encoder = TextEncoder(
        layout.text_config(), layout.tokenizer, **{"dtype": torch.float32, **options}
    )
    load_text_encoder(encoder.model, layout.text_encoder)
    return encoder


@pytest.fixture(scope="module")
def encoder(layout) -> TextEncoder:
    return build(layout)


def test_rows_equal_those_of_a_padded_and_masked_batch(encoder):
    """Encoding only the valid tokens gives the rows that the original gets with 512 padded ones."""
    rows = encoder.encode(PROMPT)
    ids = encoder.prompts.tokenize(PROMPT)
    padded = torch.zeros(1, 512, dtype=torch.long)
    padded[0, : len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        expected = encoder.model(
            padded, attention_mask=(torch.arange(512) < len(ids)).long()[None]
        ).last_hidden_state
    assert rows.shape == (len(ids), encoder.text_dim)
    torch.testing.assert_close(rows, expected[0, : len(ids)], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("max_tokens", "lengths"), [(512, [64, 128, 256, 512]), (200, [64, 128, 200]), (40, [40])]
)
def test_prompts_are_padded_to_few_lengths(max_tokens, lengths):
    assert padded_lengths(max_tokens) == lengths


def test_every_length_is_captured_at_the_first_prompt(layout, encoder):
    """So that no later prompt, however long, is launched kernel by kernel; rows are those of
    valid tokens alone.
    """
    graphs = ForwardGraphs(capture=hold)
    padded = build(layout, graphs=graphs)
    for prompt in (PROMPT, "walk on " * 60, ""):
        rows = padded.encode(prompt)
        assert rows.shape == encoder.encode(prompt).shape
        torch.testing.assert_close(rows, encoder.encode(prompt), atol=1e-5, rtol=0)
        assert len(graphs) == len(padded_lengths(512))


def test_other_weights_are_captured_anew(layout):
    """What a graph holds of the weights may lie elsewhere; prompts do not get the rows of the
    old ones.
    """
    graphs = ForwardGraphs(capture=hold)
    encoder = build(layout, graphs=graphs)
    before = encoder.encode(PROMPT)
    encoder.load(layout.text_encoder)
    assert len(graphs) == 0
    assert torch.equal(encoder.encode(PROMPT), before) and len(graphs) > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")
def test_graphs_give_the_rows_of_launches_kernel_by_kernel(layout):
    """Bit for bit, on the device where prompts are padded either way."""
    with torch.device("cuda"):
        plain = build(layout)
        graphed = build(layout, graphs=(graphs := ForwardGraphs()))
    for prompt in (PROMPT, "walk on " * 60, "a"):
        assert torch.equal(graphed.encode(prompt), plain.encode(prompt))
    assert len(graphs) == len(padded_lengths(512))


@pytest.mark.parametrize(
    ("prompt", "cleaned"),
    [
        ("  two   blanks\n\tand lines ", "two blanks and lines"),
        ("&amp;lt;b&amp;gt; &amp;amp; more", "<b> & more"),
        ("schÃ¶n", "schön"),
        ("“quoted”", '"quoted"'),
        ("", ""),
        ("lone \ud800 surrogate", "lone ? surrogate"),
    ],
)
def test_prompts_are_cleaned_as_in_the_original(prompt, cleaned):
    """Broken encodings repaired, HTML escapes undone twice, white space collapsed."""
    assert clean_prompt(prompt) == cleaned


def test_ids_end_with_end_of_sequence_and_are_cut_to_the_limit(layout):
    """A prompt of any length has at most `max_tokens` ids and keeps its last one."""
    encoder = build(layout, max_tokens=8)
    assert encoder.prompts.tokenize("") == [1]
    ids = encoder.prompts.tokenize("walk forward through the forest " * 100)
    assert len(ids) == 8
    assert ids[-1] == 1
    assert encoder.encode("walk " * 1000).shape[0] == 8


@pytest.mark.parametrize(
    "text", ["a lighthouse in the rain", "x ∑ 世界 é", "🙂", "unknown: \u0378", ""]
)
def test_tokenizer_json_gives_sentencepieces_ids(layout, text):
    """Both tokenizer files give the ids of SentencePiece itself, rare characters as bytes."""
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(layout.tokenizer / "spiece.model")
    )
    expected = [*processor.encode(text), 1]
    assert open_tokenizer(layout.tokenizer, 512).encode(text) == expected


def test_spiece_model_alone_will_do(layout, tmp_path):
    """Without `tokenizer.json` the SentencePiece model is used, with the same ids and the same
    cut.
    """
    (tmp_path / "spiece.model").write_bytes((layout.tokenizer / "spiece.model").read_bytes())
    for limit in (512, 5):
        assert open_tokenizer(tmp_path, limit).encode(PROMPT) == open_tokenizer(
            layout.tokenizer, limit
        ).encode(PROMPT)


def test_the_tiny_tokenizer_is_the_same_everywhere(layout):
    """Whichever sentencepiece is installed: recordings of random checkpoints are of these ids."""
    ids = open_tokenizer(layout.tokenizer, 512).encode("a path through green hills")
    assert ids == [265, 302, 269, 338, 322, 312, 309, 379, 280, 385, 425, 263, 1]


def test_the_tiny_tokenizer_is_one_that_transformers_reads(layout):
    """`AutoTokenizer` opens the written files offline and agrees on plain text."""
    tokenizer = AutoTokenizer.from_pretrained(layout.tokenizer, local_files_only=True)
    assert tokenizer("a lighthouse in the rain")["input_ids"] == open_tokenizer(
        layout.tokenizer, 512
    ).encode("a lighthouse in the rain")


def test_the_cache_returns_the_same_rows_and_stays_within_its_bytes(layout):
    """The least recently used prompts go when the bound is reached; a prompt in the cache is not
    encoded again.
    """
    encoder = build(layout)
    prompts = ("two", "sea", "one", "old", "sun")
    encoder.cache_bytes = 3 * max(encoder.encode(prompt).nbytes for prompt in prompts)
    encoder.clear_prompts()
    retained = encoder.encode("one")
    for prompt in prompts:
        encoder.encode(prompt)
        assert encoder.cached_bytes <= encoder.cache_bytes
    assert encoder.encode("one") is retained
    assert encoder.encode("  one\n") is retained
    encoder.clear_prompts()
    assert encoder.cached_bytes == 0
    assert torch.equal(encoder.encode("one"), retained)


def test_a_prompt_larger_than_the_cache_is_encoded_and_not_retained(layout):
    encoder = build(layout, cache_bytes=16)
    assert encoder.encode(PROMPT).shape[1] == encoder.text_dim
    assert encoder.cached_bytes == 0


def test_different_prompts_have_different_rows(encoder):
    assert not torch.equal(encoder.encode("night"), encoder.encode("light"))


def test_bfloat16_is_the_default_and_close(layout, encoder):
    """The released weights are bfloat16; so are the rows."""
    half = TextEncoder(layout.text_config(), layout.tokenizer)
    load_text_encoder(half.model, layout.text_encoder)
    rows = half.encode(PROMPT)
    assert rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows.float(), encoder.encode(PROMPT), atol=0.1, rtol=0.05)


def test_device_cpu_keeps_the_weights_in_host_memory(layout):
    """`device="cpu"` places weights in host memory whatever device the model is built on."""
    with torch.device("meta"):
        host = TextEncoder(layout.text_config(), None, device="cpu")
        alongside = TextEncoder(layout.text_config(), None)
    assert {parameter.device.type for parameter in host.parameters()} == {"cpu"}
    assert {parameter.device.type for parameter in alongside.parameters()} == {"meta"}


def test_the_embedding_is_one_matrix(encoder):
    """Input embedding and shared embedding are the same memory, not a second copy of 2 GiB."""
    assert encoder.model.encoder.embed_tokens.weight is encoder.model.shared.weight


def test_without_a_tokenizer_the_error_says_what_to_bring(layout):
    encoder = TextEncoder(layout.text_config(), None)
    with pytest.raises(ValueError, match=re.escape("put google/umt5-xxl")):
        encoder.encode(PROMPT)


def test_a_tokenizer_of_another_model_is_refused(layout):
    """More tokens than embedding rows would index out of range on the device."""
    with pytest.raises(ValueError, match="tokens, the text encoder only 64"):
        TextEncoder({**layout.text_config(), "vocab_size": 64}, layout.tokenizer)


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", b"{"), ("spiece.model", b"nonsense")]
)
def test_damaged_tokenizers_are_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(name)} is no tokenizer that can be read"):
        open_tokenizer(tmp_path, 512)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor spiece\.model"):
        open_tokenizer(tmp_path, 512)
