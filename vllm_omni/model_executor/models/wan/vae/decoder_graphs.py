# SPDX-License-Identifier: Apache-2.0
"""Replay a fused decoder's passes over latent frames as CUDA graphs. Ranks that decode bands of
rows use these graphs, because without them, each rank would wait for the other ranks' kernel
launches.

A graph reads and writes features in buffers at fixed addresses. A stream's features are copied into
these buffers before its chunk is decoded, and copied out afterwards. The first copy is skipped if
the same stream was decoded last. Warm-up decodes the first stream, and the buffers have that
stream's size, because the memory for other sizes was not measured. A graph contains halo exchanges,
whose sizes depend on the whole frame's height. The ranks must therefore agree on the height, even
if two heights give one rank bands of the same shape.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_omni.model_executor.layers.cuda_graphs import Capture, ForwardGraphs, identity

LatentPass = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
"""Function that decodes a latent frame to video frames. Its arguments are the latent frame and the
features, which it replaces in place.
"""


class DecoderGraphs:
    """CUDA graphs for one decoder. `capture` is passed to `ForwardGraphs`."""

    def __init__(self, capture: Capture | None = None) -> None:
        self._graphs = ForwardGraphs(capture=capture)
        self.buffers: list[torch.Tensor] = []
        """Feature buffers. The list is empty until the first stream is decoded."""
        self._latent_height: int | None = None
        self._started = False
        """Whether the first frame of any stream has been decoded. The value is the same on all
        ranks, even if a capture fails on one of them.
        """
        self._sessions: int | None = None
        """The `identity` of the first tensor in the latest copy of the buffers. None if the buffers
        have changed since that copy.
        """

    def serve(self, features: Sequence[torch.Tensor], latent_height: int | None = None) -> bool:
        """Return whether streams whose features have these shapes use the graphs. The first call
        determines the shapes for which graphs are used.

        If the features belong to a band of rows, `latent_height` is the height of the whole frame.
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
            features: Features that `serve` accepts, or the buffers.
            run: Function that decodes eagerly.
            first: Whether this is the first frame of a stream. If so, `features` are zeros.

        Returns:
            The video frames and the features. The returned features are the buffers themselves;
            `pool` copies them.
        """
        # The very first frame is decoded twice: first eagerly, then to capture the graph.
        twice = first and not self._started
        self._started |= first
        for _ in range(2 if twice else 1):
            self._take(features)
            frames = self._graphs(first, {"x": x_BCTHW}, lambda own: run(own["x"], self.buffers))
        return frames, self.buffers

    def pool(self, features: list[Any]) -> list[Any]:
        """Return the features, copied if necessary, so that the next decode does not overwrite
        them.
        """
        if features is not self.buffers:
            return features
        copies = [position.clone() for position in features]
        self._sessions = identity(copies[0])
        return copies

    def clear_graphs(self) -> None:
        """Discard all graphs and buffers. Call this after the weights have changed."""
        self._graphs.clear_graphs()
        self.buffers, self._sessions, self._started = [], None, False

    def _take(self, features: list[torch.Tensor]) -> None:
        there = features is self.buffers or self._sessions == identity(features[0])
        self._sessions = None
        if not there:
            for position, feature in zip(self.buffers, features, strict=True):
                position.copy_(feature)
