# SPDX-License-Identifier: Apache-2.0
"""`SharedText`: sends text embeddings from the rank with the text encoder to all ranks with layers.

The first rank of the first stage holds the text encoder. When the ranks of this stage have agreed
on the first step of a chunk, the first rank broadcasts the embeddings to the other ranks of the
stage. Each rank then sends the embeddings, together with the hidden states of that step, to its
counterpart on the next stage. Embeddings are therefore transferred for exactly the chunks that run
forward passes, and in the same order. This module does not depend on a model.
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
    """Distributes text embeddings; each rank has one instance.

    Args:
        model: The model. Nothing is distributed unless the model implements `SupportsSharedText`.
        tensor: vLLM's group coordinator for the ranks that share layers.
        first_stage: Whether the first rank of the group holds the text encoder.
    """

    def __init__(self, model: object, tensor: GroupCoordinator, *, first_stage: bool) -> None:
        self._model: SupportsSharedText[Any, Any] | None = (
            model if isinstance(model, SupportsSharedText) else None
        )
        self._tensor = tensor
        self._first_stage = first_stage

    def complete(
        self, first_part: Sequence[DiffusionRequest], received: Mapping[str, torch.Tensor]
    ) -> None:
        """Fill in the embeddings of chunks before their first step (collective on each stage).

        Args:
            first_part: Chunks that are about to run their first step.
            received: Message from the previous stage; empty on the first stage.

        Raises:
            RuntimeError: The previous stage has sent a different number of embeddings than a chunk
                needs.
        """
        if self._model is None:
            return
        if self._first_stage:
            for request in first_part:
                for embeddings in self._model.texts(request):
                    self._tensor.broadcast(embeddings, src=0)
            return
        sent = unpack(_ROWS, received)
        counts = (
            [count for count in received[_COUNTS].tolist() if count >= 0]
            if sent
            else [0] * len(first_part)
        )
        for request, count in zip(first_part, counts, strict=True):
            arrived, sent, own = sent[:count], sent[count:], self._model.texts(request)
            if own and len(own) != count:
                raise RuntimeError(
                    f"an earlier pipeline stage sent {count} prompts of a chunk that has "
                    f"{len(own)} here"
                )
            # `own` is empty if this stage already has the embeddings of the prompt.
            for embeddings, values in zip(own, arrived, strict=False):
                embeddings.copy_(values)

    def message(self, first_part: Sequence[DiffusionRequest]) -> dict[str, torch.Tensor]:
        """Return the chunks' embeddings as tensors to send to the next stage together with the
        hidden states.
        """
        if self._model is None:
            return {}
        texts = [self._model.texts(request) for request in first_part]
        embeddings = [one for each in texts for one in each]
        if not embeddings:
            return {}
        ranks = self._tensor.world_size
        counts = [len(each) for each in texts]
        counts += [-1] * padding(len(counts), ranks)
        return {
            **together(_ROWS, embeddings, ranks),
            _COUNTS: torch.tensor(counts, dtype=torch.int64),
        }
