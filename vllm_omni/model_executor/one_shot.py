# SPDX-License-Identifier: Apache-2.0
"""`OneShotSession`: the session of a request that leaves nothing behind; it only carries bytes
for admission.
"""

from typing import Any

import torch

from vllm_omni.model_executor.interfaces import SessionState


class OneShotSession(SessionState):
    """nbytes: of the request's working set at its largest, so that admission by bytes counts it."""

    def __init__(self, session_id: str, nbytes: int) -> None:
        super().__init__(session_id)
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def scalars(self) -> dict[str, Any]:
        return {"chunk_index": self.chunk_index}

    def fork(self, session_id: str) -> "OneShotSession":
        return OneShotSession(session_id, self._nbytes)

    def to(self, device: torch.device | str) -> None: ...
