# SPDX-License-Identifier: Apache-2.0
"""Share a prompt's cross-attention K/V between sessions (`SharedPrompts`). If consecutive sessions
have the same prompt, the K/V are computed only once.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.lora.active import weights_key
from vllm_omni.model_executor.models.wan.text_encoder.encoder import AwaitedText, TextEncoder
from vllm_omni.model_executor.streaming.session import StreamingChunk


class SharedPrompts:
    """Caches the latest prompt's K/V (up to 400 MiB for the released models). In addition, each
    live session references its own prompt's K/V.

    Args:
        compute: Function that computes K/V from text embeddings. It is collective under tensor
            parallelism.
    """

    def __init__(self, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._compute = compute
        self._newest: tuple[Hashable, torch.Tensor] | None = None

    def get(self, prompt: str, text: torch.Tensor) -> torch.Tensor:
        """Return the K/V for `prompt`, computed with the active adapters from the prompt's text
        embeddings, `text`.

        Callers share the result, so they must not write to it.
        """
        key = prompt, weights_key()
        if self._newest is None or self._newest[0] != key:
            self._newest = key, self._compute(text)
        return self._newest[1]

    def complete_chunk(self, chunk: StreamingChunk[Any, Any]) -> None:
        """Set the K/V for a chunk's prompt if they are not already set. This is collective under
        tensor parallelism.
        """
        if chunk.cross_kv is None:
            assert chunk.text is not None
            chunk.cross_kv = self.get(chunk.prompt, chunk.text)

    def clear_prompt(self) -> None:
        """Clear the cache. Call this after weights have been reloaded."""
        self._newest = None


class HoldsPrompt(Protocol):
    """A session or a chunk in flight that a new chunk continues."""

    @property
    def prompt(self) -> str | None:
        """Prompt of the session or chunk. None if the session has no chunk yet."""

    @property
    def cross_kv(self) -> torch.Tensor | None:
        """Cross-attention K/V for the prompt. None if they are not available."""


def known_cross_kv(before: HoldsPrompt, prompt: str, *, same_adapters: bool) -> torch.Tensor | None:
    """Return the K/V that a chunk with `prompt` can reuse, or None if its prompt must be encoded.

    Args:
        before: Session or chunk that the new chunk continues.
        prompt: Prompt of the new chunk.
        same_adapters: Value of `DiffusionRequest.same_adapters`. If false, K/V are not reused.
    """
    return before.cross_kv if same_adapters and prompt == before.prompt else None


def encode_prompt(
    request: DiffusionRequest[Any, Any],
    prompt: str,
    before: HoldsPrompt,
    encoder: TextEncoder | AwaitedText,
    device: torch.device,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the text embeddings for a chunk's prompt, and the result of `known_cross_kv`. Exactly
    one of the two is None.

    Args:
        request: The chunk request.
        prompt: Prompt of the chunk.
        before: Session or chunk that the new chunk continues.
        encoder: Text encoder, used only if no K/V can be reused.
        device: Device for the embeddings.
    """
    with request.timer.stage("text"):
        known = known_cross_kv(before, prompt, same_adapters=request.same_adapters)
        return (encoder.encode(prompt, device) if known is None else None), known
