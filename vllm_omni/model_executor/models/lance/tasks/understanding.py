# SPDX-License-Identifier: Apache-2.0
"""Decode an understanding request's text token by token (`UnderstandingChunk`).

One forward pass processes the prompt, and the logits at its last position (the newline after
`assistant`) give the first token. Each later forward pass processes the latest token. Tokens are
sampled on the device, and the host reads them once per engine step. Only `settle` changes the
inputs of later steps, so a failed step can be repeated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from vllm_omni.model_executor.models.lance.network.pack import BranchCache, PackBuilder
from vllm_omni.model_executor.models.lance.tasks.context import (
    ContextSegment,
    ContextWriter,
    VisualContents,
)
from vllm_omni.model_executor.models.lance.tasks.sampling import TokenChoice
from vllm_omni.model_executor.schedules import noise_seed

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TextRules:
    """Rules for sampling tokens and for ending the text."""

    choice: TokenChoice
    """Settings of token sampling."""
    seed: int
    """Seed of token sampling."""
    max_tokens: int
    """Maximum number of tokens in the whole text."""
    end_token: int
    """Id of the token that ends the text."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation and are not included in the result."""


@dataclass(frozen=True)
class UnderstandingProgress:
    """The decoded tokens of a text, and the state that decoding continues from."""

    length: int = 0
    """Number of cache slots in use."""
    next_position: int = 0
    """Position of the latest token."""
    tokens: tuple[int, ...] = ()
    """All decoded tokens, including the end token."""
    newest: torch.Tensor | None = None
    """Id of the latest token, int64 [1] on the device."""
    finish_reason: str | None = None
    """Reason why the text ended: `stop` or `length`. None until the text is complete."""
    sent: int = 0
    """Number of characters already returned to the client."""

    def text(self, decode: Decode, rules: TextRules) -> str:
        """Return the text up to the first stop string, without trailing characters that may still
        change.
        """
        text = decode([token for token in self.tokens if token != rules.end_token])
        found = [position for stop in rules.stop if (position := text.find(stop)) >= 0]
        if found:
            return text[: min(found)]
        if self.finish_reason is None:
            text = text.rstrip("\ufffd")  # replacement characters for incomplete bytes
            held = max((len(stop) - 1 for stop in rules.stop), default=0)
            return text[: max(self.sent, len(text) - held)]
        return text

    def new_text(self, decode: Decode, rules: TextRules) -> str:
        """Return the characters that have not been returned to the client yet."""
        return self.text(decode, rules)[self.sent :]


@dataclass(eq=False)
class UnderstandingChunk:
    """One chunk of a text that is being decoded."""

    cache: BranchCache
    """K/V cache of the prompt and the text."""
    rules: TextRules
    """Rules for sampling tokens and for ending the text."""
    chunk_tokens: int
    """Maximum number of tokens in this chunk."""
    progress: UnderstandingProgress = field(default_factory=UnderstandingProgress)
    """Decoded tokens. The session stores them when the chunk succeeds."""
    context: Sequence[ContextSegment] = ()
    """The prompt's segments. Empty after the first chunk."""
    visuals: VisualContents = field(default_factory=VisualContents)
    """Embeddings of the image or video. Empty after the first chunk."""
    prompt_tokens: int = 0
    """Number of tokens in the prompt."""
    first_token: int = 0
    """Number of text tokens decoded before this chunk."""
    logits: torch.Tensor | None = None
    """Logits of the last forward pass, fp32 [V]. They are checked for NaN at the end of the chunk.
    """

    row: int = 0
    """Index of the token whose logits predict the next token, among the `und` tokens of the current
    forward pass.
    """
    _live: UnderstandingProgress = field(default_factory=UnderstandingProgress)
    """Copy of `progress` that includes the tokens of the current step. The copy is discarded if the
    step fails.
    """
    _pending: list[torch.Tensor] = field(default_factory=list)
    """Tokens of the current step that are still on the device."""

    @property
    def wanted(self) -> int:
        """Return the number of tokens that this chunk may still decode after the pending ones."""
        decoded = len(self.progress.tokens) + len(self._pending)
        return min(
            self.chunk_tokens - (decoded - self.first_token), self.rules.max_tokens - decoded
        )

    def start_step(self) -> None:
        """Start an engine step. If the previous step failed, discard its results."""
        self._live, self._pending = self.progress, []

    def add_tokens(self, writer: ContextWriter, builder: PackBuilder) -> None:
        """Add the prompt or the latest token to the forward pass."""
        live = self._live
        self.cache.length = live.length
        if live.length == 0:
            last = writer.append_segments(builder, self.cache, self.context, self.visuals)
            assert last is not None, "a prompt ends with text"
            after = int(self.context[-1].positions_3T[0, -1]) + 1
            self._live = replace(live, length=self.cache.length, next_position=after)
        else:
            assert live.newest is not None
            embeds = writer.network.language_model.embed(live.newest)
            rope = writer.rope(torch.full((3, 1), live.next_position))
            last = builder.add_tokens("und", embeds, rope, self.cache, self.cache.end)
            builder.attend("und", last, self.cache, live.length + 1, causal=False)
            self._live = replace(live, length=live.length + 1, next_position=live.next_position + 1)
        self.row = last.stop - 1

    def choose(self, logits_V: torch.Tensor) -> None:
        """Sample the next token from this request's logits, without synchronising the host with the
        device.
        """
        number = len(self.progress.tokens) + len(self._pending)
        draw = torch.rand(
            1, generator=torch.Generator().manual_seed(noise_seed(self.rules.seed, 0, number))
        )
        token = self.rules.choice.choose(logits_V, draw.to(logits_V.device, non_blocking=True))
        self.logits = logits_V
        self._pending.append(token)
        self._live = replace(self._live, newest=token)

    def settle(self, decode: Decode) -> None:
        """Copy this step's tokens to the host, and check whether the text is complete. The copy
        synchronises the host with the device.
        """
        tokens = [*self.progress.tokens, *torch.cat(self._pending).tolist()]
        reason = None
        if self.rules.end_token in tokens:
            tokens = tokens[: tokens.index(self.rules.end_token) + 1]
            reason = "stop"
        elif self.rules.stop and any(stop in decode(tokens) for stop in self.rules.stop):
            reason = "stop"
        elif len(tokens) >= self.rules.max_tokens:
            reason = "length"
        self.progress = replace(self._live, tokens=tuple(tokens), finish_reason=reason)
        self.context, self.visuals, self._pending = (), VisualContents(), []

    @property
    def done(self) -> bool:
        """Return whether this chunk has no more tokens to decode."""
        return self.progress.finish_reason is not None or self.wanted <= 0
