# SPDX-License-Identifier: Apache-2.0
"""The K/V window, which has sink frames and a ring buffer, returns the same keys as the original
implementation's buffer, which shifts its contents in memory.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni.model_executor.layers.kv_cache.window import KVWindow
from vllm_omni.outputs import RequestFailed
from vllm_omni.testing.parity.rollouts import chronological, ends

S = 2  # tokens per frame


def make_window(window: int, sink: int, **options: Any) -> KVWindow:
    return KVWindow(
        num_layers=2,
        window_frames=window,
        sink_frames=sink,
        tokens_per_frame=S,
        num_heads=1,
        head_dim=1,
        dtype=torch.float32,
        device="cpu",
        **options,
    )


def tokens_of(frames: range, noise: float = 0.0) -> torch.Tensor:
    """Return one value per token that identifies the token: f + t/10 (+ noise) for token t of frame
    f.
    """
    values = [[frame + token / 10 + noise] for frame in frames for token in range(S)]
    return torch.tensor(values).unsqueeze(1)


def write(window: KVWindow, frames: range, noise: float = 0.0) -> None:
    for layer in range(2):
        keys = tokens_of(frames, noise) + 1000 * layer
        window.write(layer, frames, keys, -keys)


class RollingBuffer:
    """The original implementation's buffer. It appends tokens while there is room. Once it is full,
    it shifts all tokens after the sinks to the left.
    """

    def __init__(self, capacity_frames: int, sink_frames: int) -> None:
        self.capacity = capacity_frames * S
        self.sink = sink_frames * S
        self.tokens: list[float] = []
        self.total = 0

    def append(self, frames: range) -> None:
        new = tokens_of(frames).flatten().tolist()
        evicted = max(0, len(self.tokens) + len(new) - self.capacity)
        self.tokens = self.tokens[: self.sink] + self.tokens[self.sink + evicted :] + new
        self.total += len(new)


@given(
    sink=st.integers(0, 4),
    extra=st.integers(0, 5),
    chunk=st.integers(1, 4),
    chunks=st.integers(1, 12),
    limit=st.none() | st.integers(8, 20),
)
@settings(max_examples=150, deadline=None)
def test_a_chunk_sees_the_keys_of_the_rolling_buffer(
    sink: int, extra: int, chunk: int, chunks: int, limit: int | None
) -> None:
    """For all window, sink and chunk lengths, the window has the same visible keys, counters and
    chronological content as the rolling buffer.
    """
    window = make_window(sink + chunk + extra, sink, max_attention_tokens=limit)
    reference = RollingBuffer(sink + chunk + extra, sink)
    for index in range(chunks):
        frames = range(index * chunk, (index + 1) * chunk)
        window.check_frames(frames)
        write(window, frames, noise=0.5)  # a noisy step comes first
        write(window, frames)
        reference.append(frames)
        visible = reference.tokens if limit is None else reference.tokens[-limit:]
        for layer in range(2):
            k, v = window.visible(layer, frames)
            assert sorted((k.flatten() - 1000 * layer).tolist()) == pytest.approx(
                sorted(visible), abs=1e-3
            )
            torch.testing.assert_close(v, -k)
        window.commit(frames.stop)
        assert ends(window) == (reference.total, len(reference.tokens))
        ordered = chronological(window, 0)[0].flatten().tolist()
        assert ordered[: len(reference.tokens)] == pytest.approx(reference.tokens)
        assert not any(ordered[len(reference.tokens) :])


def test_reading_the_window_copies_nothing() -> None:
    window = make_window(7, 2)
    for start in range(0, 12, 3):
        write(window, range(start, start + 3))
        window.commit(start + 3)
        k, v = window.visible(1, range(start, start + 3))
        assert k.untyped_storage().data_ptr() == window.buffer.untyped_storage().data_ptr()
        assert v.untyped_storage().data_ptr() == window.buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("committed", [3, 6, 9, 30])
def test_an_abandoned_chunk_changes_no_live_tensor(committed: int) -> None:
    """An abandoned chunk has written its noisy steps' keys and values only to slots that no later
    chunk can see.
    """
    window = make_window(7, 2)
    for start in range(0, committed, 3):
        write(window, range(start, start + 3))
        window.commit(start + 3)
    before = {name: tensor.clone() for name, tensor in window.tensors(3).items()}
    write(window, range(committed, committed + 3), noise=0.25)
    after = window.tensors(3)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    write(window, range(committed, committed + 3))
    k, _ = window.visible(0, range(committed, committed + 3))
    assert not torch.isclose(k % 1, torch.tensor(0.25)).any()


def test_live_tensors_are_the_frames_that_the_next_chunk_sees() -> None:
    window = make_window(7, 2)
    for start in range(0, 12, 3):
        write(window, range(start, start + 3))
        window.commit(start + 3)
    assert list(window.tensors(3)) == [f"kv.frame{frame}" for frame in (0, 1, 10, 11)]
    assert window.tensors(3)["kv.frame10"][0, 0].flatten().tolist() == pytest.approx([10.0, 10.1])


def test_a_fork_diverges() -> None:
    window = make_window(7, 2)
    write(window, range(3))
    window.commit(3)
    fork = window.fork()
    write(fork, range(3, 6))
    fork.commit(6)
    assert window.committed_frames == 3
    assert not window.buffer[:, :, 3 * S :].any()
    assert torch.equal(fork.buffer[:, :, : 3 * S], window.buffer[:, :, : 3 * S])


def test_global_attention_keeps_all_frames_until_it_is_full() -> None:
    window = make_window(6, 6)
    for start in (0, 3):
        window.check_frames(range(start, start + 3))
        write(window, range(start, start + 3))
        window.commit(start + 3)
    assert window.visible(0, range(3, 6))[0].shape[0] == 6 * S
    with pytest.raises(RequestFailed, match="session_full: global attention holds 6 latent frames"):
        window.check_frames(range(6, 9))


def test_a_chunk_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(RequestFailed, match="chunk_too_large: a chunk of 4 latent frames"):
        make_window(6, 3).check_frames(range(6, 10))


@pytest.mark.parametrize(("window", "sink"), [(0, 0), (3, 4), (3, -1)])
def test_impossible_windows_are_refused(window: int, sink: int) -> None:
    with pytest.raises(ValueError, match="0 <= sink_frames <= window_frames"):
        make_window(window, sink)
