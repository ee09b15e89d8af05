# SPDX-License-Identifier: Apache-2.0
"""A `KVWindow` in the layout of the original implementations, whose recorded caches it is
compared with.
"""

import torch

from vllm_omni.model_executor.layers.kv_cache.window import KVWindow


def ends(window: KVWindow) -> tuple[int, int]:
    """Return (tokens ever committed, valid tokens in the buffer), the original's two counters."""
    size = window.tokens_per_frame
    return window.committed_frames * size, min(window.committed_frames, window.window_frames) * size


def chronological(window: KVWindow, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of (k, v) `[window tokens, N, H]`: oldest first, zeros at the end."""
    order = window.token_positions(
        [window.slot(frame) for frame in window.visible_frames(window.committed_frames)]
    )
    out = torch.zeros_like(window.buffer[layer])
    out[:, : len(order)] = window.buffer[layer].index_select(1, order)
    return out[0], out[1]
