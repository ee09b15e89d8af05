# SPDX-License-Identifier: Apache-2.0
"""`SharedPrompts`: cross-attention K/V of the latest prompt, computed once for consecutive sessions
that use it.
"""

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from vllm_omni.model_executor.interfaces import DiffusionRequest
from vllm_omni.model_executor.layers.lora.active import weights_key
from vllm_omni.model_executor.models.wan.text_encoder.encoder import AwaitedText, TextEncoder
from vllm_omni.model_executor.streaming.session import StreamingChunk


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

    def complete_chunk(self, chunk: StreamingChunk[Any, Any]) -> None:
        """Set the K/V of a chunk's prompt unless they are known. Collective under tensor
        parallelism."""
        if chunk.cross_kv is None:
            assert chunk.text is not None
            chunk.cross_kv = self.get(chunk.prompt, chunk.text)

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


def encode_prompt(
    request: DiffusionRequest[Any, Any],
    prompt: str,
    before: HoldsPrompt,
    encoder: TextEncoder | AwaitedText,
    device: torch.device,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the text embeddings of a chunk's prompt and `known_cross_kv`, one of which is None.

    Args:
        request: Request of the chunk.
        prompt: Its prompt.
        before: What the chunk continues.
        encoder: Encodes the prompt, unless its K/V are known.
        device: Device of the embeddings.
    """
    with request.timer.stage("text"):
        known = known_cross_kv(before, prompt, same_adapters=request.same_adapters)
        return (encoder.encode(prompt, device) if known is None else None), known
