# SPDX-License-Identifier: Apache-2.0
"""Attention masks for packed clips, in which the clean frames precede the noisy ones."""

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def visibility(frames: int, chunk: int, window: int, sink: int) -> torch.Tensor:
    """Return which frame attends to which, bool [2 frames, 2 frames], with clean frames before
    noisy ones.

    A clean frame attends to the clean frames in its chunk's window. A noisy frame attends to the
    same frames, except that the noisy frames of its own chunk replace the clean ones. The window of
    a chunk [a, b) contains the first `sink` frames and all frames from b - (window - sink) to b.
    """
    frame = torch.arange(frames)
    start = frame // chunk * chunk
    end = (start + chunk).unsqueeze(1)
    other = frame.unsqueeze(0)
    retained = (other < sink) | (other >= end - (window - sink))
    before = retained & (other < start.unsqueeze(1))
    own = (other >= start.unsqueeze(1)) & (other < end)
    clean = torch.cat((before | own, torch.zeros_like(own)), dim=1)
    return torch.cat((clean, torch.cat((before, own), dim=1)))


def dense_mask(seen: torch.Tensor, tokens: int) -> torch.Tensor:
    """Convert `visibility` tables [M, 2F, 2F] to bool masks [M, 1, S, S], for attention without
    FlexAttention (on a CPU).
    """
    return seen.repeat_interleave(tokens, 1).repeat_interleave(tokens, 2).unsqueeze(1)


def seen_runs(seen: torch.Tensor, tokens: int) -> torch.Tensor:
    """Convert `visibility` tables [M, 2F, 2F] to int32 [M, 6, S]: the three runs of tokens that
    each token attends to.

    The six rows are the starts and ends of the runs in order. The runs are, at most, the sink
    frames, the later clean frames and the noisy frames. An empty run is (0, 0).
    """
    modes, frames = seen.shape[0], seen.shape[1]
    runs = torch.zeros(modes, 6, frames, dtype=torch.int32)
    for mode in range(modes):
        for frame, row in enumerate(seen[mode].tolist()):
            found = [
                (first, next((other for other in range(first, frames) if not row[other]), frames))
                for first in range(frames)
                if row[first] and (first == 0 or not row[first - 1])
            ]
            if len(found) > 3:
                raise ValueError(
                    f"frame {frame} sees {len(found)} runs of frames, at most 3 can be told"
                )
            for number, (first, end) in enumerate(found):
                runs[mode, 2 * number, frame], runs[mode, 2 * number + 1, frame] = (
                    tokens * first,
                    tokens * end,
                )
    return runs.repeat_interleave(tokens, 2).contiguous()


def block_mask(seen: torch.Tensor, clip_mode: torch.Tensor, tokens: int) -> BlockMask:
    """Return the FlexAttention mask for clips, where clip b has the visibility
    `seen[clip_mode[b]]`.

    All tensors must be on the same device.

    The tokens of one frame do not fill whole blocks, so more than half of the blocks are masked
    token by token. To keep this masking fast, each query's runs are read once, and each key is
    compared only with these runs.
    """
    length = seen.shape[1] * tokens
    runs = seen_runs(seen.cpu(), tokens).to(seen.device)
    mode = clip_mode.to(torch.int32)

    def sees(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        m = mode[b]
        first = (k >= runs[m, 0, q]) & (k < runs[m, 1, q])
        second = (k >= runs[m, 2, q]) & (k < runs[m, 3, q])
        third = (k >= runs[m, 4, q]) & (k < runs[m, 5, q])
        return first | second | third

    return create_block_mask(sees, len(clip_mode), None, length, length, device=seen.device)
