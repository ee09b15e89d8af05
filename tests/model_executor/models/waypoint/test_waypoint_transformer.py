# SPDX-License-Identifier: Apache-2.0
"""Tests of the Waypoint network without an engine: batches, aborted frames, and the two sets of
lookup tables.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_waypoint_weights import load, recorded

from vllm_omni.model_executor.models.waypoint.state import FrameRings
from vllm_omni.model_executor.models.waypoint.transformer import FrameItem, WaypointTransformer


@pytest.fixture
def model(tmp_path: Path) -> WaypointTransformer:
    return load(*recorded("wp15"), tmp_path)


def item(
    model: WaypointTransformer, seed: int, window: FrameRings, frame: int = 0, sigma: float = 0.9
) -> FrameItem:
    draw = torch.Generator().manual_seed(seed)
    controls = model.controls(torch.randn(model.config.control_values, generator=draw))
    latents = torch.randn(model.config.latent_shape, generator=draw)
    common: dict[str, Any] = {"rope": model.rope(frame), "control": controls, "window": window}
    return FrameItem(latents=latents, sigma=sigma, slot=window.frame_slot(frame), **common)


def rings(model: WaypointTransformer) -> FrameRings:
    layers, heads = range(model.config.n_layers), model.config.n_kv_heads
    return FrameRings(model.config, layers, num_heads=heads, dtype=torch.float32, device="cpu")


def committed(model: WaypointTransformer, seed: int, frames: int) -> FrameRings:
    held = rings(model)
    for frame in range(frames):
        model([item(model, seed + frame, held, frame, 0.0)])
        held.commit(frame + 1)
    return held


def test_a_request_has_the_same_bits_in_a_batch(model: WaypointTransformer) -> None:
    """A request produces bit-identical latents whether it is run alone or batched with sessions of
    other ages and at other steps.
    """
    windows, sigmas = [committed(model, 10 * age, age) for age in (0, 3, 9)], (1.0, 0.3, 0.0)

    def items() -> list[FrameItem]:
        cases = enumerate(zip(windows, sigmas, strict=True))
        return [
            item(model, 77 + i, held.fork(), held.committed_frames, sigma)
            for i, (held, sigma) in cases
        ]

    alone = torch.cat([model([one]) for one in items()])
    assert torch.equal(model(items()), alone)


def test_tables_stay_on_the_host() -> None:
    _, config = recorded("wp15")
    with torch.device("meta"):
        tables = WaypointTransformer(config).tables
    assert {table.device.type for table in (tables.noise, tables.xy, tables.time)} == {"cpu"}
