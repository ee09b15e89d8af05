# SPDX-License-Identifier: Apache-2.0
"""The inputs to one forward pass: the tokens of many requests, and the caches that they attend to.

The decoder has two experts, `und` (text, vision, markers) and `gen` (latents). The tokens of each
expert are contiguous across all requests, so every matrix product runs only once. Attention is
split into small jobs. In each job, a contiguous run of one expert's queries attends either to the
first slots of a cache or to the first slots of the cache's context. For a bidirectional block, the
order of the keys does not matter, so the generated block is stored before its context. The block's
address then does not depend on the prompt, so all prompts can use the same CUDA graph.
"""

# T tokens, D width, C rotary channels, L layers, K key/value heads, H head dim

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import torch

Expert = Literal["und", "gen"]

_CAPACITY_STEP = 128
"""Context capacities are multiples of this number of tokens. Most prompts, including the chat
template, are shorter.
"""


@dataclass(eq=False)
class BranchCache:
    """This rank's K/V cache for one context.

    The slots before the context contain the block that is being denoised.
    """

    k: torch.Tensor
    """Keys for all layers, [L, block + capacity, K, H]."""
    v: torch.Tensor
    """Values for all layers, with the same shape as the keys."""
    length: int = 0
    """Number of tokens written to the context."""
    block: int = 0
    """Number of slots before the context. A denoise step writes only to these slots."""

    @property
    def capacity(self) -> int:
        """Return the maximum number of tokens in the context."""
        return self.k.shape[1] - self.block

    @property
    def end(self) -> int:
        """Return the index of the slot after the context."""
        return self.block + self.length

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def sizes(self) -> Hashable:
        """Return a key that is equal for caches that are interchangeable in a `MemoryPool`."""
        return self.k.shape, self.k.dtype, self.k.device, self.block

    def clear(self) -> None:
        """Reset the cache to its initial state. All slots are set to zero, because kernels may read
        slots that were never written. The values in these slots do not affect results.
        """
        self.k.zero_()
        self.v.zero_()
        self.length = 0

    def copy_context(self, other: "BranchCache", length: int) -> None:
        """Copy the first `length` tokens of another cache's context."""
        own, others = (
            slice(self.block, self.block + length),
            slice(other.block, other.block + length),
        )
        self.k[:, own] = other.k[:, others]
        self.v[:, own] = other.v[:, others]
        self.length = length

    def clone(self) -> "BranchCache":
        """Return a copy in new memory."""
        return BranchCache(self.k.clone(), self.v.clone(), self.length, self.block)

    def to(self, device: torch.device | str) -> None:
        self.k, self.v = self.k.to(device), self.v.to(device)


