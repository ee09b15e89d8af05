# SPDX-License-Identifier: Apache-2.0
"""`UnderstandingChunk`: token-by-token decoding of an understanding request about an image or a
clip.

The prompt is processed in one forward pass, and its last position (the newline after `assistant`)
produces the first token. Each later pass processes the newest token. Tokens are sampled on the
device; the host reads them once per engine step. Only `settle` changes the inputs of a later step,
so a failed step can be run again.
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
    """How tokens are sampled."""
    seed: int
    """Seed of sampling."""
    max_tokens: int
    """Maximum number of tokens of the whole text."""
    end_token: int
    """Id of the token that ends the text."""
    stop: tuple[str, ...] = ()
    """Strings that end the generation. They are not included in the result."""


@dataclass(frozen=True)
class UnderstandingProgress:
    """The decoded tokens."""

    length: int = 0
    """Number of used slots of the cache."""
    next_position: int = 0
    """Position of the newest token."""
    tokens: tuple[int, ...] = ()
    """All decoded tokens, including the end token."""
    newest: torch.Tensor | None = None
    """The last token, int64 [1] on the device."""
    finish_reason: str | None = None
    """`stop` or `length`. None: the text is not complete."""
    sent: int = 0
    """Number of characters that have been returned."""

    def text(self, decode: Decode, rules: TextRules) -> str:
        """Return the text up to a stop string, without characters that may still change."""
        text = decode([token for token in self.tokens if token != rules.end_token])
        found = [position for stop in rules.stop if (position := text.find(stop)) >= 0]
        if found:
            return text[: min(found)]
        if self.finish_reason is None:
            text = text.rstrip("\ufffd")  # a character with incomplete bytes
            held = max((len(stop) - 1 for stop in rules.stop), default=0)
            return text[: max(self.sent, len(text) - held)]
        return text

    def new_text(self, decode: Decode, rules: TextRules) -> str:
        """Return the characters of `text` that have not been sent yet."""
        return self.text(decode, rules)[self.sent :]


@dataclass(eq=False)
class UnderstandingChunk:
    """One chunk of a text in flight."""

    cache: BranchCache
    """K/V of prompt and text."""
    rules: TextRules
    """Rules for sampling tokens and for ending the text."""
    chunk_tokens: int
    """Maximum number of tokens of this chunk."""
    progress: UnderstandingProgress = field(default_factory=UnderstandingProgress)
    """The decoded tokens. The session adopts it when the chunk succeeds."""
    context: Sequence[ContextSegment] = ()
    """The prompt, for the first chunk."""
    visuals: VisualContents = field(default_factory=VisualContents)
    """Embeddings of the image or video, for the first chunk only."""
    prompt_tokens: int = 0
    """Number of tokens of the prompt."""
    first_token: int = 0
    """Number of tokens before this chunk."""
    logits: torch.Tensor | None = None
    """fp32 logits [V] of the last pass, checked for NaN at the end of the chunk."""

    row: int = 0
    """Index of the `und` token in the current pass whose logits determine the next token."""
    _live: UnderstandingProgress = field(default_factory=UnderstandingProgress)
    """`progress` with the tokens of the step that runs. A failed step discards it."""
    _pending: list[torch.Tensor] = field(default_factory=list)
    """Tokens of the step that runs, still on the device."""

    @property
    def wanted(self) -> int:
        """Return how many more tokens this chunk may decode after the pending ones."""
        decoded = len(self.progress.tokens) + len(self._pending)
        return min(
            self.chunk_tokens - (decoded - self.first_token), self.rules.max_tokens - decoded
        )

    def start_step(self) -> None:
        """Start or restart a step."""
        self._live, self._pending = self.progress, []

    def add_tokens(self, writer: ContextWriter, builder: PackBuilder) -> None:
        """Add the prompt or the newest token to the forward pass."""
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
        """Sample the next token from this request's logits, without host synchronisation."""
        number = len(self.progress.tokens) + len(self._pending)
        draw = torch.rand(
            1, generator=torch.Generator().manual_seed(noise_seed(self.rules.seed, 0, number))
        )
        token = self.rules.choice.choose(logits_V, draw.to(logits_V.device, non_blocking=True))
        self.logits = logits_V
        self._pending.append(token)
        self._live = replace(self._live, newest=token)

    def settle(self, decode: Decode) -> None:
        """Copy the tokens of this step to the host and check whether the text has ended.
        Synchronises with the device.
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
