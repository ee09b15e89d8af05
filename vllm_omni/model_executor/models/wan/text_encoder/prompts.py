# SPDX-License-Identifier: Apache-2.0
"""`SharedPrompts`: cross-attention K/V of the latest prompt, computed once for consecutive sessions
that use it.
"""

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from vllm_omni.model_executor.layers.lora.active import weights_key


class SharedPrompts:
    """Cache of one prompt's K/V (up to 400 MiB at full size). In addition, live sessions hold their
    own K/V.

    Args:
        compute: Text embeddings -> K/V. Collective under tensor parallelism.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute
        self._newest: tuple[Hashable, torch.Tensor] | None = None

    def get(self, prompt: str, text: torch.Tensor) -> torch.Tensor:
        """Return the K/V of `prompt` with the text embeddings `text`, under the active adapters.

        All callers share the result, so it must not be written to.
        """
        key = prompt, weights_key()
        if self._newest is None or self._newest[0] != key:
            self._newest = key, self._compute(text)
        return self._newest[1]

    def clear_prompt(self) -> None:
        """Invalidate the cache, because weights were reloaded."""
        self._newest = None


class HoldsPrompt(Protocol):
    """A session or a chunk in flight, seen from the next chunk."""

    @property
    def prompt(self) -> str | None:
        """Its prompt. None: there was no chunk."""

    @property
    def cross_kv(self) -> torch.Tensor | None:
        """K/V of that prompt. None: they are not available."""


def known_cross_kv(before: HoldsPrompt, prompt: str, *, same_adapters: bool) -> torch.Tensor | None:
    """Return the K/V that a chunk with `prompt` can reuse. None: the chunk needs the text encoder.

    Args:
        before: The session or chunk that the new chunk continues.
        prompt: Prompt of the chunk.
        same_adapters: `DiffusionRequest.same_adapters`.
    """
    return before.cross_kv if same_adapters and prompt == before.prompt else None
