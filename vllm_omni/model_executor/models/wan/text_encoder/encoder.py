# SPDX-License-Identifier: Apache-2.0
"""Encode prompts to text embeddings with umt5-xxl, and cache the embeddings of recent prompts.

The encoder processes only valid tokens, and the transformer pads the embeddings with zeros. The
embeddings of valid tokens are equal to the original's, because the original's attention is
bidirectional and masks the padding. On CUDA, each prompt is padded to one of a few lengths, and
each length has its own CUDA graph. CUDA graphs are used because launching the kernels eagerly takes
longer than running them.

If there are several ranks, only one of them encodes prompts (`ParallelContext.encodes`). On the
other ranks, `AwaitedText` replaces the encoder. It allocates tensors for the text embeddings, and
the worker fills these tensors before they are read (`worker/diffusion/shared_text.py`). Prompts are
cleaned as in Robbyant/lingbot-world @ a43bec7, wan/modules/tokenizers.py, `whitespace` mode.

`tokenizer.json` is read with the `tokenizers` library rather than with Transformers 5, which
rebuilds a T5 tokenizer from the vocabulary alone. The rebuilt tokenizer lacks byte fallback and the
unknown token's id, so the ids of rare characters change.
"""

# S valid tokens of a prompt, P padded ones, E text width

import hashlib
import html
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import ftfy
import sentencepiece
import tokenizers
import torch
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from vllm_omni.model_executor.checkpoint.loading import load_strict, shapes_of
from vllm_omni.model_executor.checkpoint.tensor_files import confined, open_tensors
from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.cuda_graphs import ForwardGraphs, Inputs
from vllm_omni.model_executor.models.wan.checkpoint.component_names import TEXT_RULES

_SHORTEST = 64
"""Minimum padded length in tokens. A smaller minimum would not save time, because for such short
prompts, most of the encoder's run time is spent on reading its weights.
"""


def padded_lengths(max_tokens: int) -> list[int]:
    """Return the lengths that prompts are padded to: powers of two, followed by `max_tokens`."""
    lengths, length = [], _SHORTEST
    while length < max_tokens:
        lengths.append(length)
        length *= 2
    return [*lengths, max_tokens]


