# SPDX-License-Identifier: Apache-2.0
"""Ulysses sequence parallelism for latents. Each rank holds all weights and some of the `gen`
tokens.

Contexts are short, but a long video has many latents, so every rank processes all `und` tokens, and
only `gen` tokens are sharded. During attention, each rank processes a subset of the heads for all
tokens. An all-to-all reshards the `gen` tensors from tokens to heads before attention, and back
after it. For `und` tokens, each rank computes attention only for its own heads, and an all-gather
collects the results of all ranks. A rank's caches contain only the rank's own heads. Without
sequence parallelism, the methods of `TokenSplit` return their inputs unchanged.
"""

# T tokens, t of them on this rank, N query heads, K key/value heads, H head dim, D width; _r: this
# rank's part

from dataclasses import dataclass

import torch
import torch.distributed as dist

from vllm_omni.model_executor.layers.collectives.head_all_to_all import (
    heads_to_tokens,
    tokens_to_heads,
)
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.models.lance.config import LanceConfig
from vllm_omni.model_executor.models.lance.network.pack import Expert, TokenPack

Rope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadShare:
    """The query heads of one rank, and the K/V heads that they use."""

    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of K/V heads."""
    first_head: int
    """Index of the first query head."""
    first_kv_head: int
    """Index of the first K/V head."""

    @property
    def kv(self) -> slice:
        return slice(self.first_kv_head, self.first_kv_head + self.kv_heads)


def head_share(config: LanceConfig, size: int, rank: int) -> HeadShare | None:
    """Return the heads for rank `rank` out of `size` ranks, or None if the query heads or the K/V
    heads cannot be divided evenly.

    If there are more ranks than K/V heads, every rank holds a copy of the K/V head that its query
    heads use.
    """
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % size or (kv_heads % size and size % kv_heads):
        return None
    return HeadShare(
        heads // size, max(1, kv_heads // size), rank * (heads // size), rank * kv_heads // size
    )


class TokenSplit:
    """Reshards tensors between tokens and heads. The constructor raises ValueError if the heads
    cannot be divided evenly across the sequence-parallel ranks.
    """

    def __init__(self, config: LanceConfig, parallel: ParallelContext) -> None:
        heads, kv_heads = config.num_heads, config.num_kv_heads
        size = parallel.size if parallel.sequence_parallel else 1
        self._parallel = parallel
        shares = [
            share for rank in range(size) if (share := head_share(config, size, rank)) is not None
        ]
        if not shares:
            raise ValueError(
                f"{heads} heads and {kv_heads} key/value heads do not divide over {size} "
                "sequence-parallel ranks; use "
                f"a --tensor-parallel-size that divides {heads}"
            )
        self._shares = shares
        self._heads, self._kv_heads = shares[0].heads, shares[0].kv_heads

    @property
    def active(self) -> bool:
        return self._parallel.sequence_parallel

    @property
    def num_cache_heads(self) -> int:
        """Return the number of K/V heads in this rank's caches."""
        return self._kv_heads

    def own(self, pack: TokenPack) -> tuple[dict[Expert, torch.Tensor], dict[Expert, Rope]]:
        """Return the embeddings and rotary tables of the tokens that this rank processes."""
        if not self.active or "gen" not in pack.embeds:
            return dict(pack.embeds), dict(pack.rope)
        tokens = self._parallel.token_slice(pack.embeds["gen"].shape[0])
        cos, sin = pack.rope["gen"]
        embeds: dict[Expert, torch.Tensor] = {**pack.embeds, "gen": pack.embeds["gen"][tokens]}
        rope: dict[Expert, Rope] = {**pack.rope, "gen": (cos[tokens], sin[tokens])}
        return embeds, rope

    def to_heads(
        self,
        expert: Expert,
        q_tNH: torch.Tensor,
        k_tKH: torch.Tensor,
        v_tKH: torch.Tensor,
        num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return this rank's heads for all `num_tokens` tokens: queries [T, N_r, H], keys and
        values [T, K_r, H].
        """
        if not self.active:
            return q_tNH, k_tKH, v_tKH
        if expert == "und":
            share = self._shares[self._parallel.rank]
            own = slice(share.first_head, share.first_head + share.heads)
            return q_tNH[:, own], k_tKH[:, share.kv], v_tKH[:, share.kv]
        queries = q_tNH.split(self._heads, dim=1)
        sent = [
            part
            for q, share in zip(queries, self._shares, strict=True)
            for part in (q, k_tKH[:, share.kv], v_tKH[:, share.kv])
        ]
        (exchanged,) = tokens_to_heads(
            self._parallel, [torch.cat(sent, dim=1).unsqueeze(0)], num_tokens
        )
        q, k, v = exchanged[0].split([self._heads, self._kv_heads, self._kv_heads], dim=1)
        return q, k, v

    def to_tokens(self, expert: Expert, mixed_TNH: torch.Tensor) -> torch.Tensor:
        """Reshard attention results from this rank's heads [T, N_r, H] to its tokens [t, N, H]."""
        if not self.active:
            return mixed_TNH
        if expert == "gen":
            return heads_to_tokens(self._parallel, mixed_TNH.unsqueeze(0))[0]
        parts = [torch.empty_like(mixed_TNH) for _ in range(self._parallel.size)]
        dist.all_gather(parts, mixed_TNH.contiguous(), group=self._parallel.group)
        return torch.cat(parts, dim=1)

    def join(self, expert: Expert, rows_tD: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """All-gather hidden states, so that every rank has the hidden states of all tokens."""
        if not self.active or expert == "und":
            return rows_tD
        return self._parallel.gather_tokens(rows_tD.unsqueeze(0), num_tokens)[0]
