# SPDX-License-Identifier: Apache-2.0
"""`PinnedWindow` stores tokens that every chunk sees, at a chosen rotary distance from the chunk's
frames.
"""

from typing import Any

import pytest
import torch

from vllm_omni.model_executor.layers.attention.attention import attention
from vllm_omni.model_executor.layers.attention.rope import apply_rope, rope_tables
from vllm_omni.model_executor.layers.kv_cache.pinned_window import (
    PinnedWindow,
    pinned_extra_nbytes,
)
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow, kv_window_nbytes

LAYERS, HEADS, HEAD_DIM, PINNED, PER_FRAME, WINDOW = 2, 2, 16, 5, 4, 6


def new_window(storage: torch.dtype | None = None, pinned: int = PINNED) -> PinnedWindow:
    return PinnedWindow(
        num_layers=LAYERS,
        window_frames=WINDOW,
        sink_frames=0,
        tokens_per_frame=PER_FRAME,
        num_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=torch.float32,
        device="cpu",
        storage=storage,
        pinned_tokens=pinned,
    )


def random_heads(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def rotated(x_TNH: torch.Tensor, frames: range) -> torch.Tensor:
    return apply_rope(x_TNH, *rope_tables(HEAD_DIM, frames, 2, 2))


def turned(x_TNH: torch.Tensor, position: int) -> torch.Tensor:
    cos, sin = rope_tables(HEAD_DIM, range(position, position + 1), 1, 1)
    return apply_rope(x_TNH, cos.expand(len(x_TNH), -1), sin.expand(len(x_TNH), -1))


def write_chunk(window: KVWindow, frames: range, seed: int, *, lead: int = 0) -> None:
    for layer in range(LAYERS):
        k = rotated(random_heads(PER_FRAME * len(frames), seed + layer), frames)
        v = random_heads(PER_FRAME * len(frames), 50 + seed + layer)
        if lead:
            k = torch.cat((turned(random_heads(lead, 7), -9), k))
            v = torch.cat((random_heads(lead, 8), v))
        window.write(layer, frames, k, v)


def session(window: PinnedWindow, chunks: int) -> PinnedWindow:
    for chunk in range(chunks):
        frames = range(3 * chunk, 3 * chunk + 3)
        write_chunk(window, frames, 100 * chunk, lead=PINNED if chunk == 0 else 0)
        window.commit(frames.stop)
    return window


@pytest.mark.parametrize("base", [0, 3, 1000])
def test_pinned_keys_are_at_their_distance_from_the_frames(base: int) -> None:
    """Frame f attends to pinned keys as if its position were f - base. The tolerance allows for the
    rounding error of rotations in fp32.
    """
    window = session(new_window(), 4)
    frames = range(12, 15)
    window.place_pinned(base)
    write_chunk(window, frames, 400)
    q = random_heads(PER_FRAME * 3, 900)
    ours = window.attend(0, frames, rotated(q, frames))
    parts = [turned(random_heads(PINNED, 7), -9)]
    values = [random_heads(PINNED, 8)]
    for chunk in (3, 4):
        placed = range(3 * chunk - base, 3 * chunk + 3 - base)
        parts.append(rotated(random_heads(PER_FRAME * 3, 100 * chunk), placed))
        values.append(random_heads(PER_FRAME * 3, 50 + 100 * chunk))
    query = rotated(q, range(12 - base, 15 - base))
    expected = attention(query, torch.cat(parts), torch.cat(values))
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-6)


def test_place_is_computed_from_the_first_chunk() -> None:
    """Pinned keys that have been moved many times and then back are bit-identical to keys that were
    never moved, so rounding errors do not accumulate.
    """
    window = session(new_window(), 2)
    before = window.buffer.clone()
    for base in [*range(1, 40), 0]:
        window.place_pinned(base)
    assert torch.equal(window.buffer, before)


@pytest.mark.parametrize("storage", [None, torch.float8_e4m3fn])
def test_saved_tensors_do_not_depend_on_the_place(storage: torch.dtype | None) -> None:
    """A chunk that moved the pinned keys and was then abandoned does not change the saved state."""
    window = session(new_window(storage), 3)
    before = {name: tensor.float().clone() for name, tensor in window.tensors(3).items()}
    window.place_pinned(6)
    after = window.tensors(3)
    assert {"kv.pinned_keys", "kv.pinned_values"} <= before.keys() == after.keys()
    assert all(torch.equal(after[name].float(), tensor) for name, tensor in before.items())


def test_a_fork_is_independent() -> None:
    """A fork is initially bit-identical to the original window, and later changes to the fork do
    not affect the original window.
    """
    window = session(new_window(), 3)
    window.place_pinned(5)
    other = window.fork()
    assert torch.equal(other.buffer, window.buffer)
    before = window.buffer.clone()
    other.place_pinned(9)
    assert torch.equal(window.buffer, before)
    assert not torch.equal(other.buffer, before)


def test_bytes_are_known_before_allocation() -> None:
    sizes: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "head_dim": HEAD_DIM,
        "dtype": torch.float32,
        "pinned_tokens": PINNED,
    }
    ring = kv_window_nbytes(window_frames=WINDOW, tokens_per_frame=PER_FRAME, **sizes)
    assert new_window().nbytes == ring + pinned_extra_nbytes(**sizes)


def test_without_pinned_tokens_it_is_a_window() -> None:
    window = new_window(pinned=0)
    write_chunk(window, range(3), 0)
    window.commit(3)
    window.place_pinned(4)
    assert sorted(window.tensors(3)) == ["kv.frame0", "kv.frame1", "kv.frame2"]
