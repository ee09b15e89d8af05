# SPDX-License-Identifier: Apache-2.0
"""Sizes of a stream's state on this rank, and K/V windows of these sizes.

This module computes the sizes and also builds the windows, so admission counts exactly the bytes
that a session allocates.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from vllm_omni.config import OmniConfig
from vllm_omni.model_executor.layers.collectives.parallel import ParallelContext
from vllm_omni.model_executor.layers.kv_cache.sink_window import (
    SinkWindow,
    sink_window_extra_nbytes,
)
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow, kv_window_nbytes
from vllm_omni.model_executor.models.causal_wan.cache import ChunkCache
from vllm_omni.model_executor.models.causal_wan.config import CausalWanConfig, CausalWanOptions
from vllm_omni.model_executor.models.causal_wan.transformer import CausalWanTransformer
from vllm_omni.model_executor.streaming.chunk_plan import ChunkPlan
from vllm_omni.model_executor.streaming.session import SessionShape


class StreamSizes:
    """Sizes of one stream's state.

    `spare_frames` contains each window's number of spare frames (see the `spare_frames` function).
    `own_step` is this stage's denoise step, if each stage owns one step. `kv_dtype` is the windows'
    storage dtype (None: the transformer's dtype).
    """

    def __init__(
        self,
        config: CausalWanConfig,
        options: CausalWanOptions,
        plan: ChunkPlan,
        transformer: CausalWanTransformer,
        spare_frames: Sequence[int] | None = None,
        own_step: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._kv_dtype = kv_dtype
        self._config, self._options, self._plan, self._transformer = (
            config,
            options,
            plan,
            transformer,
        )
        passes = options.text_schedule().num_steps + 1
        self._spare_frames = list(spare_frames or [0] * passes)
        self._own_step = own_step
        self._num_steps = options.text_schedule().num_steps
        slides = 0 < plan.sink_frames < plan.window_frames
        self._sinks_live = slides and (
            options.sink_position == "window" or options.sink_refresh_threshold is not None
        )

    def latent_shape(self, shape: SessionShape, num_frames: int) -> tuple[int, int, int, int]:
        """Return the latents' shape [16, F, h, w] for `num_frames` latent frames."""
        return (
            self._config.out_channels,
            num_frames,
            *self._config.latent_size(shape.height, shape.width),
        )

    def new_cache(self, shape: SessionShape) -> ChunkCache:
        """Build a stream's K/V windows."""

        def window(frames: int, sinks: int, spare: int) -> KVWindow:
            common: dict[str, Any] = {
                **self._window_sizes(shape),
                "window_frames": frames,
                "sink_frames": sinks,
                "spare_frames": spare,
                "device": self._transformer.device,
                "rings": self._transformer.rings,
            }
            if sinks == 0 or not self._sinks_live:
                return KVWindow(**common)
            return SinkWindow(
                moving=self._options.sink_position == "window",
                refresh_threshold=self._options.sink_refresh_threshold,
                **common,
            )

        plan, options = self._plan, self._options
        if options.cache == "noise_matched":
            windows = [
                window(plan.window_frames, plan.sink_frames, spare) for spare in self._step_spares()
            ]
            return ChunkCache.noise_matched(windows)
        return ChunkCache.strict(window(plan.window_frames, plan.sink_frames, 0))

    def past_nbytes(self, shape: SessionShape) -> int:
        """Return the maximum number of bytes that a session stores to recompute its window for a
        new prompt.
        """
        plan = self._plan
        frames = plan.window_frames + max(plan.first_chunk_frames, plan.chunk_frames)
        return self.cache_nbytes(shape) + 4 * math.prod(self.latent_shape(shape, frames))

    def _step_spares(self) -> list[int]:
        """Return the number of spare frames for each of a noise-matched stream's windows on this
        rank.
        """
        spares = self._spare_frames[: self._num_steps]
        return spares if self._own_step is None else [spares[self._own_step]]

    def cache_nbytes(self, shape: SessionShape) -> int:
        """Return the size of `new_cache` in bytes without allocating it."""
        sizes, plan, options = self._window_sizes(shape), self._plan, self._options
        evicts = plan.sink_frames < plan.window_frames

        def full(spare: int) -> int:
            ring = kv_window_nbytes(
                window_frames=plan.window_frames + (spare if evicts else 0), **sizes
            )
            sinks = (
                sink_window_extra_nbytes(sink_frames=plan.sink_frames, **sizes)
                if self._sinks_live
                else 0
            )
            return ring + sinks

        if options.cache == "noise_matched":
            return sum(full(spare) for spare in self._step_spares())
        return full(0)

    def _window_sizes(self, shape: SessionShape) -> dict[str, Any]:
        return {
            "num_layers": self._transformer.num_local_layers,
            "tokens_per_frame": self._config.tokens_per_frame(shape.height, shape.width),
            "num_heads": self._transformer.num_cache_heads,
            "head_dim": self._config.head_dim,
            "dtype": self._transformer.dtype,
            "storage": self._kv_dtype,
        }


def spare_frames(
    options: CausalWanOptions, plan: ChunkPlan, omni: OmniConfig, parallel: ParallelContext
) -> tuple[int, ...]:
    """Return the number of spare frames that each window's ring buffer needs for chunks in flight.

    With a noise-matched cache, step j of a chunk attends to the K/V that earlier chunks wrote at
    step j, so it can run as soon as the previous chunk has finished step j. The frames that this
    step's K/V would overwrite are retained as long as an uncommitted chunk that attends to them may
    be rerun.

    The spare frames hold the K/V that chunks may write ahead of the oldest uncommitted chunk. With
    one rank, a chunk is committed in the same engine step as its last forward pass. With several
    ranks, earlier stages are notified of the commit later.
    """
    if options.cache == "strict":
        return (0,)
    passes, spare = (
        options.text_schedule().num_steps,
        (omni.chunks_in_flight - 1) * plan.chunk_frames,
    )
    # With one rank, the frames of the last step are committed when they are written.
    return (spare,) * passes if parallel.num_stages > 1 else (*(spare,) * (passes - 1), 0)
