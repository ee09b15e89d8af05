# SPDX-License-Identifier: Apache-2.0
"""Tests of sinks that either move along with the window or are replaced by later frames."""

import pytest
import torch

from vllm_omni.model_executor.layers.attention.attention import attention
from vllm_omni.model_executor.layers.attention.rope import apply_rope, rope_tables
from vllm_omni.model_executor.layers.kv_cache.sink_window import (
    SinkWindow,
)
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow

HEAD_DIM, HEADS, GRID = 12, 2, (1, 2)
TOKENS = GRID[0] * GRID[1]
WINDOW, SINK = 6, 2
SIZES = {
    "num_layers": 2,
    "tokens_per_frame": TOKENS,
    "num_heads": HEADS,
    "head_dim": HEAD_DIM,
    "dtype": torch.float32,
}


def make_window(**options: object) -> SinkWindow:
    arguments = {
        "moving": True,
        "window_frames": WINDOW,
        "sink_frames": SINK,
        "device": "cpu",
        **SIZES,
        **options,
    }
    return SinkWindow(**arguments)  # type: ignore[arg-type]


def unrotated(frame: int, layer: int = 0, value: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * layer + 10 * frame + value)
    return torch.randn(TOKENS, HEADS, HEAD_DIM, generator=generator)


def rotated(x_TNH: torch.Tensor, frame: int) -> torch.Tensor:
    return apply_rope(x_TNH, *rope_tables(HEAD_DIM, range(frame, frame + 1), *GRID))


def run(window: KVWindow, frames: range) -> None:
    """Process a chunk as a model does: start it, write every layer, and commit it."""
    if isinstance(window, SinkWindow):
        window.open(frames)
    for layer in range(2):
        keys = torch.cat([rotated(unrotated(frame, layer), frame) for frame in frames])
        window.write(
            layer, frames, keys, torch.cat([unrotated(frame, layer, 1) for frame in frames])
        )
    window.commit(frames.stop)


def fill(window: KVWindow, num_frames: int) -> KVWindow:
    for frame in range(num_frames):
        run(window, range(frame, frame + 1))
    return window


def test_sinks_are_positioned_just_before_the_oldest_frame() -> None:
    """Every query sees the sinks at the distance that they would have if the stream had started one
    window ago.
    """
    window = fill(make_window(), 50)
    keys, values = window.visible(1, range(49, 50))
    query = rotated(unrotated(49, value=2), 49)
    order = [
        *((frame, 50 - WINDOW + frame) for frame in range(SINK)),
        *((frame, frame) for frame in range(46, 50)),
    ]
    expected_keys = torch.cat([rotated(unrotated(frame, 1), position) for frame, position in order])
    expected_values = torch.cat([unrotated(frame, 1, 1) for frame, _ in order])
    expected = attention(query, expected_keys, expected_values)
    torch.testing.assert_close(attention(query, keys, values), expected, atol=1e-5, rtol=0)


def test_a_stream_within_its_window_equals_the_plain_window() -> None:
    plain = KVWindow(window_frames=WINDOW, sink_frames=SINK, device="cpu", **SIZES)  # type: ignore[arg-type]
    assert torch.equal(fill(make_window(), WINDOW).buffer, fill(plain, WINDOW).buffer)


def test_an_abandoned_chunk_leaves_no_trace() -> None:
    window, other = (
        fill(make_window(refresh_threshold=0.5), 20),
        fill(make_window(refresh_threshold=0.5), 20),
    )
    before = {name: tensor.clone() for name, tensor in window.tensors(1).items()}
    window.open(range(20, 21))
    for layer in range(2):
        window.write(
            layer, range(20, 21), torch.full((TOKENS, HEADS, HEAD_DIM), 9.0), torch.ones(1)
        )
    window.decide(21, window.resemblance(21))
    assert all(torch.equal(window.tensors(1)[name], before[name]) for name in before)
    for one in (window, other):
        run(one, range(20, 21))
    assert torch.equal(window.visible(0, range(20, 21))[0], other.visible(0, range(20, 21))[0])


def similarity(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> float:
    cosine = torch.nn.functional.cosine_similarity
    return float(
        sum(
            cosine(x.mean(0).flatten(), y.mean(0).flatten(), dim=0)
            for x, y in zip(a, b, strict=True)
        )
        / 2
    )


def stored(frame: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rotated(unrotated(frame, layer), frame), unrotated(frame, layer, 1)


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 0.3, 1.0])
def test_a_leaving_frame_replaces_the_sink_it_resembles_least(threshold: float) -> None:
    """Each layer decides separately which sink a leaving frame replaces. A simple loop over the
    frames makes the same decisions.
    """
    window = make_window(refresh_threshold=threshold)
    sinks = [list(range(SINK)) for _ in range(2)]
    for frame in range(15):
        run_end = frame + 1
        window.open(range(frame, run_end))
        for layer in range(2):
            window.write(layer, range(frame, run_end), *stored(frame, layer))
        sums = window.resemblance(run_end)
        leaving = run_end - (WINDOW - SINK)
        assert (sums is not None) == (leaving >= SINK), "a frame leaves only when the ring is full"
        if sums is not None:
            window.decide(run_end, sums)
            for layer in range(2):
                close = [
                    similarity(stored(sink, layer), stored(leaving, layer)) for sink in sinks[layer]
                ]
                if min(close) < threshold:
                    sinks[layer][close.index(min(close))] = leaving
        window.commit(run_end)
        assert run_end < SINK or window.sink_at.tolist() == sinks
    assert (sinks != [[0, 1], [0, 1]]) == (threshold > -1)


def test_a_renewed_sink_is_never_visible_twice() -> None:
    window = make_window(refresh_threshold=1.0)
    for frame in range(20):
        window.open(range(frame, frame + 1))
        for layer in range(2):
            window.write(layer, range(frame, frame + 1), *stored(frame, layer))
        values = window.visible(0, range(frame, frame + 1))[1]
        assert len(values.flatten(1).unique(dim=0)) == len(values)
        if (sums := window.resemblance(frame + 1)) is not None:
            window.decide(frame + 1, sums)
        window.commit(frame + 1)


def test_a_fork_and_a_moved_window_continue_identically() -> None:
    window = fill(make_window(refresh_threshold=0.3), 12)
    fork = window.fork()
    before = {name: tensor.clone() for name, tensor in fork.tensors(1).items()}
    run(window, range(12, 13))
    assert all(torch.equal(fork.tensors(1)[name], before[name]) for name in before)
    fork.to("cpu")
    run(fork, range(12, 13))
    assert torch.equal(fork.visible(0, range(12, 13))[0], window.visible(0, range(12, 13))[0])


def test_moving_a_window_discards_uncommitted_decisions() -> None:
    """When a window is moved, a sink replacement that was decided but not committed does not
    overwrite the window's sinks.
    """
    seen = []
    for decides in (True, False):
        window = make_window(refresh_threshold=2.0)
        fill(window, 9)
        sums = window.resemblance(10)
        assert sums is not None
        if decides:
            window.decide(10, sums)
        window.to("cpu")
        run(window, range(10, 11))
        seen.append(window.visible(0, range(10, 11)))
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