def padded_capacity(tokens: int) -> int:
    """Round a context length up to a cache capacity, so that requests with other prompts can reuse
    the cache.
    """
    return -(-tokens // _CAPACITY_STEP) * _CAPACITY_STEP


@dataclass(frozen=True)
class CacheWrite:
    """A cache write, which stores the keys and values of some tokens."""

    expert: Expert
    """Expert of the tokens."""
    tokens: slice
    """Range of the tokens among the expert's tokens."""
    cache: BranchCache
    """Cache that the keys and values are written to."""
    start: int
    """Index of the first slot to write."""

    @property
    def slots(self) -> slice:
        """Return the range of slots to write."""
        return slice(self.start, self.start + self.tokens.stop - self.tokens.start)


@dataclass(frozen=True)
class CacheAttention:
    """An attention job, in which some tokens attend to a cache."""

    expert: Expert
    """Expert of the tokens."""
    tokens: slice
    """Range of the tokens among the expert's tokens."""
    cache: BranchCache
    """Cache that the tokens attend to."""
    keys: int | None
    """Number of leading context tokens to attend to. None: attend to the block and the whole
    context.
    """
    causal: bool = False
    """Whether attention is causal: the last query attends to all keys, the second to last query
    to one key fewer, and so on.
    """


@dataclass(frozen=True)
class TokenPack:
    """The tokens of one forward pass of `Qwen2MoTForCausalLM`. The dictionaries have no entry for
    an expert without tokens.
    """

    embeds: dict[Expert, torch.Tensor]
    """Embeddings of each expert's tokens, [T, D]."""
    rope: dict[Expert, tuple[torch.Tensor, torch.Tensor]]
    """Rotary tables (cos_TC, sin_TC) for each expert's tokens, fp32."""
    stores: list[CacheWrite]
    """Cache writes, which every layer performs."""
    attends: list[CacheAttention]
    """Attention jobs, which every layer runs."""
    seen: dict[BranchCache, torch.Tensor]
    """For attention to blocks, the range of keys in each cache: 0 and the total number of slots in
    the block and the context, int32 [2]. The ranges are on the device, so a CUDA graph of the
    forward pass can be used for contexts of any length.
    """

    @property
    def caches(self) -> list[BranchCache]:
        """Return the caches that the forward pass reads or writes, without duplicates."""
        return list(dict.fromkeys(store.cache for store in self.stores))

    @property
    def key(self) -> Hashable:
        """Return a key that identifies the forward pass: its writes and reads, with each cache
        replaced by its index in `caches`. All denoise steps for images or videos of the same size
        have the same key.
        """
        number = {cache: index for index, cache in enumerate(self.caches)}
        stores = (
            (x.expert, x.tokens.start, x.tokens.stop, number[x.cache], x.start) for x in self.stores
        )
        attends = (
            (x.expert, x.tokens.start, x.tokens.stop, number[x.cache], x.keys, x.causal)
            for x in self.attends
        )
        return tuple(stores), tuple(attends)


@dataclass
class PackBuilder:
    """Collects the tokens of several requests for one forward pass."""

    embeds: dict[Expert, list[torch.Tensor]] = field(default_factory=lambda: {"und": [], "gen": []})
    """Token embeddings of each expert, as a list of tensors [T, D]."""
    rope: dict[Expert, list[tuple[torch.Tensor, torch.Tensor]]] = field(
        default_factory=lambda: {"und": [], "gen": []}
    )
    """Cosines and sines for the tokens of `embeds`."""
    counts: dict[Expert, int] = field(default_factory=lambda: {"und": 0, "gen": 0})
    """Number of tokens per expert."""
    stores: list[CacheWrite] = field(default_factory=list)
    """Writes to the caches."""
    attends: list[CacheAttention] = field(default_factory=list)
    """Attention jobs, in the order in which they were added."""
    seen: dict[BranchCache, torch.Tensor] = field(default_factory=dict)
    """Value of `TokenPack.seen`."""

    def add_tokens(
        self,
        expert: Expert,
        embeds_TD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: BranchCache,
        start: int,
    ) -> slice:
        """Add tokens, whose keys and values are written to consecutive slots starting at `start`.
        Return the range of the new tokens among the expert's tokens.
        """
        first = self.counts[expert]
        tokens = slice(first, first + embeds_TD.shape[0])
        self.counts[expert] = tokens.stop
        self.embeds[expert].append(embeds_TD)
        self.rope[expert].append(rope)
        self.stores.append(CacheWrite(expert, tokens, cache, start))
        return tokens

    def attend_to_block(
        self, expert: Expert, tokens: slice, cache: BranchCache, seen: torch.Tensor
    ) -> None:
        """Add a job in which tokens attend to a cache's block and context. `seen` is an entry of
        `TokenPack.seen`.
        """
        self.seen[cache] = seen
        self.attends.append(CacheAttention(expert, tokens, cache, None))

    def attend(
        self, expert: Expert, tokens: slice, cache: BranchCache, keys: int, *, causal: bool
    ) -> None:
        """Add a job in which tokens attend to a context.

        A causal run of tokens that directly continues the previous run is merged into the previous
        run's job.
        """
        last = self.attends[-1] if self.attends else None
        if (
            causal
            and last is not None
            and last.causal
            and (last.expert, last.cache) == (expert, cache)
            and last.tokens.stop == tokens.start
            and last.keys is not None
            and last.keys + tokens.stop - tokens.start == keys
        ):
            self.attends[-1] = CacheAttention(
                expert, slice(last.tokens.start, tokens.stop), cache, keys, causal=True
            )
            return
        self.attends.append(CacheAttention(expert, tokens, cache, keys, causal))

    @property
    def empty(self) -> bool:
        return not self.attends

    def build(self) -> TokenPack:
        present: list[Expert] = [expert for expert, count in self.counts.items() if count]
        return TokenPack(
            embeds={expert: torch.cat(self.embeds[expert]) for expert in present},
            rope={
                expert: (
                    torch.cat([cos for cos, _ in self.rope[expert]]),
                    torch.cat([sin for _, sin in self.rope[expert]]),
                )
                for expert in present
            },
            stores=self.stores,
            attends=self.attends,
            seen=self.seen,
        )
