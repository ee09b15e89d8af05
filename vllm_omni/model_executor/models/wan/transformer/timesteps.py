# SPDX-License-Identifier: Apache-2.0
"""Timestep embeddings for a batch. Each batch entry has one timestep, except for its leading clean
tokens, if any, which have timestep 0.

Leading tokens are clean if they are given rather than generated, for example the tokens of a start
image.
"""

# B batch entries, T tokens of an entry on this rank, D width, K vectors of an embedding

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TimestepEmbeddings:
    """Timestep embeddings for a forward pass. Each embedding has K vectors: 1 for the head, or 6
    for a block.
    """

    row_BKD: torch.Tensor
    """Embedding of each batch entry's timestep, fp32."""
    clean_KD: torch.Tensor | None = None
    """Embedding of timestep 0, fp32. None if no tokens are clean."""
    clean_BT1: torch.Tensor | None = None
    """Mask of the clean tokens, bool. None if no tokens are clean."""

    def plus(self, table_1KD: torch.Tensor) -> list[torch.Tensor]:
        """Add the timestep embeddings to the table's K vectors, and return K tensors that can be
        broadcast to [B, T, D]. An embedding that has one vector is added to all K vectors.
        """
        table = table_1KD.float()
        items = (table + self.row_BKD).unsqueeze(2).unbind(1)
        if self.clean_BT1 is None or self.clean_KD is None:
            return list(items)
        clean = (table[0] + self.clean_KD).unbind(0)
        return [
            torch.where(self.clean_BT1, one, item) for one, item in zip(clean, items, strict=True)
        ]
