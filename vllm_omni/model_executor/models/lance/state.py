# SPDX-License-Identifier: Apache-2.0
"""`LanceSession`: state that outlives a request, and `Answer`, one answer that is read in pieces.

A drawing leaves nothing behind. An answer read in pieces (`options.chunk_tokens`) lives in its
session: the cache of question and answer so far; each further request of the session decodes on. A
piece that is aborted or fails leaves the session as it was: its cache entries lie behind the
committed length.
Held by tests/model_executor/models/lance/test_lance_pipeline.py.
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
    """An answer between two of its pieces."""

    task: Task
    cache: BranchCache
    rules: TextRules
    chunk_tokens: int
    prompt_tokens: int
    progress: UnderstandingProgress


class LanceSession(SessionState):
    """reserved_bytes: the most that the session's requests may hold, caches in flight included."""

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
