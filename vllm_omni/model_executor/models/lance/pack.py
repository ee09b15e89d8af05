# SPDX-License-Identifier: Apache-2.0
"""One forward's work: tokens of many requests in two contiguous lists, and who attends to which cache.

The decoder has two experts, `und` (text, vision, markers) and `gen` (latents). Each expert's tokens of all requests lie
side by side, so that every matrix product runs once. Attention is a list of small jobs: a contiguous run of one
expert's queries against the first `keys` slots of one cache. Within a bidirectional block the order of keys does not
matter, so a block's two markers and its latents may lie in the cache in any order.
"""

# T tokens, D width, C rotary lanes

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

import torch

Expert = Literal["und", "gen"]


@dataclass(eq=False)
class BranchCache:
    """Keys and values of one context on this rank, and room behind it for the block that is being denoised.

    k, v: [L, capacity, K, H]. `length` slots are the context: a denoise step writes behind them and never moves it.
    """

    k: torch.Tensor
    v: torch.Tensor
    length: int = 0

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    def copy_context(self, other: "BranchCache", length: int) -> None:
        """Take over the first `length` slots of another cache."""
        self.k[:, :length] = other.k[:, :length]
        self.v[:, :length] = other.v[:, :length]
        self.length = length

    def clone(self) -> "BranchCache":
        """Return a copy in new memory."""
        return BranchCache(self.k.clone(), self.v.clone(), self.length)

    def to(self, device: torch.device | str) -> None:
        self.k, self.v = self.k.to(device), self.v.to(device)


@dataclass(frozen=True)
class Store:
    """Write the keys and values of `tokens` into `cache` from slot `start` on."""

    expert: Expert
    tokens: slice
    cache: BranchCache
    start: int


@dataclass(frozen=True)
class Attend:
    """Let `tokens` attend to the first `keys` slots. causal: the last query sees them all, the one before one less."""

    expert: Expert
    tokens: slice
    cache: BranchCache
    keys: int
    causal: bool


@dataclass(frozen=True)
class Pack:
    """Tokens of one forward of `Qwen2MoTForCausalLM`. A missing expert has no tokens; rope: (cos_TC, sin_TC) fp32."""

    embeds: dict[Expert, torch.Tensor]
    rope: dict[Expert, tuple[torch.Tensor, torch.Tensor]]
    stores: list[Store]
    attends: list[Attend]

    @property
    def caches(self) -> list[BranchCache]:
        """Those that it writes to and reads, each once."""
        return list(dict.fromkeys(store.cache for store in self.stores))

    @property
    def key(self) -> Hashable:
        """Its writes and reads, with caches as numbers of `caches`: equal for all steps of a drawing."""
        number = {cache: index for index, cache in enumerate(self.caches)}
        stores = ((x.expert, x.tokens.start, x.tokens.stop, number[x.cache], x.start) for x in self.stores)
        attends = ((x.expert, x.tokens.start, x.tokens.stop, number[x.cache], x.keys, x.causal) for x in self.attends)
        return tuple(stores), tuple(attends)


@dataclass
class PackBuilder:
    """Collects the tokens of several requests."""

    embeds: dict[Expert, list[torch.Tensor]] = field(default_factory=lambda: {"und": [], "gen": []})
    rope: dict[Expert, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=lambda: {"und": [], "gen": []})
    counts: dict[Expert, int] = field(default_factory=lambda: {"und": 0, "gen": 0})
    stores: list[Store] = field(default_factory=list)
    attends: list[Attend] = field(default_factory=list)

    def add(
        self,
        expert: Expert,
        embeds_TD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: BranchCache,
        start: int,
    ) -> slice:
        """Add tokens whose keys go to `cache` from `start`; returns where they lie among the expert's tokens."""
        first = self.counts[expert]
        tokens = slice(first, first + embeds_TD.shape[0])
        self.counts[expert] = tokens.stop
        self.embeds[expert].append(embeds_TD)
        self.rope[expert].append(rope)
        self.stores.append(Store(expert, tokens, cache, start))
        return tokens

    def attend(self, expert: Expert, tokens: slice, cache: BranchCache, keys: int, *, causal: bool) -> None:
        """Let tokens of this forward attend. A causal run that continues the previous one becomes one job."""
        last = self.attends[-1] if self.attends else None
        if (
            causal
            and last is not None
            and last.causal
            and (last.expert, last.cache) == (expert, cache)
            and last.tokens.stop == tokens.start
            and last.keys + tokens.stop - tokens.start == keys
        ):
            self.attends[-1] = Attend(expert, slice(last.tokens.start, tokens.stop), cache, keys, causal=True)
            return
        self.attends.append(Attend(expert, tokens, cache, keys, causal))

    @property
    def empty(self) -> bool:
        return not self.attends

    def build(self) -> Pack:
        present: list[Expert] = [expert for expert, count in self.counts.items() if count]
        return Pack(
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
        )
