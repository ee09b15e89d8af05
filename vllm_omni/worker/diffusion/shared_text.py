# SPDX-License-Identifier: Apache-2.0
"""`SharedText`: the rows of prompts on their way from the one rank that encodes to all others with layers.

The first rank of the first stage holds the text encoder. When the ranks that share its stage have agreed on a chunk's
first step, it sends them the rows; with the hidden states of that step they travel on, from each rank to its
counterpart on the next stage. So rows are exchanged for just those chunks, and in just that order, in which forwards
are. Knows no model by name. Held by tests/worker/test_shared_text.py and tests/engine/test_shared_text_engine.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import GroupCoordinator

from vllm_omni.model_executor.interfaces import DiffusionRequest, SupportsSharedText
from vllm_omni.worker.diffusion.link import padding, together, unpack

_ROWS = "text"
_COUNTS = "text.counts"


class SharedText:
    """tensor: vLLM's group of the ranks that share layers. first_stage: whether its first rank holds the encoder."""

    def __init__(self, model: object, tensor: GroupCoordinator, *, first_stage: bool) -> None:
        self._model: SupportsSharedText[Any, Any] | None = model if isinstance(model, SupportsSharedText) else None
        self._tensor = tensor
        self._first_stage = first_stage

    def complete(self, beginning: Sequence[DiffusionRequest], received: Mapping[str, torch.Tensor]) -> None:
        """Fill the rows of chunks that are about to take their first step (collective among ranks that share layers).

        received: the previous stage's message. Raises RuntimeError if it lacks rows.
        """
        if self._model is None:
            return
        if self._first_stage:
            for request in beginning:
                for rows in self._model.texts(request):
                    self._tensor.broadcast(rows, src=0)
            return
        sent = unpack(_ROWS, received)
        counts = [count for count in received[_COUNTS].tolist() if count >= 0] if sent else [0] * len(beginning)
        for request, count in zip(beginning, counts, strict=True):
            arrived, sent, own = sent[:count], sent[count:], self._model.texts(request)
            if own and len(own) != count:
                raise RuntimeError(
                    f"an earlier pipeline stage sent {count} prompts of a chunk that has {len(own)} here"
                )
            for rows, values in zip(own, arrived, strict=False):  # none here: this stage knows the prompt
                rows.copy_(values)

    def message(self, beginning: Sequence[DiffusionRequest]) -> dict[str, torch.Tensor]:
        """The same rows for the next stage, beside the hidden states."""
        if self._model is None:
            return {}
        texts = [self._model.texts(request) for request in beginning]
        rows = [one for each in texts for one in each]
        if not rows:
            return {}
        ranks = self._tensor.world_size
        counts = [len(each) for each in texts]
        counts += [-1] * padding(len(counts), ranks)
        return {**together(_ROWS, rows, ranks), _COUNTS: torch.tensor(counts, dtype=torch.int64)}
