# SPDX-License-Identifier: Apache-2.0
"""Prompt -> text rows: cleaning, the umt5-xxl tokenizer and encoder, and a bounded cache of recent prompts.

Only the valid tokens are encoded (attention is bidirectional and padding is masked in the original, so its valid rows
are the same); the transformer pads with zero rows itself. On CUDA they are padded to one of a few lengths, each of
which can be launched as one graph: kernel by kernel the host takes longer than the device. Knows nothing of sessions.

Of several ranks one encodes (`ParallelContext.encodes`). On the others `AwaitedText` stands for the encoder: it makes
room for the rows, which the worker fills before they are read (`worker/diffusion/shared_text.py`).
Cleaning: Robbyant/lingbot-world @ a43bec7, wan/modules/tokenizers.py, mode `whitespace`.

`tokenizer.json` is read with the `tokenizers` library itself: transformers 5 rebuilds a T5 tokenizer from its
vocabulary alone and so loses byte fallback and the unknown token's id, which changes the ids of rarer characters.
Held by tests/model_executor/models/wan/test_text_encoder.py.
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

from vllm_omni.model_executor.device_async import to_device
from vllm_omni.model_executor.layers.forward_graphs import ForwardGraphs, Inputs
from vllm_omni.model_executor.layers.parallel import ParallelContext
from vllm_omni.model_executor.models.wan.component_names import TEXT_RULES
from vllm_omni.model_executor.tensor_files import confined, open_tensors
from vllm_omni.model_executor.weights import load_strict, shapes_of

_SHORTEST = 64
"""Tokens to which short prompts are padded: up to there the encoder's weights take the device longer to read."""


def padded_lengths(max_tokens: int) -> list[int]:
    """Powers of two, the last one cut to `max_tokens`: the lengths that prompts are padded to."""
    lengths, length = [], _SHORTEST
    while length < max_tokens:
        lengths.append(length)
        length *= 2
    return [*lengths, max_tokens]


class TextEncoder(nn.Module):
    """The umt5 encoder with its tokenizer. Parameters are created empty; `load` fills them.

    config: `UMT5Config` values. tokenizer: a folder with `tokenizer.json` or `spiece.model`; None = weights only.
    max_tokens: longer prompts are cut, the end-of-sequence token kept. device: `model` = torch's default device now,
    `cpu` = host memory, results are sent to the caller's device. cache_bytes: rows of recent prompts kept. graphs: of
    every padded length, captured at the first prompt; None = none are made.
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
        self.prompts = Prompts(tokenizer, max_tokens, self.model.config.vocab_size)
        self.cache_bytes = cache_bytes
        self._lengths = padded_lengths(max_tokens)
        self._pads = target.type == "cuda" or graphs is not None
        self._graphs = graphs
        self._is_captured = False
        self._cache: OrderedDict[tuple[str, torch.device], torch.Tensor] = OrderedDict()
        self.cached_bytes = 0
        """Bytes the prompt cache holds, at most `cache_bytes`."""

    @property
    def text_dim(self) -> int:
        return int(self.model.config.d_model)

    def load(self, path: Path) -> None:
        """Fill the parameters, strictly. Raises ValueError."""
        load_text_encoder(self.model, path)
        self.forget()

    @torch.no_grad()
    def encode(self, prompt: str, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the rows [S, E] of a prompt, S <= max_tokens, in the encoder's dtype on `device` (default: its own).

        The result belongs to the cache and is shared by everyone who asks for the prompt: read it only.
        """
        own = self.model.shared.weight.device
        target = torch.empty(0, device=own if device is None else device).device
        key = (prompt_key(prompt), target)
        if key in self._cache:
            self._cache.move_to_end(key)
            return self._cache[key]
        if self._graphs is not None and not self._is_captured:
            self._capture()
        rows_SE = to_device(self._rows(self.prompts.tokenize(prompt)), target)
        self._remember(key, rows_SE)
        return rows_SE

    def _rows(self, ids: list[int]) -> torch.Tensor:
        """The rows [S, E] of S token ids, on the encoder's device."""
        weight = self.model.shared.weight
        if not self._pads:
            ids_1S = to_device(torch.tensor([ids]), weight.device)
            return self.model(input_ids=ids_1S).last_hidden_state[0]
        length = next(length for length in self._lengths if length >= len(ids))
        ids_1P = torch.zeros(1, length, dtype=torch.long)
        ids_1P[0, : len(ids)] = torch.tensor(ids)
        mask_111P = torch.zeros(1, 1, 1, length, dtype=weight.dtype)  # added to the attention's scores
        mask_111P[..., len(ids) :] = torch.finfo(weight.dtype).min
        inputs = {"ids": to_device(ids_1P, weight.device), "mask": to_device(mask_111P, weight.device)}
        rows_PE = self._forward(inputs) if self._graphs is None else self._graphs("text", inputs, self._forward)
        return rows_PE[: len(ids)]

    def _forward(self, inputs: Inputs) -> torch.Tensor:
        rows_1PE = self.model(input_ids=inputs["ids"], attention_mask=inputs["mask"]).last_hidden_state
        return rows_1PE[0]

    def _capture(self) -> None:
        """Run every padded length as it is and once more, which captures it."""
        self._is_captured = True
        for length in 2 * self._lengths:
            self._rows([0] * length)

    def forget(self) -> None:
        """Drop every cached prompt, and the graphs."""
        self._cache.clear()
        self.cached_bytes = 0
        self._is_captured = False
        if self._graphs is not None:
            self._graphs.forget()

    def _remember(self, key: tuple[str, torch.device], rows_SE: torch.Tensor) -> None:
        self._cache[key] = rows_SE
        self.cached_bytes += rows_SE.nbytes
        while self.cached_bytes > self.cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self.cached_bytes -= dropped.nbytes


