# SPDX-License-Identifier: Apache-2.0
"""A fused decoder's latent frames, launched as CUDA graphs: for ranks that decode in bands, and wait for each host.

A graph reads and writes features at fixed places, so a stream's are copied there before its chunk and from there behind
it; the stream that was decoded last finds its own. There are places for streams of one size, that of the first stream,
which is warm-up's: memory for others was not counted.
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
        self._held: int | None = None
        """The number of the first feature that was copied from the places, if they are still as they were then."""

    def serve(self, features: Sequence[torch.Tensor]) -> bool:
        """Whether a stream with such features is decoded here; the first one decides."""
        if not self.places:
            self.places = [torch.empty_like(feature) for feature in features]
        return [place.shape for place in self.places] == [feature.shape for feature in features]

    def __call__(
        self, x_BCTHW: torch.Tensor, features: list[Any], run: LatentPass, *, first: bool
    ) -> tuple[torch.Tensor, list[Any]]:
        """Decode one latent frame; returns frames and features, which are the places: `kept` leaves them to others.

        features: those of `serve`, or the places. first: of a stream, and features are zeros.
        """
        # A first frame runs as it is when it comes for the first time: again, and warm-up has captured it.
        for _ in range(2 if first and len(self._graphs) == 0 else 1):
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
        self.places, self._held = [], None

    def _take(self, features: list[torch.Tensor]) -> None:
        there = features is self.places or self._held == identity(features[0])
        self._held = None
        if not there:
            for place, feature in zip(self.places, features, strict=True):
                place.copy_(feature)
