# SPDX-License-Identifier: Apache-2.0
"""The format of the thinker's reply in a talker request. The sender and the receiver both use this
module.

A talker request is a stock `mm_input`. The request contains the real prompt token ids, because
sampling penalties use them. It also contains one multimodal item of length zero, which carries the
tensors for the model. The sender chooses the `slot`, a number of at least 1 that no other request
in flight uses. Slot 0 is reserved for requests without an item (vLLM's own warm-up). The receiver
is `talker.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch

MODALITY = "thinker"


@dataclass(frozen=True)
class TalkerPrompt:
    """The talker's input for one reply. L is the number of prompt tokens, R the number of reply
    states, and D the talker's embedding size.
    """

    token_ids: list[int]
    """The prompt's L codec ids."""
    prompt_LD: torch.Tensor
    """Embedding of each prompt position: the sum of the hidden state and the token embedding. The
    last two positions also include codec embeddings."""
    reply_RD: torch.Tensor
    """Values to add to the codec embeddings of generated tokens. Row k belongs to generated token
    k, and the last row belongs to all tokens from k = R-1 on.
    """
    positions_3L: torch.Tensor
    """Rotary positions of the prompt, int64."""

    def __post_init__(self) -> None:
        length = len(self.token_ids)
        if (
            self.prompt_LD.shape[0] != length
            or self.positions_3L.shape != (3, length)
            or not len(self.reply_RD)
        ):
            raise ValueError(
                f"talker prompt of {length} tokens with {tuple(self.prompt_LD.shape)} embeddings, "
                f"{tuple(self.positions_3L.shape)} positions and {tuple(self.reply_RD.shape)} "
                "reply rows"
            )

    def to_engine_input(self, request_id: str, slot: int) -> Any:
        """Return the talker request as a prompt for `AsyncLLM.generate`."""
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import (
            MultiModalBatchedField,
            MultiModalFieldElem,
            MultiModalKwargsItem,
            MultiModalKwargsItems,
            PlaceholderRange,
        )

        tensors = {
            "prompt": self.prompt_LD,
            "reply": self.reply_RD,
            "positions": self.positions_3L,
            "slot": torch.tensor([slot]),
        }
        item = MultiModalKwargsItem(
            {
                name: MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=True))
                for name, data in tensors.items()
            }
        )
        return mm_input(
            prompt_token_ids=self.token_ids,
            mm_kwargs=MultiModalKwargsItems({MODALITY: [item]}),
            mm_hashes={MODALITY: [request_id]},
            mm_placeholders={MODALITY: [PlaceholderRange(offset=0, length=0)]},
        )


def read_item(data: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return `(prompt_LD, reply_RD, positions_3L, slot)` from a request's item. The worker calls
    this function.
    """
    prompt, reply, positions, slot = (
        data[name].data for name in ("prompt", "reply", "positions", "slot")
    )
    return prompt, reply, positions, int(slot.item())
