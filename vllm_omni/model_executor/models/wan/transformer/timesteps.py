# SPDX-License-Identifier: Apache-2.0
"""Timesteps of a batch: one for each entry, and timestep 0 for its leading clean tokens.

The leading tokens are clean from the start, for example those of a start image.
"""

# B batch entries, T tokens of an entry on this rank, D width, K vectors of an embedding

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TimestepEmbeddings:
    """Embeddings of a forward pass's timesteps, with K vectors each: 1 for the head, 6 for a
    block."""

    row_BKD: torch.Tensor
    """Embedding of each batch entry's timestep, fp32."""
    clean_KD: torch.Tensor | None = None
    """Embedding of timestep 0, fp32. None: no token is clean."""
    clean_BT1: torch.Tensor | None = None
    """Whether each token is clean. None: no token is clean."""

    def plus(self, table_1KD: torch.Tensor) -> list[torch.Tensor]:
        """Return the sum of each of the table's K vectors and the time embedding, broadcastable to
        [B, T, D]. `self` has K vectors or one."""
        table = table_1KD.float()
        items = (table + self.row_BKD).unsqueeze(2).unbind(1)
        if self.clean_BT1 is None or self.clean_KD is None:
            return list(items)
        clean = (table[0] + self.clean_KD).unbind(0)
        return [
            torch.where(self.clean_BT1, one, item) for one, item in zip(clean, items, strict=True)
        ]
