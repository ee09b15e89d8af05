# SPDX-License-Identifier: Apache-2.0
"""Tests that compare the two kinds of K/V ring buffers with a reference implementation that uses a
list of frames.
"""

import pytest
import torch
from msgspec.structs import replace
from test_waypoint_config import RELEASED

from vllm_omni.model_executor.models.waypoint.config import WaypointConfig
from vllm_omni.model_executor.models.waypoint.state import FrameRings
from vllm_omni.testing.parity.waypoint import cached_frames, history

SMALL = replace(
    WaypointConfig.from_checkpoint(RELEASED),
    d_model=16,
    n_heads=2,
    n_kv_heads=1,
    n_layers=4,
    height=1,
    width=2,
    tokens_per_frame=2,
    local_window=3,
    global_window=8,
    global_pinned_dilation=4,
)
LOCAL, GLOBAL = 0, 3


def rings(config: WaypointConfig = SMALL) -> FrameRings:
    layers, heads = range(config.n_layers), config.n_kv_heads
    return FrameRings(config, layers, num_heads=heads, dtype=torch.float32, device="cpu")


def kv(config: WaypointConfig, value: float) -> torch.Tensor:
    return torch.full((config.tokens_per_frame, config.n_kv_heads, config.head_dim), value)


def seen(held: FrameRings, layer: int, frame: int) -> list[float]:
    window, index = held.window(layer)
    k, v = window.visible(index, range(frame, frame + 1))
    assert torch.equal(k, -v)
    return sorted(set(k.flatten().tolist()))


def write(held: FrameRings, frame: int, value: float) -> None:
    for layer in held.layers:
        window, index = held.window(layer)
        window.write(index, range(frame, frame + 1), kv(SMALL, value), -kv(SMALL, value))


def run(held: FrameRings, frames: range) -> None:
    for frame in frames:
        write(held, frame, frame)
        held.commit(frame + 1)


@pytest.mark.parametrize(("window", "dilation"), [(8, 4), (6, 2), (4, 4), (3, 1), (16, 8)])
def test_a_frame_sees_the_frames_of_the_plain_rule(window: int, dilation: int) -> None:
    """A frame sees the same frames as in the reference implementation, even while its own slot
    contains noisy values.
    """
    config = replace(SMALL, global_window=window, global_pinned_dilation=dilation)
    held, stored = rings(config), list[int]()
    for frame in range(40):
        last = [g for g in stored if g < frame][-(window // dilation) :]
        expected = [g for g in last if g > frame - window] if frame % dilation == 0 else last
        assert history(held, GLOBAL, frame) == expected
        assert history(held, LOCAL, frame) == list(range(max(0, frame - 2), frame))
        for value in (1000.5, float(frame)):
            write(held, frame, value)
            assert seen(held, GLOBAL, frame) == [*map(float, expected), value]
        held.commit(frame + 1)
        stored += [frame] if frame % dilation == 0 else []
        assert cached_frames(held, GLOBAL) == stored[-(window // dilation) :]


def test_an_aborted_frame_leaves_no_trace() -> None:
    for end in range(1, 20):
        left, other = rings(), rings()
        run(left, range(end))
        run(other, range(end))
        write(other, end, 777.0)
        a, b = left.tensors(1), other.tensors(1)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_forks_and_restored_rings_continue_identically() -> None:
    for end in range(1, 20):
        first = rings()
        run(first, range(end))
        fork, copy = first.fork(), rings()
        copy.commit(end)
        for name, tensor in copy.tensors(1).items():
            tensor.copy_(first.tensors(1)[name])
        for frame in range(end, end + 9):
            for held in (first, fork, copy):
                run(held, range(frame, frame + 1))
            for layer in (LOCAL, GLOBAL):
                assert (
                    seen(first, layer, frame)
                    == seen(copy, layer, frame)
                    == seen(fork, layer, frame)
                )
