# SPDX-License-Identifier: Apache-2.0
"""`SharedPrompts`: the newest prompt's cross-attention K/V, computed once for all sessions that ask for it in a row."""

from collections.abc import Callable, Hashable

import torch

from vllm_omni.model_executor.lora.active import weights_key


class SharedPrompts:
    """compute: encoded prompt -> K/V; a collective under tensor parallelism.

    One prompt is kept for the next session (up to 400 MiB at full size); live sessions keep their own besides.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute
        self._newest: tuple[Hashable, torch.Tensor] | None = None

    def get(self, prompt: str, text: torch.Tensor) -> torch.Tensor:
        """Return the K/V of `prompt`, whose encoding is `text`, under the adapters in use.

        Shared by everyone who asks: read it only.
        """
        key = prompt, weights_key()
        if self._newest is None or self._newest[0] != key:
            self._newest = key, self._compute(text)
        return self._newest[1]

    def forget(self) -> None:
        """Drop the prompt (the weights were loaded anew)."""
        self._newest = None
