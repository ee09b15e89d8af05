# SPDX-License-Identifier: Apache-2.0
"""A new window that reuses pooled memory starts empty. Pooled memory is freed when memory runs
low.
"""

import pytest
import torch

from vllm_omni.model_executor.layers.kv_cache.memory_pool import MemoryPool, Ring
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow

FP8 = torch.float8_e4m3fn


def window(
    rings: MemoryPool[Ring] | None,
    frames: int = 4,
    storage: torch.dtype | None = None,
    device: str = "cpu",
) -> KVWindow:
    return KVWindow(
        num_layers=2,
        window_frames=frames,
        sink_frames=1,
        tokens_per_frame=2,
        num_heads=2,
        head_dim=4,
        dtype=torch.float32,
        device=device,
        storage=storage,
        rings=rings,
    )


def fill(held: KVWindow, frames: int = 4, factor: float = 100.0) -> None:
    device = held.buffer.device
    for layer in range(2):
        k_TNH, v_TNH = (factor * torch.randn(2 * frames, 2, 4, device=device) for _ in range(2))
        held.write(layer, range(frames), k_TNH, v_TNH)
    held.commit(frames)


@pytest.mark.parametrize("storage", [None, FP8])
def test_a_new_window_reuses_the_memory_of_a_closed_one_empty(
    storage: torch.dtype | None,
) -> None:
    rings: MemoryPool[Ring] = MemoryPool()
    first = window(rings, storage=storage)
    fill(first)
    positions = first.buffers
    first.close()
    first.close()
    assert len(rings) == 1 and rings.nbytes > 0
    again, fresh = window(rings, storage=storage), window(None, storage=storage)
    assert [id(position) for position in again.buffers] == [
        id(position) for position in positions
    ] and len(rings) == 0
    assert again.committed_frames == 0
    for got, want in zip(again.buffers, fresh.buffers, strict=True):
        torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0)


def test_a_closed_window_no_longer_references_its_memory() -> None:
    """A chunk still in flight on a closed window cannot write into the next session's memory."""
    rings: MemoryPool[Ring] = MemoryPool()
    first = window(rings)
    first.close()
    again = window(rings)
    assert first.buffer.numel() == 0 and again.buffer.numel() > 0


@pytest.mark.parametrize("storage", [None, FP8])
def test_a_fork_has_separate_memory(storage: torch.dtype | None) -> None:
    """A fork does not share memory with its source window. If the pool contains a closed window's
    memory, the fork reuses it.
    """
    rings: MemoryPool[Ring] = MemoryPool()
    source, closed = window(rings, storage=storage), window(rings, storage=storage)
    fill(source)
    fill(closed, factor=3.0)
    retained = closed.buffers
    closed.close()
    forks = [source.fork(), source.fork()]
    assert [id(position) for position in forks[0].buffers] == [
        id(position) for position in retained
    ]
    for fork in forks:
        assert not {id(position) for position in fork.buffers} & {
            id(position) for position in source.buffers
        }
        for got, want in zip(fork.buffers, source.buffers, strict=True):
            torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0)


def test_pooled_memory_of_other_sizes_is_freed_when_a_ring_is_allocated() -> None:
    rings: MemoryPool[Ring] = MemoryPool()
    windows = [window(rings), window(rings)]
    for held in windows:
        held.close()
    larger = window(rings, frames=5)
    assert len(rings) == 0
    larger.close()
    assert len(rings) == 1


def test_pooled_memory_is_freed_oldest_first() -> None:
    rings: MemoryPool[Ring] = MemoryPool()
    windows = [window(rings) for _ in range(3)]
    positions, each = [held.buffer for held in windows], windows[0].nbytes
    for held in windows:
        held.close()
    rings.trim(2 * each)
    assert len(rings) == 2
    assert [id(window(rings).buffer) for _ in range(2)] == [
        id(position) for position in positions[1:]
    ]
    rings.trim(0)
    assert rings.nbytes == 0


def test_a_session_may_be_closed_outside_inference_mode() -> None:
    """A session can be closed outside inference mode, for example when an operator closes it. The
    session's window was created in inference mode, and torch forbids in-place writes to its tensors
    outside that mode.
    """
    rings: MemoryPool[Ring] = MemoryPool()
    with torch.inference_mode():
        first = window(rings)
        fill(first)
    first.close()
    with torch.inference_mode():
        assert not window(rings).buffer.any()


def test_moved_memory_is_not_pooled() -> None:
    """Window memory that has moved to another address is not pooled, because no CUDA graph refers
    to the new address.
    """
    rings: MemoryPool[Ring] = MemoryPool()
    held = window(rings)
    held.to("cpu")
    held.close()
    assert len(rings) == 0


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the memory of a GPU")
@pytest.mark.parametrize("storage", [None, FP8])
def test_a_suspended_window_lends_its_memory_and_returns(storage: torch.dtype | None) -> None:
    """While a suspended window is in host memory, another window may use its device memory. When
    the suspended window returns to the device, it uses memory from the pool, and its contents are
    the same as before.
    """
    rings: MemoryPool[Ring] = MemoryPool()
    with torch.inference_mode():
        held = window(rings, storage=storage, device="cuda:0")
        fill(held)
        before = [held.format.load(0, held.buffer[0]).clone(), held.buffer.clone()]
    address = held.buffer.data_ptr()
    held.to("cpu")
    assert held.buffer.is_pinned()
    with torch.inference_mode():
        other = window(rings, storage=storage, device="cuda:0")
    assert other.buffer.data_ptr() == address
    other.close()
    held.to("cuda:0")
    assert held.buffer.data_ptr() == address
    after = [held.format.load(0, held.buffer[0]), held.buffer]
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(before, after, strict=True)
    )
    held.to("cpu")
    held.close()
    assert len(rings) == 1  # host memory is not pooled
