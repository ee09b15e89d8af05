# SPDX-License-Identifier: Apache-2.0
"""Replay the latent frames of a fused decoder as CUDA graphs, for ranks that decode in bands and
wait for each host.

A graph reads and writes features at fixed addresses. A stream's features are copied there before
its chunk and back after it, except if the same stream was decoded last. The buffers fit streams of
one size, that of the first stream (warm-up's), because memory for other sizes was not measured. A
graph contains halo exchanges with sizes that depend on the height of the whole frame. Ranks must
therefore agree on the size, even if two heights give one rank bands of the same shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_omni.model_executor.layers.cuda_graphs import Capture, ForwardGraphs, identity

LatentPass = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
"""(latent frame, features, which are replaced in place) -> frames."""


class DecoderGraphs:
    """CUDA graphs of one decoder. For `capture` see `ForwardGraphs`."""

    def __init__(self, capture: Capture | None = None) -> None:
        self._graphs = ForwardGraphs(capture=capture)
        self.buffers: list[torch.Tensor] = []
        """Buffers of the features; empty until the first stream."""
        self._latent_height: int | None = None
        self._started = False
        """Whether the first frame of a stream has run, equal on all ranks, although a capture may
        fail on one of them."""
        self._sessions: int | None = None
        """Number of the first feature that was copied out of the buffers, if the buffers are still
        unchanged."""

    def serve(self, features: Sequence[torch.Tensor], latent_height: int | None = None) -> bool:
        """Return whether streams with such features use the graphs. The first call decides.

        `latent_height` is that of the whole frame if the features are a band's.
        """
        if not self.buffers:
            self.buffers, self._latent_height = (
                [torch.empty_like(feature) for feature in features],
                latent_height,
            )
        same = [position.shape for position in self.buffers] == [
            feature.shape for feature in features
        ]
        return same and self._latent_height == latent_height

    def __call__(
        self, x_BCTHW: torch.Tensor, features: list[Any], run: LatentPass, *, first: bool
    ) -> tuple[torch.Tensor, list[Any]]:
        """Decode one latent frame.

        Args:
            x_BCTHW: The latent frame.
            features: Features accepted by `serve`, or the buffers.
            run: The eager decode.
            first: This is the first frame of a stream, and `features` are zeros.

        Returns:
            Frames and features. The features are the buffers; `kept` copies them out.
        """
        # A first frame is eager the first time only. Warm-up then runs it again, which captures it.
        twice = first and not self._started
        self._started |= first
        for _ in range(2 if twice else 1):
            self._take(features)
            frames = self._graphs(first, {"x": x_BCTHW}, lambda own: run(own["x"], self.buffers))
        return frames, self.buffers

    def pool(self, features: list[Any]) -> list[Any]:
        """Return features that the next decode does not overwrite."""
        if features is not self.buffers:
            return features
        copies = [position.clone() for position in features]
        self._sessions = identity(copies[0])
        return copies

    def clear_graphs(self) -> None:
        """Invalidate the graphs, because weights have changed."""
        self._graphs.clear_graphs()
        self.buffers, self._sessions, self._started = [], None, False

    def _take(self, features: list[torch.Tensor]) -> None:
        there = features is self.buffers or self._sessions == identity(features[0])
        self._sessions = None
        if not there:
            for position, feature in zip(self.buffers, features, strict=True):
                position.copy_(feature)
