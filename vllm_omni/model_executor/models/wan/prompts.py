# SPDX-License-Identifier: Apache-2.0
"""`SharedPrompts`: the newest prompt's cross-attention K/V, computed once for all sessions that ask for it in a row."""

from collections import OrderedDict
from collections.abc import Callable

import torch

_KEPT = 1
"""Prompts kept for the next session (up to 400 MiB each at full size); live sessions keep their own besides."""


class SharedPrompts:
    """compute: encoded prompt -> K/V; a collective under tensor parallelism."""

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute
        self._known: OrderedDict[str, torch.Tensor] = OrderedDict()

    def get(self, prompt: str, text: torch.Tensor) -> torch.Tensor:
        """Return the K/V of `prompt`, whose encoding is `text`; shared by everyone who asks: read it only."""
        cross_kv = self._known.get(prompt)
        if cross_kv is None:
            cross_kv = self._compute(text)
            while len(self._known) >= _KEPT:
                self._known.popitem(last=False)
        self._known[prompt] = cross_kv
        self._known.move_to_end(prompt)
        return cross_kv

    def forget(self) -> None:
        """Drop every prompt (the weights were loaded anew)."""
        self._known.clear()
