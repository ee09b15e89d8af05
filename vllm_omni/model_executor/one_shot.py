# SPDX-License-Identifier: Apache-2.0
"""`OneShotSession`: the session of a single image or video request. The session ends with the
request.
"""

from typing import Any

import torch

from vllm_omni.model_executor.interfaces import SessionState


class OneShotSession(SessionState):
    """A session that keeps no state between chunks.

    Args:
        session_id: Id of the session to create.
        nbytes: Maximum size of the request's working set in bytes, for admission by size.
    """

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