class TextEncoder(nn.Module):
    """The umt5 encoder with its tokenizer. Parameters are uninitialised until `load` is called.

    Args:
        config: `UMT5Config` values.
        tokenizer: Folder that contains `tokenizer.json` or `spiece.model`. None if no prompts will
            be encoded.
        max_tokens: Maximum number of tokens. Longer prompts are truncated but retain the
            end-of-sequence token.
        device: Device of the weights: torch's current default device (`model`), or host memory
            (`cpu`). With `cpu`, results are copied to the caller's device.
        dtype: Dtype of the weights.
        cache_bytes: Maximum size in bytes of the cached text embeddings.
        graphs: CUDA graphs for the encoder. On the first prompt, one graph is captured for each
            padded length. If `graphs` is None, the encoder runs eagerly.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Path | None,
        *,
        max_tokens: int = 512,
        device: Literal["model", "cpu"] = "model",
        dtype: torch.dtype = torch.bfloat16,
        cache_bytes: int = 64 << 20,
        graphs: ForwardGraphs | None = None,
    ) -> None:
        super().__init__()
        target = torch.device("cpu") if device == "cpu" else torch.get_default_device()
        with torch.device("meta"):
            model = UMT5EncoderModel(UMT5Config(**{**config, "dtype": None}))
        self.model = model.to(dtype).to_empty(device=target).eval().requires_grad_(False)  # type: ignore[arg-type]
        self.model.encoder.embed_tokens.weight = self.model.shared.weight
        self.prompts = PromptTokenizer(tokenizer, max_tokens, self.model.config.vocab_size)
        self.cache_bytes = cache_bytes
        self._lengths = padded_lengths(max_tokens)
        self._pads = target.type == "cuda" or graphs is not None
        self._graphs = graphs
        self._is_captured = False
        self._cache: OrderedDict[tuple[str, torch.device], torch.Tensor] = OrderedDict()
        self.cached_bytes = 0
        """Size of the cached text embeddings in bytes, at most `cache_bytes`."""

    @property
    def text_dim(self) -> int:
        return int(self.model.config.d_model)

    def load(self, path: Path) -> None:
        """Load the parameters strictly.

        Raises:
            ValueError: Tensors are missing, unexpected or misshapen.
        """
        load_text_encoder(self.model, path)
        self.clear_prompts()

    @torch.no_grad()
    def encode(self, prompt: str, device: torch.device | str | None = None) -> torch.Tensor:
        """Return a prompt's text embeddings [S, E], with S <= max_tokens, in the encoder's dtype.

        The result is on `device` (default: the encoder's device). The cache holds the same tensor,
        so the caller must not modify the result.
        """
        own = self.model.shared.weight.device
        target = torch.empty(0, device=own if device is None else device).device
        key = (prompt_key(prompt), target)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        if self._graphs is not None and not self._is_captured:
            self._capture()
        states_SE = to_device(self._hidden_states(self.prompts.tokenize(prompt)), target)
        self._remember(key, states_SE)
        return states_SE

    def _hidden_states(self, ids: list[int]) -> torch.Tensor:
        """Return the text embeddings [S, E] of S token ids, on the encoder's device."""
        weight = self.model.shared.weight
        if not self._pads:
            ids_1S = to_device(torch.tensor([ids]), weight.device)
            return self.model(input_ids=ids_1S).last_hidden_state[0]
        length = next(length for length in self._lengths if length >= len(ids))
        ids_1P = torch.zeros(1, length, dtype=torch.long)
        ids_1P[0, : len(ids)] = torch.tensor(ids)
        # The mask is added to the attention scores.
        mask_111P = torch.zeros(1, 1, 1, length, dtype=weight.dtype)
        mask_111P[..., len(ids) :] = torch.finfo(weight.dtype).min
        inputs = {
            "ids": to_device(ids_1P, weight.device),
            "mask": to_device(mask_111P, weight.device),
        }
        states_PE = (
            self._forward(inputs)
            if self._graphs is None
            else self._graphs("text", inputs, self._forward)
        )
        return states_PE[: len(ids)]

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        states_1PE = self.model(
            input_ids=inputs["ids"], attention_mask=inputs["mask"]
        ).last_hidden_state
        return states_1PE[0]

    def _capture(self) -> None:
        """Encode a prompt of each padded length twice, because the second run captures the
        graph.
        """
        self._is_captured = True
        for length in 2 * self._lengths:
            self._hidden_states([0] * length)

    def clear_prompts(self) -> None:
        """Evict all cached text embeddings and clear the CUDA graphs."""
        self._cache.clear()
        self.cached_bytes = 0
        self._is_captured = False
        if self._graphs is not None:
            self._graphs.clear_graphs()

    def _remember(self, key: tuple[str, torch.device], states_SE: torch.Tensor) -> None:
        self._cache[key] = states_SE
        self.cached_bytes += states_SE.nbytes
        while self.cached_bytes > self.cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self.cached_bytes -= dropped.nbytes


def load_text_encoder(model: nn.Module, path: Path) -> None:
    """Load the weights of a `UMT5EncoderModel` from Wan's `.pth` file or a transformers folder."""
    source = open_tensors(path)
    # This tensor is identical to shared.weight, but some checkpoints store both.
    tied = "encoder.embed_tokens.weight"
    ignored = [tied] if {tied, "shared.weight"} <= source.shapes.keys() else []
    load_strict(model, source, shapes_of(model), TEXT_RULES, what="text encoder", ignored=ignored)


class AwaitedText:
    """Replaces the text encoder on a rank that receives text embeddings from another rank. It has
    no weights.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Path | None,
        *,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        values = UMT5Config(**{**config, "dtype": None})
        self.prompts = PromptTokenizer(tokenizer, max_tokens, values.vocab_size)
        self._width, self._dtype = int(values.d_model), dtype

    def load(self, path: Path) -> None:
        """Do nothing, because this class has no parameters."""

    def encode(self, prompt: str, device: torch.device | str) -> torch.Tensor:
        """Return an uninitialised tensor [S, E]. The worker fills it with the prompt's text
        embeddings before it is read.
        """
        return torch.empty(
            len(self.prompts.tokenize(prompt)), self._width, dtype=self._dtype, device=device
        )


def text_encoder_of(
    parallel: ParallelContext,
    config: Mapping[str, Any],
    tokenizer: Path | None,
    *,
    max_tokens: int,
    device: Literal["cpu"] | None,
    dtype: torch.dtype,
    cuda_graphs: bool = False,
) -> "TextEncoder | AwaitedText | None":
    """Build this rank's text encoder. Return None on a VAE stage or if `config` is empty.

    Args:
        parallel: Parallelism of this rank.
        config: `UMT5Config` values.
        tokenizer: Passed to `TextEncoder`.
        max_tokens: Passed to `TextEncoder`.
        device: `cpu` for host memory, or None for the model's device.
        dtype: Dtype of the weights.
        cuda_graphs: Whether to use CUDA graphs if the encoder is on the model's device.
    """
    if parallel.is_vae_stage or not config:
        return None
    if not parallel.encodes:
        return AwaitedText(config, tokenizer, max_tokens=max_tokens, dtype=dtype)
    graphs = ForwardGraphs() if cuda_graphs and device is None else None
    return TextEncoder(
        config,
        tokenizer,
        max_tokens=max_tokens,
        device=device or "model",
        dtype=dtype,
        graphs=graphs,
    )


class PromptTokenizer:
    """Converts prompts to token ids.

    Args:
        tokenizer: See `TextEncoder`.
        max_tokens: See `TextEncoder`.
        vocabulary: Number of tokens in the encoder's embedding table.

    Raises:
        ValueError: The tokenizer does not match the encoder.
    """

    def __init__(self, tokenizer: Path | None, max_tokens: int, vocabulary: int) -> None:
        self.tokenizer = None if tokenizer is None else open_tokenizer(tokenizer, max_tokens)
        if self.tokenizer is not None and self.tokenizer.size > vocabulary:
            raise ValueError(
                f"{tokenizer} has {self.tokenizer.size} tokens, the text encoder only "
                f"{vocabulary}; "
                "use the tokenizer that came with the checkpoint"
            )

    def tokenize(self, prompt: str) -> list[int]:
        """Clean a prompt and return its token ids, at most `max_tokens` including the
        end-of-sequence token.
        """
        if self.tokenizer is None:
            raise ValueError(
                "this checkpoint has no tokenizer; put google/umt5-xxl (or tokenizer/) into it"
            )
        return self.tokenizer.encode(clean_prompt(prompt))


def clean_prompt(prompt: str) -> str:
    """Fix encoding errors in a prompt, unescape HTML twice (for example `&amp;lt;`), and collapse
    white space.
    """
    text = prompt.encode("utf-8", "replace").decode()  # replaces lone surrogates
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


def prompt_key(prompt: str) -> str:
    """Return the SHA-256 hash of a cleaned prompt. Prompts with equal keys have equal text
    embeddings.
    """
    return hashlib.sha256(clean_prompt(prompt).encode("utf-8", "replace")).hexdigest()


class Tokenizer(Protocol):
    """Converts text to token ids. `size` is the number of tokens in the vocabulary."""

    size: int

    def encode(self, text: str) -> list[int]: ...


class JsonTokenizer:
    """Tokenizer loaded from a `tokenizer.json`. The file's template appends the end-of-sequence
    token.
    """

    def __init__(self, path: Path, max_tokens: int) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)
        self.size = self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)


class SentencePieceTokenizer:
    """Tokenizer loaded from a `spiece.model`. This class appends the end-of-sequence token."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.max_tokens = max_tokens
        self.size = self.processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        return [*self.processor.encode(text)[: self.max_tokens - 1], self.processor.eos_id()]


def open_tokenizer(folder: Path, max_tokens: int) -> Tokenizer:
    """Open the tokenizer in `folder`. If the tokenizer is missing or unreadable, raise ValueError
    with a one-line message.
    """
    readers: dict[str, Callable[[Path, int], Tokenizer]] = {
        "tokenizer.json": JsonTokenizer,
        "spiece.model": SentencePieceTokenizer,
    }
    for name, reader in readers.items():
        if (folder / name).exists():
            path = confined(folder, name)
            try:
                return reader(path, max_tokens)
            # If the file is damaged, the tokenizer libraries raise a plain `Exception` or a
            # RuntimeError.
            except Exception as error:
                raise ValueError(
                    f"{path} is no tokenizer that can be read ({type(error).__name__}); get "
                    "it again"
                ) from error
    raise ValueError(
        f"{folder} has neither {' nor '.join(readers)}; take them from google/umt5-xxl"
    )
