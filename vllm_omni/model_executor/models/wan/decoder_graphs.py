# SPDX-License-Identifier: Apache-2.0
"""A fused decoder's latent frames, launched as CUDA graphs: for ranks that decode in bands, and wait for each host.

A graph reads and writes features at fixed places, so a stream's are copied there before its chunk and from there behind
it; the stream that was decoded last finds its own. There are places for streams of one size, that of the first stream,
which is warm-up's: memory for others was not counted. A graph repeats exchanges whose sizes follow from the height of
the whole frame, so ranks must agree on the size, also where two heights give one of them bands of the same rows.
Held by tests/model_executor/models/wan/test_decoder_graphs.py.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_omni.model_executor.layers.forward_graphs import Capture, ForwardGraphs, identity

LatentPass = Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]
"""(latent frame, features, which are replaced in place) -> frames."""


class DecoderGraphs:
    """capture: see `ForwardGraphs`."""

    def __init__(self, capture: Capture | None = None) -> None:
        self._graphs = ForwardGraphs(capture=capture)
        self.places: list[torch.Tensor] = []
        """Of the features; empty until a stream comes."""
        self._latent_height: int | None = None
        self._begun = False
        """Whether a stream has begun here, on all ranks alike (a capture may fail on one of them)."""
        self._held: int | None = None
        """The number of the first feature that was copied from the places, if they are still as they were then."""

    def serve(self, features: Sequence[torch.Tensor], latent_height: int | None = None) -> bool:
        """Whether a stream with such features is decoded here; the first one decides.

        latent_height: of the whole frame, where features are those of a band.
        """
        if not self.places:
            self.places, self._latent_height = [torch.empty_like(feature) for feature in features], latent_height
        same = [place.shape for place in self.places] == [feature.shape for feature in features]
        return same and self._latent_height == latent_height

    def __call__(
        self, x_BCTHW: torch.Tensor, features: list[Any], run: LatentPass, *, first: bool
    ) -> tuple[torch.Tensor, list[Any]]:
        """Decode one latent frame; returns frames and features, which are the places: `kept` leaves them to others.

        features: those of `serve`, or the places. first: of a stream, and features are zeros.
        """
        # A first frame runs as it is when it comes for the first time: again, and warm-up has captured it.
        twice = first and not self._begun
        self._begun |= first
        for _ in range(2 if twice else 1):
            self._take(features)
            frames = self._graphs(first, {"x": x_BCTHW}, lambda own: run(own["x"], self.places))
        return frames, self.places

    def kept(self, features: list[Any]) -> list[Any]:
        """Features that the next decode leaves as they are."""
        if features is not self.places:
            return features
        copies = [place.clone() for place in features]
        self._held = identity(copies[0])
        return copies

    def forget(self) -> None:
        """Weights have changed."""
        self._graphs.forget()
        self.places, self._held, self._begun = [], None, False

    def _take(self, features: list[torch.Tensor]) -> None:
        there = features is self.places or self._held == identity(features[0])
        self._held = None
        if not there:
            for place, feature in zip(self.places, features, strict=True):
                place.copy_(feature)
