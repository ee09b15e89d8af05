# SPDX-License-Identifier: Apache-2.0
"""Windows with FP8 keys and values use half the memory of unquantized windows, have e4m3 precision,
and satisfy the same invariants.
"""

from typing import Any

import pytest
import torch

from vllm_omni.model_executor.layers.kv_cache.quantized_storage import FP8
from vllm_omni.model_executor.layers.kv_cache.sink_window import (
    SinkWindow,
    sink_window_extra_nbytes,
)
from vllm_omni.model_executor.layers.kv_cache.window import KVWindow, kv_window_nbytes
from vllm_omni.model_executor.models.causal_wan.cache import ChunkCache

LAYERS, TOKENS, HEADS, DIM = 2, 5, 3, 16
SIZES: dict[str, Any] = {
    "num_layers": LAYERS,
    "window_frames": 7,
    "tokens_per_frame": TOKENS,
    "num_heads": HEADS,
    "head_dim": DIM,
    "dtype": torch.float32,
}
E4M3 = 2.0**-4
"""Maximum relative error of a value stored with four significant bits."""


def make_window(
    window_type: type[KVWindow] = KVWindow, storage: torch.dtype | None = FP8, **options: Any
) -> KVWindow:
    return window_type(
        **{**SIZES, "sink_frames": 2, "device": "cpu", "storage": storage, **options}
    )


def chunk_kv(frames: range, heads: int = HEADS, size: float = 1.0) -> list[torch.Tensor]:
    """Return every layer's keys and values. Shape: [L, 2, T, N, H]. Head n's values are 30^n times
    as large as head 0's.
    """
    generator = torch.Generator().manual_seed(frames.start)
    kv = torch.randn(LAYERS, 2, len(frames) * TOKENS, HEADS, DIM, generator=generator)
    return list(size * kv[:, :, :, :heads] * 30.0 ** torch.arange(heads)[:, None])


def write(window: KVWindow, frames: range, **kv: Any) -> None:
    for layer, (k, v) in enumerate(chunk_kv(frames, **kv)):
        window.write(layer, frames, k, v)


def run(window: KVWindow, num_frames: int, chunk: int = 3) -> KVWindow:
    for start in range(0, num_frames, chunk):
        frames = range(start, start + chunk)
        if isinstance(window, SinkWindow):
            window.open(frames)
        write(window, frames)
        window.commit(frames.stop)
    return window


def seen(window: KVWindow, frames: range) -> torch.Tensor:
    """Return the keys and values that the chunk with these frames sees. Shape: [L, 2, S, N, H]."""
    return torch.stack([torch.stack(window.visible(layer, frames)) for layer in range(LAYERS)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_value_keeps_four_bits(dtype: torch.dtype) -> None:
    """Every value keeps four significant bits, whatever the magnitude of its head's values. Only
    values at least a thousand times smaller than their head's largest value may be less precise.
    """
    fp8, plain = (run(make_window(storage=storage, dtype=dtype), 15) for storage in (FP8, None))
    retained, wanted = (seen(window, range(12, 15)) for window in (fp8, plain))
    assert retained.dtype == dtype and fp8.buffer.dtype == FP8
    floor = 2.0**-13 * wanted.abs().amax(dim=(2, 4), keepdim=True).float()
    assert (
        (retained.float() - wanted.float()).abs() <= 1.01 * E4M3 * wanted.float().abs() + floor
    ).all()
    assert not torch.equal(retained, wanted)


def test_bytes_equal_the_estimate_and_half_of_bfloat16() -> None:
    window = make_window(SinkWindow, moving=True)
    sizes = {**SIZES, "storage": FP8}
    extra = sink_window_extra_nbytes(
        sink_frames=2, **{name: size for name, size in sizes.items() if name != "window_frames"}
    )
    assert window.nbytes == kv_window_nbytes(**sizes) + extra
    full = {**SIZES, "tokens_per_frame": 1560, "dtype": torch.bfloat16}
    assert kv_window_nbytes(**full, storage=FP8) == pytest.approx(
        kv_window_nbytes(**full) / 2, rel=1e-3
    )


def test_the_last_pass_over_the_first_chunk_sets_the_scale() -> None:
    """Earlier passes over the first chunk and abandoned chunks do not affect the scale, however
    large their values are.
    """
    window, other = make_window(), make_window()
    write(window, range(3), size=1000.0)
    run(window, 6)
    run(other, 6)
    write(window, range(6, 9), size=0.1)
    for name, tensor in other.tensors(3).items():
        assert torch.equal(tensor.float(), window.tensors(3)[name].float()), name


def test_later_values_beyond_the_range_are_saturated() -> None:
    window = run(make_window(), 3)
    largest = seen(window, range(3)).abs().amax(dim=(2, 4))
    write(window, range(3, 6), size=1000.0)
    retained = seen(window, range(3, 6))
    assert retained.isfinite().all()
    assert (retained.abs().amax(dim=(2, 4)) > 10 * largest).all(), (
        "there is room above the first chunk"
    )


def test_a_head_of_zeros_stays_zero() -> None:
    window = make_window()
    for layer in range(LAYERS):
        window.write(layer, range(3), *torch.zeros(2, 3 * TOKENS, HEADS, DIM))
    assert not seen(window, range(3)).any()


def test_a_fork_keeps_its_own_scales() -> None:
    window = run(make_window(), 6)
    fork, before = window.fork(), seen(window, range(3, 6))
    write(fork, range(3), size=500.0)
    assert torch.equal(seen(window, range(3, 6)), before)
    fork.to("cpu")
    fork.close()


def test_moved_sinks_equal_those_of_the_plain_window_up_to_rounding() -> None:
    """A sink is always rotated from its stored value rather than from its previous rotation, so
    rounding errors do not accumulate.
    """
    fp8, plain = (run(make_window(SinkWindow, storage, moving=True), 60) for storage in (FP8, None))
    for window in (fp8, plain):
        assert isinstance(window, SinkWindow)
        window.open(range(60, 63))
    retained, wanted = (window.buffer[:, :, : 2 * TOKENS].float() for window in (fp8, plain))
    scales = fp8.format.scales
    assert scales is not None
    error = (retained * scales[:, :, None, :, None] - wanted).abs()
    assert (error <= 2.2 * E4M3 * wanted.abs().amax(dim=-1, keepdim=True)).all()


def test_fp8_and_plain_windows_renew_the_same_sinks() -> None:
    """FP8 windows compute sink similarity from dequantized values, so each head has the same weight
    as in unquantized windows, whatever the magnitude of its values.
    """
    renewed = []
    for storage in (FP8, None):
        window = make_window(SinkWindow, storage, moving=True, refresh_threshold=0.9)
        assert isinstance(window, SinkWindow)
        for frame in range(12):
            frames = range(frame, frame + 1)
            window.open(frames)
            write(window, frames)
            if (sums := window.resemblance(frames.stop)) is not None:
                window.decide(frames.stop, sums)
            window.commit(frames.stop)
        renewed.append(window.sink_at)
    assert torch.equal(*renewed)
    assert (renewed[0] != torch.arange(2)).any(), "some were"


def test_the_last_step_defines_the_first_chunk_of_every_window() -> None:
    windows = [make_window() for _ in range(3)]
    cache = ChunkCache.noise_matched(windows)
    for step, window in enumerate(windows):
        write(window, range(3), size=10.0 ** (3 - step))
    cache.commit(3)
    first = seen(windows[-1], range(3))
    for window in windows:
        assert torch.equal(seen(window, range(3)), first)


def test_an_unsupported_storage_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not torch\.float8_e5m2"):
        make_window(storage=torch.float8_e5m2)
