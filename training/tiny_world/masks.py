# SPDX-License-Identifier: Apache-2.0
"""Masks of packed clips: which frame sees which, clean frames before noisy ones."""

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def visibility(frames: int, chunk: int, window: int, sink: int) -> torch.Tensor:
    """Return which frame sees which, bool [2 frames, 2 frames], clean before noisy ones.

    A clean frame sees the clean ones of its chunk's window, a noisy one the same but its own
    chunk's noisy ones for the clean ones. A chunk [a, b) has in its window the first `sink` frames
    and those from b - (window - sink) on.
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
    """[M, 2F, 2F] of `visibility` -> bool [M, 1, S, S], for attention without FlexAttention
    (CPU).
    """
    return seen.repeat_interleave(tokens, 1).repeat_interleave(tokens, 2).unsqueeze(1)


def seen_runs(seen: torch.Tensor, tokens: int) -> torch.Tensor:
    """`visibility` tables [M, 2F, 2F] -> int32 [M, 6, S]: of each token, the three runs of tokens
    that it sees.

    Rows are first and end of the sinks, of the later clean frames and of the noisy ones; an empty
    run is (0, 0).
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
    """Return FlexAttention's mask of clips whose `visibility` is `seen[clip_mode[b]]`.

    All on one device.

    Tokens of one frame are no whole blocks, so more than half of the blocks are masked one by one:
    each query's runs are read once, a key is only compared.
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
