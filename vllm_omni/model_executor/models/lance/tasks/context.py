# SPDX-License-Identifier: Apache-2.0
"""Write a request's context to a K/V cache. A context consists of text, vision embeddings and clean
reference latents.

A token attends to all tokens before it, and a token in a visual block attends to the whole block,
so one forward pass of the decoder processes the whole context.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from vllm_omni.model_executor.models.lance.network.pack import BranchCache, PackBuilder
from vllm_omni.model_executor.models.lance.network.transformer import LanceNetwork
from vllm_omni.model_executor.models.lance.tasks.sequence_layout import SequenceSegment, rope_tables

Rope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ContextSegment:
    """A segment of a context and the positions of its tokens."""

    segment: SequenceSegment
    """The segment."""
    positions_3T: torch.Tensor
    """Positions of the segment's tokens, int64 [3, length]."""


@dataclass(frozen=True)
class VisualContents:
    """Contents of the visual blocks in a context."""

    vit: torch.Tensor | None = None
    """Vision embeddings of the decoder's width, [n, D]. None if the context has no vision block."""
    reference: torch.Tensor | None = None
    """Clean latents of the reference, fp32 [n, 48]. None if the context has no reference block."""


class ContextWriter:
    """Adds contexts and generated blocks to a forward pass. `markers` contains the ids of a block's
    start and end tokens.
    """

    def __init__(self, network: LanceNetwork, markers: tuple[int, int]) -> None:
        self.network = network
        self._marker_ids = markers
        self._markers: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.network.language_model.device

    def embed(self, ids: Sequence[int]) -> torch.Tensor:
        return self.network.language_model.embed(
            torch.tensor(ids, dtype=torch.int64, device=self.device)
        )

    def markers(self) -> torch.Tensor:
        """Return the embeddings of a block's start and end tokens, [2, D]."""
        if self._markers is None or self._markers.device != self.device:
            self._markers = torch.tensor(self._marker_ids, dtype=torch.int64, device=self.device)
        return self.network.language_model.embed(self._markers)

    def rope(self, positions_3T: torch.Tensor) -> Rope:
        """Return the rotary tables for tokens at these positions. They are computed on the device
        of the positions, because the host is slow for many tokens and the device for few.
        """
        config = self.network.config
        cos, sin = rope_tables(
            positions_3T, config.head_dim, config.mrope_section, config.rope_theta
        )
        return cos.to(self.device), sin.to(self.device)

    def block_rope(self, positions_3T: torch.Tensor) -> tuple[Rope, Rope]:
        """Return the rotary tables for a visual block: one pair for its two markers and one for its
        grid cells.
        """
        positions_3T = positions_3T.to(self.device)
        return self.rope(positions_3T[:, [0, -1]]), self.rope(positions_3T[:, 1:-1])

    def position_values(self, grid: tuple[int, int, int]) -> torch.Tensor:
        """Return a latent grid's position embeddings, [n, D], in the model's dtype."""
        return self.network.latent_pos_embed.rows(
            *grid, self.device, self.network.language_model.dtype
        )

    def append_segments(
        self,
        builder: PackBuilder,
        cache: BranchCache,
        context: Sequence[ContextSegment],
        visuals: VisualContents,
    ) -> slice | None:
        """Append `context` to `cache`. Return the last text run's range among the `und` tokens, or
        None if there is no text.
        """
        last = None
        for placed in context:
            segment = placed.segment
            if segment.length == 0:
                continue
            end = cache.length + segment.length
            if segment.kind == "text":
                last = builder.add_tokens(
                    "und", self.embed(segment.ids), self.rope(placed.positions_3T), cache, cache.end
                )
                builder.attend("und", last, cache, end, causal=True)
            elif segment.kind == "vit":
                assert visuals.vit is not None
                rows = self.markers()
                rows = torch.cat((rows[:1], visuals.vit.to(rows.dtype), rows[1:]))
                tokens = builder.add_tokens(
                    "und", rows, self.rope(placed.positions_3T), cache, cache.end
                )
                builder.attend("und", tokens, cache, end, causal=False)
            else:
                assert visuals.reference is not None and segment.kind == "reference"
                time = self.network.time_embedder(torch.zeros(1, device=self.device))
                latents = self.network.embed_latents(
                    visuals.reference, time, self.position_values(segment.grid)
                )
                markers, cells = self._add_latents(
                    builder, cache, latents, self.block_rope(placed.positions_3T), cache.end
                )
                builder.attend("und", markers, cache, end, causal=False)
                builder.attend("gen", cells, cache, end, causal=False)
            cache.length = end
        return last

    def add_text_context(
        self, builder: PackBuilder, cache: BranchCache, context: Sequence[ContextSegment]
    ) -> None:
        """Write a context that contains only text to `cache`, padded to the cache's capacity.

        Because of the padding, a forward pass that only writes such contexts launches the same
        kernels for all prompts, so it can be a CUDA graph. No token of the context attends to the
        padding.
        """
        ids = [number for placed in context for number in placed.segment.ids]
        cache.length = len(ids)
        if not ids:
            return
        padding = 0, 0, 0, cache.capacity - len(ids)
        positions_3T = torch.cat([placed.positions_3T for placed in context], dim=1)
        cos, sin = self.rope(positions_3T.to(self.device))
        tokens = builder.add_tokens(
            "und",
            functional.pad(self.embed(ids), padding),
            (functional.pad(cos, padding), functional.pad(sin, padding)),
            cache,
            cache.block,
        )
        builder.attend("und", tokens, cache, cache.capacity, causal=True)

    def seen(self, end: int) -> torch.Tensor:
        """Return the `TokenPack.seen` entry for a cache whose context ends before slot `end`. Its
        range spans the slots of the generated block and the context.
        """
        return torch.tensor([0, end], dtype=torch.int32, device=self.device)

    def add_block(
        self,
        builder: PackBuilder,
        cache: BranchCache,
        latents_ND: torch.Tensor,
        rope: tuple[Rope, Rope],
        seen: torch.Tensor,
    ) -> slice:
        """Add the generated block, which is stored before the context, and return the range of its
        `gen` tokens. `seen` is the result of `self.seen(cache.end)`.
        """
        assert cache.block == 2 + latents_ND.shape[0]
        markers, cells = self._add_latents(builder, cache, latents_ND, rope, 0)
        builder.attend_to_block("und", markers, cache, seen)
        builder.attend_to_block("gen", cells, cache, seen)
        return cells

    def _add_latents(
        self,
        builder: PackBuilder,
        cache: BranchCache,
        latents_ND: torch.Tensor,
        rope: tuple[Rope, Rope],
        start: int,
    ) -> tuple[slice, slice]:
        """Add a latent block to the cache, starting at slot `start`. Return the ranges of its `und`
        and `gen` tokens.
        """
        markers = builder.add_tokens("und", self.markers(), rope[0], cache, start)
        return markers, builder.add_tokens("gen", latents_ND, rope[1], cache, start + 2)


def position_segments(
    segments: Sequence[SequenceSegment], positions: Sequence[torch.Tensor]
) -> list[ContextSegment]:
    return [
        ContextSegment(segment, where) for segment, where in zip(segments, positions, strict=True)
    ]