def load_text_encoder(model: nn.Module, path: Path) -> None:
    """Load transformers' `UMT5EncoderModel` from Wan's `.pth` or from a transformers folder."""
    source = open_tensors(path)
    tied = "encoder.embed_tokens.weight"  # the same matrix as shared.weight; some exports hold it twice
    ignored = [tied] if {tied, "shared.weight"} <= source.shapes.keys() else []
    load_strict(model, source, shapes_of(model), TEXT_RULES, what="text encoder", ignored=ignored)


class AwaitedText:
    """Stands for the text encoder on a rank that gets the rows from another. It holds no weights."""

    def __init__(
        self, config: Mapping[str, Any], tokenizer: Path | None, *, max_tokens: int, dtype: torch.dtype
    ) -> None:
        values = UMT5Config(**{**config, "dtype": None})
        self.prompts = Prompts(tokenizer, max_tokens, values.vocab_size)
        self._width, self._dtype = int(values.d_model), dtype

    def load(self, path: Path) -> None:
        """There is nothing to fill."""

    def encode(self, prompt: str, device: torch.device | str) -> torch.Tensor:
        """Return memory for the rows [S, E] of a prompt, to be filled before it is read."""
        return torch.empty(len(self.prompts.tokenize(prompt)), self._width, dtype=self._dtype, device=device)


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
    """This rank's, by its place; None on a VAE stage and for an empty `config`. device: None = the model's.

    cuda_graphs: launch it as graphs, where it is on the model's device.
    """
    if parallel.is_vae_stage or not config:
        return None
    if not parallel.encodes:
        return AwaitedText(config, tokenizer, max_tokens=max_tokens, dtype=dtype)
    graphs = ForwardGraphs() if cuda_graphs and device is None else None
    return TextEncoder(config, tokenizer, max_tokens=max_tokens, device=device or "model", dtype=dtype, graphs=graphs)


class Prompts:
    """Prompts -> token ids. tokenizer: as of `TextEncoder`; vocabulary: rows of its embedding. Raises ValueError."""

    def __init__(self, tokenizer: Path | None, max_tokens: int, vocabulary: int) -> None:
        self.tokenizer = None if tokenizer is None else open_tokenizer(tokenizer, max_tokens)
        if self.tokenizer is not None and self.tokenizer.size > vocabulary:
            raise ValueError(
                f"{tokenizer} has {self.tokenizer.size} tokens, the text encoder only {vocabulary}; "
                "use the tokenizer that came with the checkpoint"
            )

    def tokenize(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt after cleaning, end-of-sequence included, at most `max_tokens`."""
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer; put google/umt5-xxl (or tokenizer/) into it")
        return self.tokenizer.encode(clean_prompt(prompt))


def clean_prompt(prompt: str) -> str:
    """Repair broken encodings, undo HTML escapes (twice: `&amp;lt;`), make every run of white space one blank."""
    text = prompt.encode("utf-8", "replace").decode()  # lone surrogates are no text
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


def prompt_key(prompt: str) -> str:
    """Return the sha256 of a cleaned prompt: equal keys have equal rows."""
    return hashlib.sha256(clean_prompt(prompt).encode("utf-8", "replace")).hexdigest()


class Tokenizer(Protocol):
    """Text -> ids. `size`: number of tokens."""

    size: int

    def encode(self, text: str) -> list[int]: ...


class JsonTokenizer:
    """A `tokenizer.json`; its own template appends the end-of-sequence token."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(max_tokens)
        self.size = self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text).ids)


class SentencePieceTokenizer:
    """A `spiece.model`; the end-of-sequence token is appended here."""

    def __init__(self, path: Path, max_tokens: int) -> None:
        self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.max_tokens = max_tokens
        self.size = self.processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        return [*self.processor.encode(text)[: self.max_tokens - 1], self.processor.eos_id()]


def open_tokenizer(folder: Path, max_tokens: int) -> Tokenizer:
    """Open the tokenizer in `folder`. Raises ValueError of one line when there is none or it cannot be read."""
    readers: dict[str, Callable[[Path, int], Tokenizer]] = {
        "tokenizer.json": JsonTokenizer,
        "spiece.model": SentencePieceTokenizer,
    }
    for name, reader in readers.items():
        if (folder / name).exists():
            path = confined(folder, name)
            try:
                return reader(path, max_tokens)
            except Exception as error:  # both libraries raise bare Exception or RuntimeError on a damaged file
                raise ValueError(
                    f"{path} is no tokenizer that can be read ({type(error).__name__}); get it again"
                ) from error
    raise ValueError(f"{folder} has neither {' nor '.join(readers)}; take them from google/umt5-xxl")
