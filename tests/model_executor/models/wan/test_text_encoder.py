# SPDX-License-Identifier: Apache-2.0
"""In prompt encoding, hidden states are the same with and without padding, prompts are cleaned as
in the original implementation, and the prompt cache is bounded.
"""

import re

import pytest
import sentencepiece
import torch
from helpers.host_capture import hold

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


def test_hidden_states_equal_those_of_a_padded_batch(encoder):
    """Encoding only the valid tokens produces the same hidden states as the original
    implementation, which pads every prompt to 512 tokens.
    """
    states = encoder.encode(PROMPT)
    ids = encoder.prompts.tokenize(PROMPT)
    padded = torch.zeros(1, 512, dtype=torch.long)
    padded[0, : len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        expected = encoder.model(
            padded, attention_mask=(torch.arange(512) < len(ids)).long()[None]
        ).last_hidden_state
    assert states.shape == (len(ids), encoder.text_dim)
    torch.testing.assert_close(states, expected[0, : len(ids)], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("max_tokens", "lengths"), [(512, [64, 128, 256, 512]), (200, [64, 128, 200]), (40, [40])]
)
def test_prompts_are_padded_to_few_lengths(max_tokens, lengths):
    assert padded_lengths(max_tokens) == lengths


def test_every_length_is_captured_at_the_first_prompt(layout, encoder):
    """The first prompt captures graphs for all lengths, so no later prompt runs without a graph.
    Only valid tokens are returned.
    """
    graphs = ForwardGraphs(capture=hold)
    padded = build(layout, graphs=graphs)
    for prompt in (PROMPT, "walk on " * 60, ""):
        states = padded.encode(prompt)
        assert states.shape == encoder.encode(prompt).shape
        torch.testing.assert_close(states, encoder.encode(prompt), atol=1e-5, rtol=0)
        assert len(graphs) == len(padded_lengths(512))


def test_reloaded_weights_are_captured_again(layout):
    """After the weights have been reloaded, the graphs are captured again, because a graph may
    refer to the old weights' memory.
    """
    graphs = ForwardGraphs(capture=hold)
    encoder = build(layout, graphs=graphs)
    before = encoder.encode(PROMPT)
    encoder.load(layout.text_encoder)
    assert len(graphs) == 0
    assert torch.equal(encoder.encode(PROMPT), before) and len(graphs) > 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")
def test_graphs_equal_plain_launches(layout):
    """Encoding with CUDA graphs produces the same hidden states as encoding without graphs, bit for
    bit. On a GPU, prompts are padded in both modes.
    """
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
    """Prompts are cleaned as in the original implementation: broken encodings are repaired, HTML is
    unescaped twice, and white space is collapsed.
    """
    assert clean_prompt(prompt) == cleaned


def test_ids_end_with_end_of_sequence_and_are_truncated(layout):
    """A prompt of any length produces at most `max_tokens` ids. The last id is the end-of-sequence
    token.
    """
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
    """`tokenizer.json` produces the same ids as SentencePiece, including the byte encoding of rare
    characters.
    """
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(layout.tokenizer / "spiece.model")
    )
    expected = [*processor.encode(text), 1]
    assert open_tokenizer(layout.tokenizer, 512).encode(text) == expected


def test_a_spiece_model_alone_suffices(layout, tmp_path):
    """Without `tokenizer.json`, the SentencePiece model produces the same ids and truncation."""
    (tmp_path / "spiece.model").write_bytes((layout.tokenizer / "spiece.model").read_bytes())
    for limit in (512, 5):
        assert open_tokenizer(tmp_path, limit).encode(PROMPT) == open_tokenizer(
            layout.tokenizer, limit
        ).encode(PROMPT)


def test_the_prompt_cache_is_bounded(layout):
    """The prompt cache evicts the least recently used prompt. A cached prompt is not encoded
    again.
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


def test_a_prompt_larger_than_the_cache_is_not_cached(layout):
    encoder = build(layout, cache_bytes=16)
    assert encoder.encode(PROMPT).shape[1] == encoder.text_dim
    assert encoder.cached_bytes == 0


def test_device_cpu_keeps_the_weights_in_host_memory(layout):
    """With `device="cpu"`, the weights stay in host memory, whatever device the model is built
    on.
    """
    with torch.device("meta"):
        host = TextEncoder(layout.text_config(), None, device="cpu")
        alongside = TextEncoder(layout.text_config(), None)
    assert {parameter.device.type for parameter in host.parameters()} == {"cpu"}
    assert {parameter.device.type for parameter in alongside.parameters()} == {"meta"}


def test_the_embedding_is_one_matrix(encoder):
    """The input embedding and the shared embedding use the same memory, which saves a 2 GiB
    copy.
    """
    assert encoder.model.encoder.embed_tokens.weight is encoder.model.shared.weight


def test_a_missing_tokenizer_is_named(layout):
    encoder = TextEncoder(layout.text_config(), None)
    with pytest.raises(ValueError, match=re.escape("put google/umt5-xxl")):
        encoder.encode(PROMPT)


def test_a_tokenizer_of_another_model_is_refused(layout):
    """A tokenizer that has more tokens than the model has embeddings is rejected, because its ids
    would be out of range on the device.
    """
    with pytest.raises(ValueError, match="tokens, the text encoder only 64"):
        TextEncoder({**layout.text_config(), "vocab_size": 64}, layout.tokenizer)


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", b"{"), ("spiece.model", b"nonsense")]
)
def test_damaged_tokenizers_are_refused_in_one_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{re.escape(name)} is no tokenizer that can be read"):
        open_tokenizer(tmp_path, 512)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither tokenizer\.json nor spiece\.model"):
        open_tokenizer(tmp_path, 512)
