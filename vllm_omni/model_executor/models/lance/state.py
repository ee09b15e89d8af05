# SPDX-License-Identifier: Apache-2.0
"""A Lance session's state between requests (`LanceSession`).

Image and video requests leave no state. If several requests generate one text
(`options.chunk_tokens`), the session retains the K/V cache of the prompt and the text, and each
later request continues the text. If a request fails or is aborted, the session's state does not
change, because the cache entries that the request wrote lie beyond the committed length.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_omni.model_executor.interfaces import SessionState
from vllm_omni.model_executor.models.lance.config import Task
from vllm_omni.model_executor.models.lance.network.pack import BranchCache
from vllm_omni.model_executor.models.lance.tasks.understanding import (
    TextRules,
    UnderstandingProgress,
)


@dataclass(frozen=True)
class TextReply:
    """State of a partly generated text between two of the requests that generate it."""

    task: Task
    """The first request's task."""
    cache: BranchCache
    """K/V cache of the prompt and the text."""
    rules: TextRules
    """Rules for sampling tokens and for ending the text."""
    chunk_tokens: int
    """Number of text tokens per request."""
    prompt_tokens: int
    """Number of tokens in the prompt."""
    progress: UnderstandingProgress
    """Tokens that have been decoded."""


class LanceSession(SessionState):
    """A Lance session.

    Args:
        session_id: Id of the session.
        reserved_bytes: Maximum size in bytes of the state for the session's requests, including the
            caches of requests in flight.
    """

    def __init__(self, session_id: str, reserved_bytes: int) -> None:
        super().__init__(session_id)
        self.reserved_bytes = reserved_bytes
        self.reply: TextReply | None = None

    @property
    def nbytes(self) -> int:
        return self.reserved_bytes

    def tensors(self) -> dict[str, torch.Tensor]:
        if self.reply is None:
            return {}
        length = self.reply.progress.length
        return {"k": self.reply.cache.k[:, :length], "v": self.reply.cache.v[:, :length]}

    def scalars(self) -> dict[str, Any]:
        progress = None if self.reply is None else self.reply.progress
        return {
            "chunk_index": self.chunk_index,
            "tokens": [] if progress is None else list(progress.tokens),
            "finish_reason": None if progress is None else progress.finish_reason,
        }

    def fork(self, session_id: str) -> "LanceSession":
        other = LanceSession(session_id, self.reserved_bytes)
        other.chunk_index = self.chunk_index
        if self.reply is not None:
            other.reply = replace(self.reply, cache=self.reply.cache.clone())
        return other

    def to(self, device: torch.device | str) -> None:
        if self.reply is None:
            return
        self.reply.cache.to(device)
        newest = self.reply.progress.newest
        if newest is not None:
            self.reply = replace(
                self.reply, progress=replace(self.reply.progress, newest=newest.to(device))
            )

    def close(self) -> None:
        self.reply = None
